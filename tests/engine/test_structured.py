"""Structured output: the text has the form that was asked for, and no draft changes it.

The model is a toy with random logits for each history, over a real byte-level vocabulary, so that
it would never write JSON by itself. The oracle is `by_hand`: one token at a time, each time with a
grammar that is compiled and fed anew, so that nothing can be left over from another path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.draft.synthetic import ScriptedDrafter
from draftwood.engine.observers import Round
from draftwood.engine.scheduler import Scheduler
from draftwood.grammars import GrammarCompiler
from draftwood.llm import LLM
from draftwood.outputs import RequestOutput
from draftwood.sampling import SamplingParams, StructuredOutputsParams, choose
from draftwood.sampling.grammar import Grammar, GrammarFailureError
from draftwood.text import Tokenizer
from draftwood.tree import TokenTree
from tests.tiny import (
    TinyLLM,
    bpe_backend,
    bushy_drafter,
    near_oracle,
    oracle,
    tiny_llm,
)
from tests.toys import ToyModel, chain_drafter, random_law

TOKENIZER = Tokenizer(bpe_backend())
VOCAB = len(TOKENIZER) + 7  # a head wider than the tokenizer, as many models have
LAW = random_law(VOCAB, spread=3.0)
PROMPT = tuple(TOKENIZER.encode("a tree of"))
[EOS] = TOKENIZER.eos_token_ids
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["fox", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}


def fits_schema(text: str) -> bool:
    """Whether a text is JSON that fits `SCHEMA`, by a check of its own."""
    value = json.loads(text)
    return (
        list(value) == ["name", "kind", "legs"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and value["kind"] in ("fox", "dog")
        and type(value["legs"]) is int
        and 0 <= value["legs"] <= 120
    )


CHOICES = ("the fox", "the dog", "the", 'say "no"\n\\', "naïve 東京 🌲")
FORMS: dict[str, tuple[StructuredOutputsParams, Callable[[str], Any]]] = {
    "json": (StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), fits_schema),
    "spaced": (StructuredOutputsParams(json=SCHEMA), fits_schema),
    "regex": (
        StructuredOutputsParams(regex=r"(ab|a[cd]{2,5}/)[0-9]{2}(-[xyz])*"),
        re.compile(r"(ab|a[cd]{2,5}/)[0-9]{2}(-[xyz])*").fullmatch,
    ),
    "choice": (StructuredOutputsParams(choice=CHOICES), CHOICES.__contains__),
    "grammar": (
        StructuredOutputsParams(grammar='start: "let " name " = " sum ";"\n'
                                'sum: num ("+" num)*\nnum: "(" sum ")" | /[0-9]{1,3}/\n'
                                'name: "brown" | "quick"'),
        lambda text: text.count("(") == text.count(")")
        and re.fullmatch(r"let (brown|quick) = [0-9+()]+;", text),
    ),
}  # fmt: skip
PARAMS = {
    "greedy": SamplingParams(max_tokens=48),
    "warm": SamplingParams(max_tokens=48, temperature=0.8, seed=1),
    "all": SamplingParams(
        max_tokens=48, temperature=1.3, top_k=20, top_p=0.95, min_p=0.01, seed=2,
        repetition_penalty=1.2, presence_penalty=0.5, min_tokens=4,
    ),
}  # fmt: skip
CASES = [(form, kind) for form in FORMS for kind in PARAMS]


def params_of(form: str, kind: str) -> SamplingParams:
    return PARAMS[kind].but(structured=FORMS[form][0])


def by_hand(params: SamplingParams) -> list[int]:
    """The text by the definition: mask, choose, append; until the end token."""
    assert isinstance(params.structured, StructuredOutputsParams)
    assert params.seed is not None or params.greedy
    tokens = list(PROMPT)
    llm = tiny_llm(ToyModel(LAW, VOCAB), tokenizer=TOKENIZER, drafter="none")
    rules = llm.engine.make(PROMPT, params.but(structured=None)).rules
    for _ in range(params.max_tokens or 0):
        raw = torch.tensor(LAW(tuple(tokens)))
        matcher = COMPILER.matcher(params.structured)
        assert all(matcher.consume(token) for token in tokens[len(PROMPT) :])
        illegal = torch.tensor(~matcher.legal())
        logits = rules.apply(raw, tokens, len(PROMPT)).masked_fill(illegal, -torch.inf)
        if bool(logits.isinf().all()):
            logits = raw.masked_fill(illegal, -torch.inf)
        tokens.append(choose(logits, params, params.seed or 0, len(tokens)))
        if tokens[-1] == EOS:
            break
    return tokens[len(PROMPT) :]


@lru_cache(maxsize=1000)
def _plain(key: str) -> tuple[int, ...]:
    return tuple(by_hand(eval_params[key]))


eval_params: dict[str, SamplingParams] = {}


def plain(params: SamplingParams) -> list[int]:
    """`by_hand`, remembered."""
    eval_params[repr(params)] = params
    return list(_plain(repr(params)))


def build(drafter: Any, params: SamplingParams | None = None, **config: Any) -> TinyLLM:
    """An engine over the toy; `drafter` may be the name of one that must know the answer."""
    draft = None
    if drafter in ("oracle", "near_oracle"):
        assert params is not None
        answers = {PROMPT: plain(params)}
        drafter = oracle(answers) if drafter == "oracle" else near_oracle(answers, VOCAB)
    elif drafter == "bushy":
        drafter = bushy_drafter(VOCAB)
    elif drafter == "self":
        draft, drafter = ToyModel(LAW, VOCAB, name="draft"), "model"
    return tiny_llm(
        ToyModel(LAW, VOCAB),
        draft=draft,
        drafter=drafter,
        tokenizer=TOKENIZER,
        **{"block_size": 4, "max_tree_nodes": 8, **config},
    )


def check_form(output: RequestOutput, form: str) -> None:
    """A text that ended by itself has its form; one that was cut says so."""
    if output.finish_reason == "length":
        assert len(output.token_ids) == 48
        return
    assert output.finish_reason == "stop"
    assert output.stop_reason == EOS
    assert output.token_ids[-1] == EOS
    assert FORMS[form][1](output.text), output.text


# --- the text ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "kind"), CASES)
def test_the_text_is_the_one_by_hand_and_has_its_form(form: str, kind: str) -> None:
    """Without speculation; tokens that are forced are those that would have been chosen."""
    params = params_of(form, kind)
    [output] = build("none").outputs([PROMPT], params)
    assert list(output.token_ids) == plain(params)
    check_form(output, form)


def test_the_texts_are_worth_comparing() -> None:
    """They end by themselves, differ by their parameters, and some tokens in them are forced."""
    outputs = {case: build("none").outputs([PROMPT], params_of(*case))[0] for case in CASES}
    assert sum(output.finish_reason == "stop" for output in outputs.values()) >= 10
    assert len({output.text for output in outputs.values()}) >= 12
    for form in ("json", "spaced", "choice", "grammar"):
        assert any(outputs[form, kind].metrics.num_forced_tokens > 0 for kind in PARAMS), form
    assert any(output.finish_reason == "length" for output in outputs.values())


@pytest.mark.parametrize(("form", "kind"), CASES)
@pytest.mark.parametrize("name", ["auto", "bushy", "near_oracle", "self"])
def test_the_same_text_with_any_drafter(name: str, form: str, kind: str) -> None:
    """Also when the same request comes again, and finds its KV in the prefix cache."""
    params = params_of(form, kind)
    llm = build(name, params)
    for _ in range(2):
        [output] = llm.outputs([PROMPT], params)
        assert list(output.token_ids) == plain(params)
    if name in ("near_oracle", "self") and len(plain(params)) > 12:
        assert output.metrics.num_accepted_tokens > 0, "nothing accepted: the test shows little"


combinations = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.5, 1.0, 2.0]),
        "seed": st.integers(0, 2**64 - 1),
        "top_k": st.sampled_from([1, 3, 50]),
        "repetition_penalty": st.sampled_from([0.7, 1.5]),
        "frequency_penalty": st.sampled_from([-1.0, 2.0]),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB - 1), st.sampled_from([-np.inf, -5.0, 5.0]), max_size=40
        ),
        "bad_words": st.sampled_from([("fox",), ("1", "the", "name")]),
        "min_tokens": st.integers(0, 20),
        "max_tree_nodes": st.sampled_from([0, 1, 3]),
        "speculation": st.booleans(),
        "max_tokens": st.integers(20, 48),
        "logprobs": st.sampled_from([0, 3]),
    },
)


@given(
    requests=st.lists(
        st.tuples(st.sampled_from(list(FORMS)), combinations), min_size=1, max_size=4
    ),
    name=st.sampled_from(["auto", "suffix", "recycling", "random", "bushy", "self"]),
    size=st.integers(0, 12),
    block_size=st.integers(1, 9),
    rows=st.sampled_from([1, 2, 3, 7, 64]),
    spare=st.integers(0, 40),
)
def test_the_same_text_for_any_combination(
    requests: list[tuple[str, dict[str, Any]]],
    name: str,
    size: int,
    block_size: int,
    rows: int,
    spare: int,
) -> None:
    """Whatever the drafter, the batch, the parameters, the rows of a forward and the memory."""
    batch = [
        SamplingParams(**{"max_tokens": 24, "seed": 0, **own, "structured": FORMS[form][0]})
        for form, own in requests
    ]
    llm = build(
        name,
        max_tree_nodes=size,
        block_size=block_size,
        max_batch_tokens=rows,
        num_blocks=-(-(len(PROMPT) + 48) // block_size) + 2 + spare // block_size,
    )
    outputs = llm.outputs([PROMPT] * len(batch), batch)
    for params, output in zip(batch, outputs, strict=True):
        assert list(output.token_ids) == plain(params)
        if output.logprobs is not None:
            assert [one.token for one in output.logprobs] == list(output.token_ids)
    llm.engine.prefix.clear()
    assert llm.pool.num_free == llm.pool.num_blocks


def test_requests_with_and_without_a_form_share_a_batch() -> None:
    """A grammar acts on its own request only."""
    free = PARAMS["warm"]
    batch = [params_of("json", "warm"), free, params_of("choice", "greedy")]
    [wanted] = build("none").run([PROMPT], free)
    texts = build("auto").run([PROMPT] * 3, batch)
    assert texts == [plain(batch[0]), wanted, plain(batch[2])]


@pytest.mark.parametrize("drafter", ["none", "auto", "self"])
def test_each_of_several_outputs_has_its_own_place_in_the_grammar(drafter: str) -> None:
    params = params_of("json", "warm").but(n=4)
    [output] = build(drafter).outputs([PROMPT], params)
    texts = [list(one.token_ids) for one in (output, *output.alternatives)]
    assert texts == [plain(params.but(n=1, seed=1 + i)) for i in range(4)]
    assert len({tuple(text) for text in texts}) == 4
    for one in (output, *output.alternatives):
        check_form(one, "json")


@pytest.mark.parametrize("drafter", ["none", "auto", "self", "near_oracle"])
def test_the_same_text_when_memory_runs_out(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was put back stands where it stood in its grammar, forced tokens included."""
    preempted: list[int] = []
    preempt = Scheduler._preempt

    def spy(self: Scheduler, seq: Any) -> None:
        preempted.append(seq.num_forced)
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "_preempt", spy)
    params = params_of("json", "warm")
    llm = build(drafter, params, num_blocks=18, max_batch_tokens=16, max_tree_nodes=4)
    batch = [params] + [params.but(seed=seed) for seed in range(2, 5)]
    if drafter == "near_oracle":
        batch = [params] * 4
    assert llm.run([PROMPT] * 4, batch) == [plain(one) for one in batch]
    assert preempted, "the pool was large enough: the test shows nothing"


