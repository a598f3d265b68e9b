"""Beam search over the token tree: the texts and scores of `transformers.generate(num_beams=k)`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st

from draftwood.engine import engine
from draftwood.engine.scheduler import Scheduler
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from draftwood.models.sources import ModelFiles
from draftwood.sampling import SamplingParams
from tests import tiny, toys

PROMPT = [3, 9, 4, 17, 5, 9, 4]


def theirs(
    module: Any, prompt: Sequence[int], eos: Sequence[int] = (), **values: Any
) -> list[tuple[list[int], float]]:
    """transformers' texts, end token included, with their scores."""
    ids = torch.tensor([list(prompt)])
    config = tf.GenerationConfig(
        do_sample=False,
        pad_token_id=0,
        eos_token_id=list(eos) or None,
        output_scores=True,
        return_dict_in_generate=True,
        **values,
    )
    found = module.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    rows = [row[len(prompt) :].tolist() for row in found.sequences]
    ends = [next((i + 1 for i, t in enumerate(row) if t in eos), len(row)) for row in rows]
    scores = found.sequences_scores.tolist()
    return [(row[:end], score) for row, end, score in zip(rows, ends, scores, strict=True)]


def ours(llm: tiny.TinyLLM, prompt: Sequence[int], params: SamplingParams) -> list[Any]:
    [output] = llm.outputs([prompt], params)
    return [output, *output.alternatives]


def assert_same(found: Sequence[Any], expected: Sequence[tuple[list[int], float]]) -> None:
    assert [list(output.token_ids) for output in found] == [tokens for tokens, _ in expected]
    for output, (_, score) in zip(found, expected, strict=True):
        assert output.score == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("arch", sorted(tiny.ARCHITECTURES))
@pytest.mark.parametrize("num_beams", [2, 4])
def test_texts_are_those_of_transformers(arch: str, num_beams: int) -> None:
    module, llm = tiny.reference(arch), tiny.tiny_llm(arch, block_size=3)
    expected = theirs(
        module, PROMPT, num_beams=num_beams, max_new_tokens=14, num_return_sequences=num_beams
    )
    params = SamplingParams(
        max_tokens=14, num_beams=num_beams, num_return_sequences=num_beams, ignore_eos=True
    )
    assert_same(ours(llm, PROMPT, params), expected)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("eos", [(5,), (5, 11, 20)])
def test_ends_and_penalties_are_those_of_transformers(
    early_stopping: bool | str, length_penalty: float, eos: tuple[int, ...]
) -> None:
    module = tiny.reference("llama", calm=True)
    model = tiny.hf_model("llama", calm=True)
    llm = tiny.tiny_llm(model, tokenizer=tiny.LetterTokenizer(eos=eos))
    lengths = set()
    for num_beams, length in ((2, 12), (3, 25), (5, 18)):
        expected = theirs(
            module,
            PROMPT,
            eos,
            num_beams=num_beams,
            max_new_tokens=length,
            num_return_sequences=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        params = SamplingParams(
            max_tokens=length,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        found = ours(llm, PROMPT, params)
        assert_same(found, expected)
        for output in found:
            ended = output.token_ids[-1] in eos
            assert output.finish_reason == ("stop" if ended else "length")
        lengths |= {len(tokens) for tokens, _ in expected}
    assert len(lengths) > 1, "every text has the same length: nothing ended early"


RULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"min_tokens": 9}, {"min_new_tokens": 9}),
    ({"logit_bias": {3: -2.0, 8: 1.5}}, {"sequence_bias": {(3,): -2.0, (8,): 1.5}}),
    ({"bad_words": ("f", "ej")}, {"bad_words_ids": [[5], [4, 9]]}),
    (
        {"repetition_penalty": 1.3, "logit_bias": {8: 1.0}, "min_tokens": 4},
        {"repetition_penalty": 1.3, "sequence_bias": {(8,): 1.0}, "min_new_tokens": 4},
    ),
]


