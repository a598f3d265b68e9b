"""Where a text ends: end tokens, stop tokens, stop strings, length, and all of them in one block.

The model is scripted, so that the text that would come is known; the drafter proposes that text, so
that what ends it lies in the middle of an accepted block. The oracle is `expected`, which applies
the documented rules token by token and knows nothing of blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.outputs import RequestOutput
from draftwood.sampling import SamplingParams
from draftwood.text import Tokenizer
from tests.tiny import (
    TinyLLM,
    bpe_backend,
    distinct,
    hf_model,
    near_oracle,
    random_prompts,
    tiny_llm,
)
from tests.toys import PieceTokenizer, ToyModel, chain_drafter, scripted_law

EOS = 1
PIECES = ("a", "<end>", "b", "c", "ST", "OP", "S", "TO", "P", "xSTOPy", "\n", "\n\n", " ", "ab")
A, B, C = 0, 2, 3
TOKENIZER = PieceTokenizer(PIECES, eos=[EOS])
PROMPT = (2, 3, 2, 3, 3)


@dataclass(frozen=True)
class End:
    """How a text should end."""

    ids: list[int]
    text: str
    finish_reason: str
    stop_reason: str | int | None


def expected(answer: Sequence[int], params: SamplingParams) -> End:
    """The documented rules: for each token, the end token, then stop strings, then the length."""
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    ids: list[int] = []
    for token in answer:
        ids.append(token)
        text = TOKENIZER.decode(ids)
        if token in stop_ids:
            return End(ids, text, "stop", token)
        hits = [(text.find(stop), stop) for stop in params.stop if stop in text]
        if hits:
            place, stop = min(hits)
            starts = [len(TOKENIZER.decode(ids[:i])) for i in range(len(ids))]
            kept = sum(start < place for start in starts)
            return End(ids[:kept], text[:place], "stop", stop)
        if len(ids) == params.max_tokens:
            return End(ids, text, "length", None)
    raise AssertionError("the answer is too short for these parameters")


def build(
    answer: Sequence[int], lengths: Sequence[int] = (8,), drafter: Any = None, **config: Any
) -> TinyLLM:
    """A model that says `answer`, and a drafter that knows it."""
    padded = [*answer, *[A] * 40]
    model = ToyModel(scripted_law(len(PIECES), len(PROMPT), padded), len(PIECES))
    return tiny_llm(
        model,
        drafter=drafter or chain_drafter(padded, lengths),
        tokenizer=TOKENIZER,
        **{"block_size": 4, **config},
    )


def check(output: RequestOutput, end: End) -> None:
    """Everything a caller can see of the end."""
    assert list(output.token_ids) == end.ids
    assert output.text == end.text
    assert output.finish_reason == end.finish_reason
    assert output.stop_reason == end.stop_reason


def run(
    answer: Sequence[int], params: SamplingParams, lengths: Sequence[int] = (8,), **config: Any
) -> RequestOutput:
    """Generates, checks the memory, and compares with the oracle."""
    llm = build(answer, lengths, **config)
    [output] = llm.outputs([PROMPT], params)
    check(output, expected([*answer, *[A] * 40], params))
    llm.engine.prefix.clear()
    assert llm.pool.num_free == llm.pool.num_blocks
    return output


# --- end tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(7))
def test_an_end_token_in_the_middle_of_an_accepted_block(place: int) -> None:
    """A drafter proposes [x, EOS, y, z], which is what the model says: y must not be kept."""
    answer = [A, B, C, A, B, C, A, B, C]
    answer[place] = EOS
    output = run(answer, SamplingParams(max_tokens=20))
    assert len(output.token_ids) == place + 1
    assert output.stop_reason == EOS


def test_an_end_token_that_is_the_bonus() -> None:
    """The end token after the last accepted node, which no draft named."""
    run([A, B, C, EOS, A, A], SamplingParams(max_tokens=20), lengths=(2,))


def test_ignore_eos_goes_on() -> None:
    """Also past an end token in the middle of a block, whose text stays out."""
    output = run([A, EOS, B, EOS, C], SamplingParams(max_tokens=5, ignore_eos=True))
    assert output.text == "abc"
    assert len(output.token_ids) == 5


def test_stop_token_ids_act_beside_and_without_the_models_own() -> None:
    """`stop_token_ids` is not another name for the end token, nor switched off with it."""
    answer = [A, B, EOS, C, B, A]
    both = run(answer, SamplingParams(max_tokens=9, stop_token_ids=(C,)))
    assert both.stop_reason == EOS
    only = run(answer, SamplingParams(max_tokens=9, stop_token_ids=(C,), ignore_eos=True))
    assert only.stop_reason == C
    same = run(answer, SamplingParams(max_tokens=9, stop_token_ids=(EOS,), ignore_eos=True))
    assert same.stop_reason == EOS


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("drafted", [1, 3, 8])
def test_length_cuts_a_block(length: int, drafted: int) -> None:
    """`max_tokens` in the middle of an accepted block, and `max_tokens=1`, which needs no draft."""
    output = run([B, C] * 5, SamplingParams(max_tokens=length), lengths=(drafted,))
    assert len(output.token_ids) == length
    if length == 1:
        assert output.metrics.num_rounds == output.metrics.num_draft_tokens == 0


# --- stop strings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "middle", [[4, 5], [6, 7, 8], [9], [4, 6], [4, 5, 4, 5]], ids=lambda m: "+".join(map(str, m))
)
@pytest.mark.parametrize("drafted", [1, 2, 3, 8])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_stop_strings_across_tokens_and_blocks(
    middle: list[int], drafted: int, before: int
) -> None:
    """ "STOP" in one token, over several, in one block and over two; what only begins like it."""
    answer = [*[A] * before, *middle, B, C, *[A] * 12]
    output = run(answer, SamplingParams(max_tokens=12, stop="STOP"), lengths=(drafted,))
    assert "STOP" not in output.text


def test_the_earliest_of_several_stop_strings_wins() -> None:
    """In one token both may be completed; the text ends before the one that stands first."""
    params = SamplingParams(max_tokens=9, stop=("OPy", "xS", "STOP"))
    output = run([A, 9, B], params)
    assert (output.text, output.stop_reason) == ("a", "xS")


def test_token_ids_agree_with_a_text_that_was_cut() -> None:
    """The text is cut at the stop string and the ids are not: lengths must agree."""
    output = run([A, B, 4, 5, C], SamplingParams(max_tokens=9, stop="STOP"))
    assert output.text == "ab"
    assert list(output.token_ids) == [A, B]
    partly = run([A, B, 9, C], SamplingParams(max_tokens=9, stop="TOP"))
    assert partly.text == "abxS"
    assert list(partly.token_ids) == [A, B, 9], "a token of which some text is left stays"


def test_a_stop_string_may_stay_in_the_output() -> None:
    """`include_stop_str_in_output`: the text ends behind it, and so do the ids."""
    llm = build([A, B, 4, 5, C])
    params = SamplingParams(max_tokens=9, stop="STOP", include_stop_str_in_output=True)
    [output] = llm.outputs([PROMPT], params)
    assert output.text == "abSTOP"
    assert list(output.token_ids) == [A, B, 4, 5]


EVENTS = ("eos", "token", "string", "length")


@pytest.mark.parametrize("order", list(itertools.permutations(EVENTS)), ids="-".join)
@pytest.mark.parametrize("drafted", [1, 8])
def test_all_rules_in_one_block_in_every_order(order: tuple[str, ...], drafted: int) -> None:
    """Each of four rules would end the text, at tokens 2, 3, 4 and 5 of one accepted block."""
    answer = [A] * 12
    length = 12
    for place, event in enumerate(order, start=2):
        if event == "eos":
            answer[place] = EOS
        elif event == "token":
            answer[place] = C
        elif event == "string":
            answer[place] = 9
        else:
            length = place + 1
    params = SamplingParams(max_tokens=length, stop="STOP", stop_token_ids=(C,))
    output = run(answer, params, lengths=(drafted,))
    reasons = {"eos": EOS, "token": C, "string": "STOP", "length": None}
    assert output.stop_reason == reasons[order[0]]


def test_rules_that_fall_on_the_same_token() -> None:
    """End token before stop string before length, when one token meets all of them."""
    at_length = run([A, 4, 5, B], SamplingParams(max_tokens=3, stop="STOP"))
    assert (at_length.finish_reason, at_length.text) == ("stop", "a")
    eos_at_length = run([A, B, EOS], SamplingParams(max_tokens=3))
    assert eos_at_length.finish_reason == "stop"


def test_a_stop_token_whose_text_completes_a_stop_string() -> None:
    """The end token wins, and its ids stay; then the text must not be cut as if the string had."""
    run([A, 4, 5, B], SamplingParams(max_tokens=9, stop="STOP", stop_token_ids=(5,)))


# --- what callers and memory see -------------------------------------------------------------


@pytest.mark.parametrize("drafted", [1, 3, 8])
def test_kv_and_cache_never_hold_more_than_was_kept(drafted: int) -> None:
    """Blocks are published under the tokens that were kept: a cut block's rest must not be there.

    Otherwise a later prompt that goes on differently finds KV of tokens nobody delivered.
    """
    for answer, params in (
        ([A, B, C, EOS, B, B, B, B, B, B], SamplingParams(max_tokens=20)),
        ([A, B, C, 4, 5, B, B, B, B, B], SamplingParams(max_tokens=20, stop="STOP")),
        ([A, B, C, A, B, C, B, B, B, B], SamplingParams(max_tokens=4)),
    ):
        llm = build(answer, (drafted,), block_size=1)
        lengths: list[tuple[int, int]] = []
        seq = llm.engine.add(PROMPT, params)
        while not seq.finished:
            llm.engine.step()
            if not seq.finished:
                lengths.append((seq.lease.length, len(seq.tokens)))
        assert all(computed == tokens - 1 for computed, tokens in lengths)
        assert len(llm.engine.prefix) <= len(seq.tokens)
        match = llm.engine.prefix.match([*PROMPT, *answer])
        assert len(match.blocks) <= len(seq.tokens)
        llm.pool.release(match.blocks)
        llm.engine.prefix.clear()
        assert llm.pool.num_free == llm.pool.num_blocks


@pytest.mark.parametrize("drafted", [1, 3, 8])
@pytest.mark.parametrize("kind", ["eos", "string", "length"])
def test_metrics_count_what_was_delivered(kind: str, drafted: int) -> None:
    """Usage that counts tokens which were cut off bills what nobody got."""
    answer = [A, B, C, A, B, C, A, B, B, C, A, A]
    params = SamplingParams(max_tokens=7)
    if kind == "eos":
        answer[6] = EOS
        params = SamplingParams(max_tokens=20)
    elif kind == "string":
        answer[5:8] = [6, 7, 8]
        params = SamplingParams(max_tokens=20, stop="STOP")
    metrics = (output := run(answer, params, lengths=(drafted,))).metrics
    delivered = len(output.token_ids)
    assert metrics.num_accepted_tokens <= delivered - 1, "accepted more than was delivered"
    assert sum(metrics.accepted_per_position) == metrics.num_accepted_tokens
    assert metrics.num_accepted_tokens <= metrics.num_draft_tokens
    # The prompt's chunk gives the first token, every round at most one that no draft named.
    assert delivered <= 1 + metrics.num_rounds + metrics.num_accepted_tokens


def test_a_stream_is_the_output_in_pieces() -> None:
    """Text that a stop string may take back is held; ids and text joined are the final ones."""
    answer = [A, 4, 6, B, 6, 7, A, 6, 7, 8, C]
    for drafted in (1, 2, 8):
        for params in (
            SamplingParams(max_tokens=20, stop="STOP"),
            SamplingParams(max_tokens=9, stop="STOP"),
            SamplingParams(max_tokens=20, stop=("STOP", "bSTO", "zzz")),
        ):
            llm = build(answer, (drafted,))
            deltas = list(llm.stream(list(PROMPT), params))
            output = deltas[-1].output
            assert output is not None
            check(output, expected([*answer, *[A] * 20], params))
            assert all(delta.output is None for delta in deltas[:-1])
            assert "".join(delta.text for delta in deltas) == output.text
            ids = [token for delta in deltas for token in delta.token_ids]
            assert ids == list(output.token_ids)


@given(
    answer=st.lists(st.integers(0, len(PIECES) - 1), max_size=24),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    stop=st.lists(
        st.sampled_from(["STOP", "ST", "a", "bc", "ba", "\n\n", "\n\n\n", "PS", "c\n", "abSTOPa"]),
        max_size=3,
        unique=True,
    ),
    stop_token_ids=st.lists(st.sampled_from([11, 12]), max_size=1),
    ignore_eos=st.booleans(),
    max_tokens=st.integers(1, 24),
)
def test_any_text_ends_where_the_rules_say(
    answer: list[int],
    lengths: list[int],
    stop: list[str],
    stop_token_ids: list[int],
    ignore_eos: bool,
    max_tokens: int,
) -> None:
    """Random texts, blocks and rules, streamed and whole, against the token-by-token oracle."""
    params = SamplingParams(
        max_tokens=max_tokens,
        stop=tuple(s for s in stop if not set(s) & {"\n", " "} or not stop_token_ids),
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=ignore_eos,
    )
    run(answer, params, lengths)


# --- a real tokenizer ------------------------------------------------------------------------


def test_characters_of_several_tokens_are_shown_whole() -> None:
    """Half a character must not be shown, nor lost at the end; a stop string may follow it."""
    tokenizer = Tokenizer(bpe_backend())
    text = "naïve 東京 and 🌲🌲 end of the text"
    answer = tokenizer.encode(text)
    assert len(answer) > len(text.split()) + 8, "the tokenizer knows these characters whole"
    prompt = tokenizer.encode("the")
    model = ToyModel(scripted_law(len(tokenizer), len(prompt), answer), len(tokenizer))
    for stop in ((), (" and",), ("🌲",), ("🌲 end",)):
        for drafted in (1, 4, 9):
            llm = tiny_llm(model, drafter=chain_drafter(answer, (drafted,)), tokenizer=tokenizer)
            params = SamplingParams(max_tokens=len(answer), stop=stop)
            deltas = list(llm.stream(prompt, params))
            wanted = min((text.split(s)[0] for s in stop), key=len, default=text)
            shown = "".join(delta.text for delta in deltas)
            assert shown == wanted
            assert "\ufffd" not in shown
            output = deltas[-1].output
            assert output is not None
            assert tokenizer.decode(output.token_ids).startswith(wanted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stops_of_a_tiny_model_do_not_depend_on_speculation(temperature: float) -> None:
    """End tokens and strings taken from a real text, hit by branching trees."""
    prompts = random_prompts((5, 20, 9))
    base = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    texts = tiny_llm(drafter="none").run(prompts, base)
    assert max(map(distinct, texts)) > 8
    answers = {tuple(p): t for p, t in zip(prompts, texts, strict=True)}
    letters = "".join(chr(ord("a") + token) for token in texts[0])
    for stop_id, stop in ((texts[0][11], ""), (texts[1][7], letters[13:16]), (30, letters[20:22])):
        params = base.but(stop_token_ids=(stop_id,), stop=(stop,) if stop else ())
        plain = tiny_llm(drafter="none").outputs(prompts, params)
        tree = tiny_llm(hf_model(), drafter=near_oracle(answers)).outputs(prompts, params)
        assert any(o.finish_reason == "stop" for o in plain)
        for a, b in zip(plain, tree, strict=True):
            assert (a.text, a.token_ids, a.finish_reason, a.stop_reason) == (
                b.text, b.token_ids, b.finish_reason, b.stop_reason,
            )  # fmt: skip