def test_a_stream_gives_forced_tokens_in_order() -> None:
    params = params_of("json", "warm")
    deltas = list(build("auto").stream(PROMPT, params))
    assert [token for delta in deltas for token in delta.token_ids] == plain(params)
    output = deltas[-1].output
    assert output is not None
    assert "".join(delta.text for delta in deltas) == output.text


# --- drafts ------------------------------------------------------------------------------------


def trees_of(llm: TinyLLM) -> list[TokenTree]:
    """All trees that are verified from now on."""
    trees: list[TokenTree] = []

    class Watch:
        def on_round(self, round_: Round) -> None:
            trees.extend(outcome.tree for outcome in round_.outcomes)

    llm.engine.observers.append(Watch())
    return trees


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("place", range(5))
def test_an_illegal_draft_token_is_never_verified(form: str, place: int) -> None:
    """The right draft with one illegal token at each place in turn, and the right rest behind it.

    What stands before it is accepted, what is behind it is dropped with it.
    """
    params = params_of(form, "greedy")
    answer = plain(params)
    special = TOKENIZER.encode("<|im_start|>")[0]
    wrong: list[tuple[int, int]] = []

    def script(seq: Any, budget: int) -> TokenTree:
        rest = answer[len(seq.tokens) - len(PROMPT) :][:6]
        draft = [*rest[:place], special, *rest[place:]]
        return TokenTree.chain([seq.tokens[-1], *draft], "script")

    llm = build(ScriptedDrafter(script))
    trees = trees_of(llm)
    [output] = llm.outputs([PROMPT], params)
    assert list(output.token_ids) == answer
    for tree in trees:
        wrong += [(tree.depths[i], t) for i, t in enumerate(tree.tokens) if t == special]
        assert EOS not in tree.tokens[1:], "the end needs no row of its own"
    assert not wrong
    if place > 1 and form != "choice":  # there all behind the first token is forced
        assert output.metrics.num_accepted_tokens > 0


