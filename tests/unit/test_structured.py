"""What `structured` may be, what is refused and how, and what the compiled grammars say."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import BaseModel

from draftwood.errors import ConfigError, DraftwoodError, MissingExtraError
from draftwood.grammars import GrammarCompiler
from draftwood.sampling import SamplingParams, StructuredOutputsParams
from draftwood.sampling.grammar import Grammar, Matcher
from draftwood.text import Tokenizer
from tests.tiny import bpe_backend, tiny_llm

TOKENIZER = Tokenizer(bpe_backend())
COMPILER = GrammarCompiler(TOKENIZER, len(TOKENIZER))
[EOS] = TOKENIZER.eos_token_ids


class Animal(BaseModel):
    name: str
    legs: int


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def matcher(tokens: Sequence[int] = (), **form: Any) -> Matcher:
    """A fresh matcher that has consumed `tokens`."""
    made = COMPILER.matcher(StructuredOutputsParams(**form))
    assert all(made.consume(token) for token in tokens)
    return made


def accepts(text: str, **form: Any) -> bool:
    """Whether a text may be written token by token and then end."""
    made = matcher(**form)
    for token in ids(text):
        if not made.consume(token):
            return False
    return bool(made.legal()[EOS])


# --- parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, ["no kind of form", "json", "regex"]),
        ({"json": None}, ["no kind of form"]),
        ({"json_object": False}, ["no kind of form"]),
        ({"regex": "a", "choice": ["a"]}, ["regex and choice", "exactly one"]),
        ({"json": True, "json_object": True}, ["json and json_object"]),
        ({"json": "{"}, ["json is not valid JSON"]),
        ({"json": "3"}, ["json is '3'", "an object"]),
        ({"json": "false"}, ["json is 'false'"]),
        ({"json": 3}, ["json is 3"]),
        ({"json": {"const": {1, 2}}}, ["json is not valid JSON"]),
        ({"regex": ""}, ["regex is ''", "non-empty"]),
        ({"regex": 3}, ["regex is 3"]),
        ({"grammar": ""}, ["grammar is ''"]),
        ({"choice": "ab"}, ["choice is 'ab'", "list"]),
        ({"choice": []}, ["choice is []"]),
        ({"choice": ["a", ""]}, ["non-empty strings"]),
        ({"choice": ["a", 1]}, ["non-empty strings"]),
        ({"xml": "a"}, ["unknown field", "'xml'", "known are json"]),
        ({"regex": "a", "whitespace_pattern": " "}, ["white space"]),
        ({"choice": ["a"], "disable_any_whitespace": True}, ["white space"]),
        ({"json": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, ["one of"]),
        ({"json": True, "whitespace_pattern": 3}, ["whitespace_pattern is 3"]),
    ],
)
def test_a_wrong_form_is_refused_when_parameters_are_made(
    form: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(structured=form)
    for word in words:
        assert word in str(caught.value)


def test_what_is_no_form_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="structured is 'json'"):
        SamplingParams(structured="json")  # type: ignore[arg-type]


def test_ignore_eos_contradicts_a_form() -> None:
    with pytest.raises(ConfigError, match=r"ignore_eos is True.*structured"):
        SamplingParams(structured={"regex": "a"}, ignore_eos=True)


def test_equal_forms_are_equal_however_they_are_given() -> None:
    schema = {"type": "object"}
    forms = [
        SamplingParams(structured=StructuredOutputsParams(json=schema)).structured,
        SamplingParams(structured={"json": schema}).structured,
        SamplingParams.from_dict({"structured": {"json": '{"type": "object"}'}}).structured,
        SamplingParams(structured={"json": schema}).but(seed=1).structured,
    ]
    assert all(isinstance(form, StructuredOutputsParams) for form in forms)
    assert len(set(forms)) == 1
    assert StructuredOutputsParams(json=Animal).schema is not None


# --- compiling ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "("}, ["regex cannot be used", "unclosed group"]),
        ({"regex": "(?=a)b"}, ["look-around"]),
        ({"regex": r"(a)\1"}, ["backreferences"]),
        ({"json": {"type": "objekt"}}, ["json cannot be used", "objekt"]),
        ({"json": {"$ref": "http://x/y"}}, ["http://x/y"]),
        ({"json": {"not": {"type": "string"}}}, ["not"]),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, ["minimum"]),
        ({"json": {"type": "string", "pattern": "("}}, ["unclosed group"]),
        ({"grammar": "begin: \"a\""}, ["grammar cannot be used", "start"]),
        ({"grammar": "start: rest"}, ["unknown name", "rest"]),
        ({"grammar": 'start: "a'}, ["lexer error"]),
        ({"grammar": 'start: start "a"'}, ["nothing may follow"]),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_before_anything_runs(
    form: dict[str, Any], words: list[str]
) -> None:
    """In one line, and without leaving a request behind."""
    llm = tiny_llm(vocab_size=len(TOKENIZER), tokenizer=TOKENIZER)
    with pytest.raises(ConfigError) as caught:
        llm.generate([[1, 2], [3]], [SamplingParams(), SamplingParams(structured=form)])
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_work


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(TOKENIZER, len(TOKENIZER))
    with pytest.raises(MissingExtraError, match=r"llguidance.*draftwood\[grammar\]"):
        compiler.matcher(StructuredOutputsParams(regex="a"))


class OtherTokenizer:
    """A transformers tokenizer that is not a fast one."""

    eos_token_id = 1
    all_special_ids = (1,)
    is_fast = False

    def __len__(self) -> int:
        return 5


def test_a_slow_tokenizer_is_refused() -> None:
    compiler = GrammarCompiler(Tokenizer(OtherTokenizer()), 5)
    with pytest.raises(ConfigError, match=r"fast tokenizer.*OtherTokenizer"):
        compiler.matcher(StructuredOutputsParams(regex="a"))


def test_a_tokenizer_without_an_end_is_refused() -> None:
    compiler = GrammarCompiler(Tokenizer(bpe_backend(), eos_token_ids=[]), len(TOKENIZER))
    with pytest.raises(ConfigError, match="end-of-sequence"):
        compiler.matcher(StructuredOutputsParams(regex="a"))


def test_an_engine_without_a_compiler_refuses() -> None:
    llm = tiny_llm()
    engine = type(llm.engine)(
        llm.model, llm.tokenizer, llm.engine.drafter.inner, llm.pool, llm.config
    )
    with pytest.raises(DraftwoodError, match="without a compiler"):
        engine.add([1], SamplingParams(structured={"regex": "a"}))


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TOKENIZER, len(TOKENIZER))
    compiled: list[StructuredOutputsParams] = []
    compile_ = GrammarCompiler._compile

    def spy(self: GrammarCompiler, params: StructuredOutputsParams) -> Any:
        compiled.append(params)
        return compile_(self, params)

    monkeypatch.setattr(GrammarCompiler, "_compile", spy)
    for _ in range(3):
        first = compiler.matcher(StructuredOutputsParams(regex="ab"))
        assert first.consume(ids("a")[0])
    compiler.matcher(StructuredOutputsParams(regex="ac"))
    assert len(compiled) == 2
    for i in range(70):
        compiler.matcher(StructuredOutputsParams(choice=[f"x{i}"]))
    assert len(compiler._compiled) == 64


# --- what grammars say -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["yes", "no way", 'a "b" c', "back\\slash", "new\nline", "tab\t", "\x01", "naïve", "東京 🌲",
     "/", "<|im_end|>", "{}", "a|b", "'", "\u2028"],
)  # fmt: skip
def test_a_choice_is_taken_literally(text: str) -> None:
    """Whatever characters it is made of; what reads as a special token is plain text."""
    made = matcher(choice=[text, "other"])
    spelled = [TOKENIZER.encode(letter)[0] for letter in "<|im_end|>"]
    tokens = spelled if text == "<|im_end|>" else ids(text)
    assert all(made.consume(token) for token in tokens)
    assert made.legal()[EOS]
    assert made.sole() is None
    assert not matcher(choice=[text]).consume(ids("q")[0])


def test_one_choice_may_begin_another() -> None:
    for text, end in (("the", True), ("the fox", True), ("the f", False), ("", False)):
        assert accepts(text, choice=["the", "the fox"]) is end


def test_a_regular_expression_is_matched_whole() -> None:
    assert accepts("a/b", regex="a/b")
    assert not accepts("xa/b", regex="a/b")
    assert not accepts("a/bx", regex="a/b")
    assert accepts("a\nb", regex="a\\nb")


def test_white_space_of_json_can_be_set() -> None:
    spaced, tight = '{"name": "x", "legs": 1}', '{"name":"x","legs":1}'
    assert accepts(spaced, json=Animal)
    assert accepts(tight, json=Animal)
    assert not accepts(spaced, json=Animal, disable_any_whitespace=True)
    assert accepts(tight, json=Animal, disable_any_whitespace=True)
    assert accepts(spaced, json=Animal, whitespace_pattern=" ?")
    assert not accepts(spaced.replace(" ", "  "), json=Animal, whitespace_pattern=" ?")


@pytest.mark.parametrize("form", [{"json": True}, {"json_object": True}])
def test_any_json_object(form: dict[str, Any]) -> None:
    assert accepts('{"a": [1, {"b": null}]}', **form)
    assert not accepts("[1]", **form)
    assert accepts("[1]", json="true"), "the schema that allows everything"


def test_of_several_end_tokens_one_ends_a_complete_text() -> None:
    """While the text may go on any of them may end it; then there is no choice left to make."""
    backend = bpe_backend()
    ends = [backend.pad_token_id, backend.eos_token_id]
    compiler = GrammarCompiler(Tokenizer(backend, eos_token_ids=ends), len(TOKENIZER))
    made = compiler.matcher(StructuredOutputsParams(regex="ab?"))
    assert made.consume(ids("a")[0])
    assert all(made.legal()[ends])
    assert made.consume(ids("b")[0])
    assert np.flatnonzero(made.legal()).tolist() == [backend.eos_token_id]


def test_a_head_wider_or_narrower_than_the_tokenizer() -> None:
    for size in (len(TOKENIZER) + 9, len(TOKENIZER) - 5):
        made = GrammarCompiler(TOKENIZER, size).matcher(StructuredOutputsParams(regex="(?s:.*)"))
        legal = made.legal()
        assert legal.shape == (size,)
        assert legal.sum() > 200
        assert not legal[len(TOKENIZER) :].any()


FORMS: list[dict[str, Any]] = [
    {"json": Animal},
    {"json": {"type": "array", "items": {"enum": ["fox", "foxes", 12]}}},
    {"regex": "(ab|a[cd]{2,5})*(the|then)"},
    {"choice": ["the lazy dog", "the lazy fox", "a tree of tokens"]},
    {"grammar": 'start: "(" start ")" start | /[a-c]{0,3}/'},
]


def walk(form: dict[str, Any], choices: Sequence[int]) -> list[int]:
    """A legal path: at each step the legal token that a number picks."""
    tokens: list[int] = []
    made = matcher(**form)
    for choice in choices:
        legal = np.flatnonzero(made.legal())
        token = int(legal[choice % len(legal)])
        if token == EOS:
            break
        assert made.consume(token)
        tokens.append(token)
    return tokens


def test_a_grammar_answers_for_the_path_it_is_asked_about() -> None:
    """Two paths of one length: an answer that is kept must be that path's own."""
    grammar = Grammar(matcher(choice=["ax", "by"]), frozenset({EOS}), len(TOKENIZER))
    a, b, x, y = (ids(letter)[0] for letter in "abxy")
    assert [grammar.forced([one]) for one in (a, b, a)] == [x, y, x]
    assert grammar.forced([]) is None
    assert grammar.forced([b, y]) == EOS


numbers = st.lists(st.integers(0, 10_000), max_size=12)


@given(form=st.sampled_from(FORMS), paths=st.lists(numbers, min_size=1, max_size=4))
def test_what_is_legal_depends_on_the_path_alone(
    form: dict[str, Any], paths: list[list[int]]
) -> None:
    """A matcher that has been elsewhere says what a new one says that went there at once."""
    wanderer, here = matcher(**form), []
    for choices in paths:
        path = walk(form, choices)
        wanderer.rollback(len(here))
        here = path
        for token in path:
            assert not wanderer.consume(0), "a special token is never text"
            wanderer.sole()
            assert wanderer.consume(token)
        assert_same(wanderer, matcher(path, **form))


def assert_same(one: Matcher, other: Matcher) -> None:
    legal: NDArray[np.bool_] = other.legal()
    assert (one.legal() == legal).all()
    assert one.sole() == other.sole()
    sole = one.sole()
    if sole is not None:
        assert np.flatnonzero(legal).tolist() == [sole]