@pytest.mark.parametrize(("mine", "other"), RULES)
def test_rules_act_on_each_beam_as_in_transformers(
    mine: dict[str, Any], other: dict[str, Any]
) -> None:
    """On log-probabilities, for the beam's own text: a penalty on logits gives other texts."""
    eos = (11, 20)
    model = tiny.hf_model("qwen3", calm=True)
    llm = tiny.tiny_llm(model, tokenizer=BareLetters(eos=eos))
    values: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": -1.0}
    params = SamplingParams(max_tokens=16, **values)
    expected = theirs(
        tiny.reference("qwen3", calm=True), PROMPT, eos, max_new_tokens=16, **values, **other
    )
    found = ours(llm, PROMPT, params.but(**mine))
    assert_same(found, expected)
    free = ours(llm, PROMPT, params)
    assert [o.token_ids for o in free] != [o.token_ids for o in found], "the rule did nothing"


class BareLetters(tiny.LetterTokenizer):
    """Letters; a bad word is spelled one way, as transformers is told."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of the characters but for spaces."""
        return super().encode(text.replace(" ", ""), add_special_tokens=add_special_tokens)


def test_one_beam_is_plain_decoding() -> None:
    llm = tiny.tiny_llm("llama")
    [output] = llm.outputs([PROMPT], SamplingParams(max_tokens=20, num_beams=1, ignore_eos=True))
    assert list(output.token_ids) == tiny.greedy_reference("llama", PROMPT, 20)
    assert output.score is None


VOCAB = 9
LAW = toys.random_law(VOCAB, seed=4, spread=1.5)
EOS = (2, 6)


def parting_law(history: toys.History) -> list[float]:
    """Now and then a choice, and little doubt between: beams part early and stay apart for long."""
    logits = list(LAW(history))
    if len(history) % 5:
        place = (3 * sum(history) + len(history)) % VOCAB
        logits[place if place not in EOS else 1] += 12.0
    return logits


def plain_search(
    law: toys.Law, prompt: Sequence[int], params: SamplingParams
) -> list[tuple[list[int], float]]:
    """The rules of the search once more, with lists and no tree: every beam computed afresh."""
    width, penalty, longest = params.num_beams, params.length_penalty, params.max_tokens
    assert longest is not None
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, longest + 1):
        table = []
        for score, text in beams:
            logits = torch.tensor(law((*prompt, *text)), dtype=torch.float64)
            scores = torch.log_softmax(logits, dim=-1).tolist()
            table += [(score + scores[token], [*text, token]) for token in range(VOCAB)]
        table = sorted(table, key=lambda entry: -entry[0])[: (1 + len(EOS)) * width]
        over = [text[-1] in EOS or length == longest for _, text in table]
        new = [
            (s / length**penalty, t)
            for (s, t), end in zip(table[:width], over, strict=False)
            if end
        ]
        ended = sorted([*ended, *new], key=lambda entry: -entry[0])[:width]
        beams = [entry for entry, end in zip(table, over, strict=True) if not end][:width]
        if not beams:
            break
        if len(ended) == width:
            reach = longest if params.early_stopping == "never" and penalty > 0 else length
            hopeless = beams[0][0] / reach**penalty <= ended[-1][0]
            if hopeless or params.early_stopping is True:
                break
    return [(text, score) for score, text in ended[: params.num_return_sequences]]


def toy_llm(law: toys.Law = LAW, **config: Any) -> tiny.TinyLLM:
    tokenizer = tiny.LetterTokenizer(VOCAB, eos=EOS)
    return tiny.tiny_llm(toys.ToyModel(law, VOCAB), tokenizer=tokenizer, **config)


def all_free(llm: tiny.TinyLLM) -> bool:
    """Whether nobody but the prefix index holds a block."""
    llm.engine.prefix.clear()
    llm.pool.check()
    return llm.pool.num_free == llm.pool.num_blocks