def test_illegal_siblings_go_and_their_legal_brothers_stay() -> None:
    grammar = Grammar(COMPILER.matcher(FORMS["regex"][0]), frozenset({EOS}), VOCAB)
    a, b, c, d, x = (TOKENIZER.encode(letter)[0] for letter in "abcdx")
    tree = TokenTree(
        (7, a, x, b, c, a, d, c, EOS),
        (-1, 0, 0, 1, 1, 2, 4, 6, 6),
        (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2),
        ("", *"stuvwxyz"),
    )
    guided = grammar.guide(tree, [], 8)
    paths = {tuple(guided.tokens[i] for i in guided.path(node)[1:]) for node in range(len(guided))}
    assert paths == {(), (a,), (a, b), (a, c), (a, c, d), (a, c, d, c)}
    node = guided.child(guided.child(0, a) or -1, c)
    assert node is not None
    assert (guided.scores[node], guided.sources[node]) == (0.6, "v")
    assert len(grammar.guide(tree, [], 2)) == 3
    assert grammar.guide(tree, [a], 8) == TokenTree.root(7).merge(guided_root(grammar, tree, [a]))


def guided_root(grammar: Grammar, tree: TokenTree, output: Sequence[int]) -> TokenTree:
    """What a fresh grammar makes of the same tree: the cursor's past must not matter."""
    fresh = Grammar(COMPILER.matcher(FORMS["regex"][0]), frozenset({EOS}), VOCAB)
    return fresh.guide(tree, output, 8)


class ForcingMatcher:
    """Allows one token only, for ever."""

    num_consumed = 0

    def fresh(self) -> ForcingMatcher:
        return ForcingMatcher()

    def consume(self, token: int) -> bool:
        self.num_consumed += token == 5
        assert self.num_consumed < 100, "it goes on for ever"
        return token == 5

    def rollback(self, num_tokens: int) -> None:
        self.num_consumed -= num_tokens

    def legal(self) -> Any:
        return np.arange(VOCAB) == 5

    def sole(self) -> int:
        return 5


def test_forced_tokens_are_drafted_up_to_the_budget() -> None:
    """Below every leaf, whatever was drafted there; a grammar may force tokens without end."""
    grammar = Grammar(ForcingMatcher(), frozenset({EOS}), VOCAB)
    guided = grammar.guide(TokenTree.chain([7, 5, 5, 8, 5], "x", 0.5), [5], 6)
    assert guided.tokens == (7, 5, 5, 5, 5, 5, 5)
    assert guided.sources[1:] == ("grammar",) * 6
    assert guided.scores == (1.0,) * 7
    assert len(grammar.guide(TokenTree.root(7), [5], 1)) == 2


def test_a_forced_token_costs_no_forward() -> None:
    """As many rounds as there were choices; with and without speculation."""
    params = params_of("json", "greedy")
    forced = {}
    for drafter in ("none", "auto"):
        [output] = build(drafter).outputs([PROMPT], params)
        metrics = output.metrics
        forced[drafter] = metrics.num_forced_tokens
        # The prompt's forward gives the first token, each round one and what was accepted.
        given = 1 + metrics.num_rounds + metrics.num_accepted_tokens + metrics.num_forced_tokens
        assert given == len(output.token_ids)
    assert forced["none"] >= 5


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 11])
def test_forced_tokens_stay_within_the_rows_of_a_forward(rows: int) -> None:
    """Four requests whose three forced tokens want rows in the same round: none starves.

    Their prompt is cached, so that all of them begin at once.
    """
    sizes: list[int] = []

    class Watch:
        def on_round(self, round_: Round) -> None:
            sizes.append(round_.num_rows)

    params = SamplingParams(max_tokens=20, structured={"choice": ["xyzq1", "xyzq2"]})
    llm = build("none", max_batch_tokens=rows, block_size=1)
    llm.run([PROMPT], params)
    llm.engine.observers.append(Watch())
    outputs = llm.outputs([PROMPT] * 4, params)
    assert all(list(output.token_ids) == plain(params) for output in outputs)
    assert all(output.metrics.num_forced_tokens == 4 for output in outputs)
    assert sum(sizes) == 4 * (1 + 4), "the last choice and the end need no row"
    assert max(sizes) <= rows