beam_params = st.builds(
    lambda beams, best, **values: SamplingParams(
        num_beams=beams, num_return_sequences=min(best, beams), **values
    ),
    beams=st.sampled_from([2, 3, 4, 4]),
    best=st.integers(1, 4),
    max_tokens=st.sampled_from([1, 5, 14, 14]),
    length_penalty=st.sampled_from([-0.5, 0.0, 0.7, 1.0, 2.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
)
other_params = st.builds(
    SamplingParams, max_tokens=st.integers(1, 20), temperature=st.sampled_from([0.0, 1.0])
).map(lambda params: params.but(seed=5))


@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
            st.one_of(beam_params, beam_params, other_params),
        ),
        min_size=1,
        max_size=6,
    ),
    block_size=st.sampled_from([1, 3, 4]),
    num_slots=st.sampled_from([80, 80, 400]),
    rows=st.sampled_from([4, 9, 24]),
    law=st.sampled_from([LAW, parting_law]),
)
def test_neither_mates_nor_memory_change_a_beam(
    requests: list[tuple[list[int], SamplingParams]],
    block_size: int,
    num_slots: int,
    rows: int,
    law: toys.Law,
) -> None:
    """Chunks, small pools (so preemption), batch mates with and without beams: the same texts."""
    config: dict[str, Any] = {"block_size": block_size, "max_batch_tokens": rows}
    llm = toy_llm(law, num_blocks=num_slots // block_size + 1, drafter="bushy", **config)
    outputs = llm.outputs([p for p, _ in requests], [params for _, params in requests])
    for (prompt, params), output in zip(requests, outputs, strict=True):
        if params.num_beams > 1:
            assert_same([output, *output.alternatives], plain_search(law, prompt, params))
        else:
            [alone] = toy_llm(law, drafter="none").outputs([prompt], params)
            assert output.token_ids == alone.token_ids
    assert all_free(llm)


def test_a_request_put_back_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tree is computed again, in chunks that are smaller than the tree."""
    put_back = spy(monkeypatch, Scheduler, "_preempt")
    steps = spy(monkeypatch, engine, "advance")
    params = SamplingParams(max_tokens=14, num_beams=4, num_return_sequences=4, min_tokens=14)
    llm = toy_llm(parting_law, num_blocks=18, block_size=4, max_batch_tokens=9)
    prompts = [[1, 3, 5, 7], [8, 1, 0, 4, 3, 5]]
    outputs = llm.outputs(prompts, params)
    assert [call[1].params.num_beams for call in put_back] == [4] * len(put_back) != []
    assert all(call[1].request_id == outputs[1].request_id for call in put_back)
    chunks = [work for _, work, logits in steps if work.tree and len(logits) == 0]
    assert chunks, "no part of a tree was computed on its own"
    alone = [toy_llm(parting_law).outputs([prompt], params)[0] for prompt in prompts]
    for output, other in zip(outputs, alone, strict=True):
        assert [o.token_ids for o in (output, *output.alternatives)] == [
            o.token_ids for o in (other, *other.alternatives)
        ]
    assert all_free(llm)


def spy(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """Notes the arguments of every call of a method or function."""
    calls: list[tuple[Any, ...]] = []
    method = getattr(owner, name)

    def noting(*arguments: Any) -> Any:
        calls.append(arguments)
        return method(*arguments)

    monkeypatch.setattr(owner, name, noting)
    return calls


def test_no_token_is_computed_twice() -> None:
    """After the prompt a step is one forward with one row per beam, whatever the beams share."""
    model = tiny.CountingModel(toys.ToyModel(LAW, VOCAB))
    llm = tiny.tiny_llm(model, tokenizer=tiny.LetterTokenizer(VOCAB), block_size=4)
    [output] = llm.outputs([[1, 3, 5, 7, 1]], SamplingParams(max_tokens=12, num_beams=4))
    assert model.rows == [5] + [4] * 11
    assert output.metrics.num_rounds == 11
    assert all(len(set(positions)) == 1 for positions in model.positions[1:])


def test_prompt_and_text_are_published_and_found() -> None:
    model = tiny.CountingModel(toys.ToyModel(LAW, VOCAB))
    llm = tiny.tiny_llm(model, tokenizer=tiny.LetterTokenizer(VOCAB), block_size=4)
    prompt = [1, 3, 5, 7, 1, 8, 0, 4, 4]
    params = SamplingParams(max_tokens=8, num_beams=3)
    [first] = llm.outputs([prompt], params)
    model.clear()
    [again] = llm.outputs([prompt], params)
    assert again.metrics.num_cached_tokens == 8
    assert (again.token_ids, again.score) == (first.token_ids, first.score)
    assert model.rows[0] == 1
    [more] = llm.outputs([[*prompt, *first.token_ids, 3]], params)
    assert more.metrics.num_cached_tokens == 16, "the KV of the best text is there as well"


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_an_aborted_request_leaves_nothing(rounds: int) -> None:
    llm = toy_llm(block_size=4)
    params = SamplingParams(max_tokens=14, num_beams=4, num_return_sequences=2, min_tokens=14)
    seq = llm.engine.add([1, 3, 5, 7], params)
    for _ in range(rounds):
        llm.engine.step()
    assert not seq.finished
    assert (seq.visible_text(), seq.num_visible) == ("", 0), "beams may still be overtaken"
    llm.engine.abort(seq)
    assert (seq.finish_reason, seq.output_ids, seq.others) == ("abort", [], [])
    assert all_free(llm)


def test_a_stream_shows_the_text_when_it_is_settled() -> None:
    llm = toy_llm()
    params = SamplingParams(max_tokens=10, num_beams=3, num_return_sequences=2)
    [delta] = llm.stream([1, 3, 5], params)
    assert delta.output is not None
    assert (delta.text, delta.token_ids) == (delta.output.text, delta.output.token_ids)
    assert len(delta.output.alternatives) == 1
    [output] = llm.outputs([[1, 3, 5]], params)
    assert output.token_ids == delta.token_ids


def test_rules_that_leave_few_texts_give_few_texts() -> None:
    """Beams with nothing of their own to say are not returned as copies of another."""
    bias = {token: -math.inf for token in range(VOCAB) if token != 4}
    params = SamplingParams(max_tokens=5, num_beams=3, num_return_sequences=3, logit_bias=bias)
    [output] = toy_llm().outputs([[1, 3]], params)
    assert (list(output.token_ids), output.alternatives) == ([4] * 5, ())
    none = params.but(logit_bias=dict.fromkeys(range(VOCAB), -math.inf))
    [output] = toy_llm().outputs([[1, 3]], none)
    assert (output.token_ids, output.finish_reason) == ((), "length")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": 0.7}, "set temperature to 0"),
        ({"n": 2}, "use num_return_sequences"),
        ({"stop": "x"}, "use stop_token_ids"),
        ({"logprobs": 2}, "leave logprobs out"),
        ({"prompt_logprobs": 0}, "without beams"),
        ({"structured": {"regex": "a+"}}, "without beams"),
        ({"num_return_sequences": 5}, "from 1 to num_beams"),
        ({"num_return_sequences": 0}, "from 1 to num_beams"),
        ({"early_stopping": "soon"}, "True, False or 'never'"),
        ({"length_penalty": math.nan}, "from -10 to 10"),
        ({"length_penalty": 11}, "from -10 to 10"),
        ({"num_beams": 0}, "at least 1"),
    ],
)
def test_what_does_not_go_together_says_what_to_change(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SamplingParams(**{"num_beams": 4, **values})


def test_beams_that_cannot_fit_are_refused_before_they_start() -> None:
    llm = toy_llm(num_blocks=11, block_size=4, max_batch_tokens=4)
    with pytest.raises(ConfigError, match="4 rows at most"):
        llm.outputs([[1]], SamplingParams(max_tokens=2, num_beams=5))
    with pytest.raises(ConfigError, match="room for 9 tokens of each beam"):
        llm.outputs([[1, 2, 3]], SamplingParams(max_tokens=10, num_beams=4))
    params = SamplingParams(num_beams=4, max_tokens=9, min_tokens=9)
    [output] = llm.outputs([[1, 2, 3]], params)
    assert len(output.token_ids) == 9
    [longest] = llm.outputs([[1, 2, 3]], params.but(max_tokens=None))
    assert longest.token_ids == output.token_ids
    assert all_free(llm)


def test_the_real_model_says_what_transformers_says(real_llm: LLM, real_files: ModelFiles) -> None:
    module = tf.AutoModelForCausalLM.from_pretrained(real_files.path, dtype=torch.float32)
    eos = sorted(real_llm.tokenizer.eos_token_ids)
    values: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 2}
    prompts = ["The capital of France", "def quicksort(", "Q: How many legs has a spider? A:"]
    outputs = real_llm.generate(prompts, SamplingParams(max_tokens=16, **values))
    for output in outputs:
        expected = theirs(module, output.prompt_token_ids, eos, max_new_tokens=16, **values)
        assert_same([output, *output.alternatives], expected)