@pytest.mark.parametrize("drafter", ["none", "self"])
def test_drafters_and_observers_hear_of_every_token(drafter: str) -> None:
    """Forced ones too, or what they index has holes."""
    heard: list[int] = []

    class Watch:
        def on_round(self, round_: Round) -> None:
            for outcome in round_.outcomes:
                heard.extend(outcome.tokens)

    params = params_of("json", "warm")
    llm = build(drafter)
    llm.engine.observers.append(Watch())
    [output] = llm.outputs([PROMPT], params)
    assert output.metrics.num_forced_tokens > 0
    assert heard == plain(params)


def test_the_end_is_forced_where_nothing_else_may_come() -> None:
    """A choice between two words takes a choice, and no forward for the end token."""
    params = SamplingParams(max_tokens=20, structured={"choice": ["x", "y"]})
    [output] = build("none").outputs([PROMPT], params)
    assert output.text in ("x", "y")
    assert output.finish_reason == "stop"
    assert (output.metrics.num_rounds, output.metrics.num_forced_tokens) == (0, 1)


def test_log_probabilities_of_forced_tokens_are_the_models_own() -> None:
    """Nothing is skipped then: the forced token is drafted instead, and accepted."""
    params = params_of("json", "greedy")
    [output] = build("auto").outputs([PROMPT], params.but(logprobs=2))
    assert list(output.token_ids) == plain(params)
    assert output.metrics.num_forced_tokens == 0
    assert output.metrics.num_accepted_tokens > 0
    assert output.logprobs is not None
    tokens = list(PROMPT)
    for one in output.logprobs:
        scores = torch.log_softmax(torch.tensor(LAW(tuple(tokens))), dim=-1)
        assert one.logprob == pytest.approx(float(scores[one.token]), abs=1e-5)
        tokens.append(one.token)
    sources = [s for tree in _verified(params.but(logprobs=2)) for s in tree.sources[1:]]
    assert "grammar" in sources


def _verified(params: SamplingParams) -> list[TokenTree]:
    llm = build("suffix")
    trees = trees_of(llm)
    llm.outputs([PROMPT], params)
    return trees


# --- where a text ends -------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "oracle"])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 13])
def test_max_tokens_cuts_and_says_so(drafter: str, length: int) -> None:
    """Also inside a run of forced tokens."""
    params = params_of("json", "greedy")
    assert len(plain(params)) > 13
    [output] = build(drafter, params).outputs([PROMPT], params.but(max_tokens=length))
    assert list(output.token_ids) == plain(params)[:length]
    assert output.finish_reason == "length"


@pytest.mark.parametrize("drafter", ["none", "oracle", "auto"])
def test_a_stop_string_in_forced_tokens_ends_the_text_before_it(drafter: str) -> None:
    params = params_of("json", "greedy")
    whole = TOKENIZER.decode(plain(params))
    for stop in ('"kind"', "legs", 'd":', "e"):
        llm = build(drafter, params)
        [output] = llm.outputs([PROMPT], params.but(stop=stop))
        assert output.text == whole[: whole.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        llm.engine.prefix.clear()
        assert llm.pool.num_free == llm.pool.num_blocks


def test_a_stop_token_ends_the_text_before_its_form_is_complete() -> None:
    params = params_of("json", "greedy")
    stop = plain(params)[4]
    place = plain(params).index(stop)
    [output] = build("auto").outputs([PROMPT], params.but(stop_token_ids=(stop,)))
    assert list(output.token_ids) == plain(params)[: place + 1]
    assert output.stop_reason == stop


@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_the_grammar_wins_over_min_tokens_and_bans(drafter: str) -> None:
    """Where nothing else is legal, a banned token is taken: no text leaves its form."""
    word = TOKENIZER.encode("dog", add_special_tokens=False)
    params = SamplingParams(
        max_tokens=20,
        structured={"choice": ["dog"]},
        min_tokens=20,
        logit_bias={word[0]: -np.inf},
        bad_words=("dog",),
        temperature=1.0,
        seed=0,
    )
    [output] = build(drafter).outputs([PROMPT], params)
    assert (output.text, output.finish_reason) == ("dog", "stop")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_all_is_banned_the_models_own_preference_decides(temperature: float) -> None:
    """Not the order of ids: the bans are undone, for this token only."""
    letters = [TOKENIZER.encode(letter)[0] for letter in "abcdefgh"]
    params = SamplingParams(
        max_tokens=20, temperature=temperature, seed=5, structured={"regex": "[a-h]"}
    )
    banned = params.but(logit_bias=dict.fromkeys(letters, -np.inf))
    [free], [text] = (build("none").run([PROMPT], one) for one in (params, banned))
    assert text == free
    assert text[0] in letters[1:], "the first one would be taken by any fault"


def test_min_tokens_keeps_a_text_going_that_may_go_on() -> None:
    params = SamplingParams(structured={"regex": "(ab)*"}, min_tokens=30, max_tokens=60)
    always_end = {EOS: 100.0}
    [short] = build("auto").outputs([PROMPT], params.but(min_tokens=0, logit_bias=always_end))
    [long] = build("auto").outputs([PROMPT], params.but(logit_bias=always_end))
    assert (short.text, len(short.token_ids)) == ("", 1)
    assert 31 <= len(long.token_ids) < 60
    assert re.fullmatch("(ab)+", long.text)


# --- when a grammar fails ----------------------------------------------------------------------


class FailingMatcher:
    """Allows any token, runs into a limit after some, and then fails for ever."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._failed = False
        self.num_consumed = 0

    def fresh(self) -> FailingMatcher:
        return FailingMatcher(self._limit)

    def _check(self, limit: int) -> None:
        self._failed = self._failed or self.num_consumed >= limit
        if self._failed:
            raise GrammarFailureError("too complex")

    def consume(self, token: int) -> bool:
        self._check(self._limit + 1)
        self.num_consumed += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        self._check(self._limit + 9)
        self.num_consumed -= num_tokens

    def legal(self) -> Any:
        self._check(self._limit)
        return np.arange(VOCAB) != EOS

    def sole(self) -> None:
        self._check(self._limit + 1)


class FailingCompiler:
    """Compiles anything into a grammar that fails after ten tokens."""

    def matcher(self, params: StructuredOutputsParams) -> FailingMatcher:
        return FailingMatcher(10)


@pytest.mark.parametrize("drafter", ["none", "oracle", "bushy"])
def test_a_grammar_that_fails_ends_its_own_request_only(
    drafter: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The text so far is kept, "abort" says that it is not whole, and the others go on."""
    free = PARAMS["greedy"].but(ignore_eos=True)
    [wanted] = build("none").run([PROMPT], free.but(logit_bias={EOS: -np.inf}))
    # The second draft of six tokens leads past the limit; what was only guessed must do no harm.
    script = chain_drafter(wanted, (6,)) if drafter == "oracle" else drafter
    llm = build(script)
    llm._grammars = FailingCompiler()  # type: ignore[assignment]
    llm.engine = llm.make_engine(llm.engine.drafter.inner)
    form = PARAMS["greedy"].but(structured={"choice": ["a"]})
    stopped = form.but(max_tokens=10)
    failed, mate, short = llm.outputs(
        [PROMPT] * 3, [form, free.but(logit_bias={EOS: -np.inf}), stopped]
    )
    assert list(failed.token_ids) == [*wanted[:10], EOS]
    assert failed.finish_reason == "abort"
    assert list(mate.token_ids) == wanted
    assert (list(short.token_ids), short.finish_reason) == (wanted[:10], "length")
    assert "too complex" in caplog.text
    assert llm.pool.check() is None


# --- a real model ------------------------------------------------------------------------------


def test_json_of_a_real_model(real_llm: LLM) -> None:
    """SmolLM2 with its own tokenizer and the CPU kernels: forced rows in front of trees."""
    messages = [{"role": "user", "content": "Describe a dog as JSON with name, kind and legs."}]
    params = SamplingParams(max_tokens=80, structured={"json": SCHEMA})
    for one in (params, params.but(temperature=0.8, seed=3)):
        fast = real_llm.chat(messages, one)
        plainly = real_llm.chat(messages, one.but(speculation=False))
        assert fast.token_ids == plainly.token_ids
        assert fast.finish_reason == "stop"
        assert fits_schema(fast.text)
        assert fast.metrics.num_forced_tokens + plainly.metrics.num_forced_tokens > 0
