"""Penalties, bias, bans, log-probabilities and n: at every node as in plain decoding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from draftwood.draft.synthetic import OracleDrafter
from draftwood.errors import ConfigError
from draftwood.sampling import SamplingParams
from draftwood.sampling.rules import make_rules
from tests import tiny


def _same_class(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Tokens that leave the same rest as the last one, divided by 3."""
    return torch.arange(scores.shape[1]) % 3 == ids[:, -1:] % 3


RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9},
    {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    {"logit_bias": {3: 4.0, 5: -math.inf, 7: -2.0}},
    {"logits_processors": (lambda ids, scores: scores - 3.0 * _same_class(ids, scores),)},
    {"min_tokens": 12, "stop_token_ids": (1, 2, 3, 4)},
]
PROMPT = [4, 9, 4, 9, 4]


@pytest.mark.parametrize("values", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_change_the_text_the_same_way_in_a_tree(
    values: dict[str, Any], temperature: float
) -> None:
    """Drafts are verified under the rules of their own path, or a penalty is silently ignored."""
    llm = tiny.tiny_llm("llama", drafter=tiny.bushy_drafter(tiny.VOCAB), adaptive=False)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=7, ignore_eos=True)
    free = llm.generate(PROMPT, params.but(speculation=False))[0]
    plain = llm.generate(PROMPT, params.but(speculation=False, **values))[0]
    tree = llm.generate(PROMPT, params.but(**values))[0]
    assert tree.token_ids == plain.token_ids
    assert plain.token_ids != free.token_ids, "the rule did nothing: the test could not fail"
    assert tree.metrics.num_draft_tokens > 0


def apply(params: SamplingParams, tokens: list[int], bad: list[list[int]] | None = None) -> Any:
    logits = torch.linspace(-2, 2, 16)
    return make_rules(params, [0, 15], bad or []).apply(logits, tokens, 3)


def test_rules_are_transformers() -> None:
    tokens = [3, 5, 5, 12, 3, 7]
    ids, logits = torch.tensor([tokens]), torch.linspace(-2, 2, 16)
    ours = apply(SamplingParams(repetition_penalty=1.7), tokens)
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits[None].clone())[0]
    torch.testing.assert_close(ours, theirs)
    ours = apply(SamplingParams(), tokens, [[9], [3, 7, 1], [7, 2], [12, 7]])
    words = NoBadWordsLogitsProcessor([[9], [3, 7, 1], [7, 2], [12, 7]], eos_token_id=[15])
    assert torch.equal(ours, words(ids, logits[None].clone())[0])
    for least in (3, 4):
        ours = apply(SamplingParams(min_tokens=least), tokens)
        rule = MinNewTokensLengthLogitsProcessor(3, least, [0, 15], device="cpu")
        assert torch.equal(ours, rule(ids, logits[None].clone())[0])


def test_openai_penalties_count_the_output_only() -> None:
    """Tokens 3 and 5 of the prompt are not punished; 12, 3 and 7 were generated."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    changed = torch.linspace(-2, 2, 16) - apply(params, [3, 5, 5, 12, 7, 7])
    expected = torch.zeros(16)
    expected[12], expected[7] = 0.75, 1.0
    torch.testing.assert_close(changed, expected)


def test_the_callers_logits_are_left_alone() -> None:
    logits = torch.zeros(16)
    make_rules(SamplingParams(logit_bias={3: 1.0}), [], []).apply(logits, [1], 1)
    assert not logits.any()


def test_a_banned_token_never_appears() -> None:
    """Minus infinity has to hold at every position of an accepted block."""
    llm = tiny.tiny_llm("llama", drafter=tiny.bushy_drafter(tiny.VOCAB), adaptive=False)
    params = SamplingParams(max_tokens=60, temperature=1.5, seed=1, ignore_eos=True)
    bias = dict.fromkeys(range(0, tiny.VOCAB, 2), -math.inf)
    ids = llm.generate(PROMPT, params.but(logit_bias=bias))[0].token_ids
    assert len(ids) == 60
    assert all(token % 2 for token in ids)


@settings(max_examples=25, deadline=None)
@given(
    repetition=st.sampled_from([1.0, 0.9, 1.3]),
    presence=st.sampled_from([0.0, -0.7, 1.1]),
    frequency=st.sampled_from([0.0, 0.4]),
    bias=st.dictionaries(
        st.integers(0, tiny.VOCAB - 1), st.sampled_from([-math.inf, -1.0, 2.0]), max_size=4
    ),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 5]),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_mix_of_rules_gives_the_plain_text(
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    temperature: float,
    top_k: int,
    seed: int,
) -> None:
    llm = tiny.tiny_llm("qwen2", drafter="auto", adaptive=False)
    params = SamplingParams(
        max_tokens=24,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        ignore_eos=True,
    )
    plain = llm.generate(PROMPT, params.but(speculation=False))[0].token_ids
    assert llm.generate(PROMPT, params)[0].token_ids == plain


@pytest.mark.parametrize("speculation", [False, True])
def test_logprobs_are_teacher_forced_ones(speculation: bool) -> None:
    """They are the model's own at each place of the final text, with the top ones in order."""
    llm = tiny.tiny_llm("llama", drafter=tiny.bushy_drafter(tiny.VOCAB), adaptive=False)
    params = SamplingParams(
        max_tokens=20,
        temperature=1.0,
        seed=5,
        logprobs=3,
        prompt_logprobs=2,
        ignore_eos=True,
        speculation=speculation,
        repetition_penalty=1.2,
    )
    output = llm.generate(PROMPT, params)[0]
    ids = [*PROMPT, *output.token_ids]
    module = tiny.reference("llama")  # made outside: it is kept, and others may want gradients
    with torch.inference_mode():
        logits = module(input_ids=torch.tensor([ids])).logits[0]
    expected = torch.log_softmax(logits, -1)
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert output.prompt_logprobs[0] is None
    rows = [entry for entry in (*output.prompt_logprobs[1:], *output.logprobs) if entry]
    for place, entry in enumerate(rows):
        row = expected[place]
        assert entry.token == ids[place + 1]
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        assert entry.rank == int((row > row[entry.token]).sum()) + 1
        top = row.topk(len(entry.top))
        assert [token for token, _ in entry.top] == top.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk", [3, 5, 7, 16])
@pytest.mark.parametrize("spare", range(3))
def test_prompt_logprobs_survive_being_put_back(chunk: int, spare: int) -> None:
    """The prompt is then computed again in other chunks, which begin in front of what is known."""
    prompts = tiny.random_prompts((17, 29, 23, 26))
    params = SamplingParams(max_tokens=16, prompt_logprobs=2, ignore_eos=True)
    wanted = [tiny.tiny_llm("llama").outputs([prompt], params)[0] for prompt in prompts]
    config: dict[str, Any] = {"block_size": 2, "max_batch_tokens": chunk, "num_blocks": 29 + spare}
    llm = tiny.tiny_llm("llama", drafter="bushy", **config)
    outputs = llm.outputs(prompts, params)
    assert llm.engine.num_preemptions > 0
    for output, one in zip(outputs, wanted, strict=True):
        assert output.prompt_logprobs is not None
        assert one.prompt_logprobs is not None
        got, expected = output.prompt_logprobs[1:], one.prompt_logprobs[1:]
        assert [each.token for each in got if each] == list(one.prompt_token_ids[1:])
        assert [each.logprob for each in got if each] == pytest.approx(
            [each.logprob for each in expected if each], abs=1e-4
        )


def test_n_outputs_share_the_prompts_kv_and_keep_their_texts() -> None:
    llm = tiny.tiny_llm("llama", block_size=4)
    prompt = list(range(1, 22))
    params = SamplingParams(max_tokens=12, temperature=1.2, seed=3, n=4, ignore_eos=True)
    output = llm.generate(prompt, params)[0]
    texts = [output.token_ids, *(other.token_ids for other in output.alternatives)]
    assert len(set(texts)) == 4
    assert all(o.metrics.num_cached_tokens == len(prompt) - 1 for o in output.alternatives)
    for i, ids in enumerate(texts):
        llm.engine.prefix.clear()
        alone = llm.generate(prompt, params.but(n=1, seed=3 + i))[0]
        assert alone.token_ids == ids
    llm.engine.prefix.clear()
    assert llm.pool.num_free == llm.pool.num_blocks


def test_ids_outside_the_vocabulary_are_named() -> None:
    llm = tiny.tiny_llm("llama")
    with pytest.raises(ConfigError, match="logit_bias names token id 999"):
        llm.generate(PROMPT, SamplingParams(logit_bias={999: 1.0}))
    with pytest.raises(ConfigError, match="stop_token_ids names token id 999"):
        llm.generate(PROMPT, SamplingParams(stop_token_ids=(999,)))


def _script(words: list[int], prompt: list[int]) -> Any:
    """A processor that knows a text of so many tokens, and nothing of what would come behind it."""

    def say(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, words[ids.shape[1] - len(prompt)]] = 1e4
        return scores

    return say


@pytest.mark.parametrize("ending", ["stop token", "stop string", "length"])
def test_a_processor_is_not_asked_behind_the_end(ending: str) -> None:
    """Plain decoding never does. A tree may reach further than the text, here by five tokens."""
    words = [5, 6, 7, 8, 9, 3]
    told = tiny.tiny_llm("llama", drafter="none").engine.tokenizer.decode(words)
    params = SamplingParams(
        max_tokens=len(words) if ending == "length" else 30,
        ignore_eos=True,
        stop_token_ids=(words[-1],) if ending == "stop token" else (),
        stop=(told[-2:],) if ending == "stop string" else (),
        logits_processors=(_script(words, PROMPT),),
    )
    answer = [*PROMPT, *words, *(words[-1:] * 5)]
    llm = tiny.tiny_llm(
        "llama", drafter=OracleDrafter({tuple(PROMPT): answer}), adaptive=False, max_tree_nodes=12
    )
    plain = llm.generate(PROMPT, params.but(speculation=False))[0]
    [tree] = llm.generate(PROMPT, params)
    kept = words[:-2] if ending == "stop string" else words  # which is no part of the text
    assert list(tree.token_ids) == list(plain.token_ids) == kept
    assert (tree.text, tree.finish_reason) == (plain.text, plain.finish_reason)
    assert tree.metrics.num_accepted_tokens >= len(kept) - 2


def test_a_processor_that_fails_within_the_text_is_an_error() -> None:
    words = [5, 6, 7]
    params = SamplingParams(
        max_tokens=10, ignore_eos=True, logits_processors=(_script(words, PROMPT),)
    )
    for drafter in ("none", OracleDrafter({tuple(PROMPT): [*PROMPT, *words, 1, 1, 1]})):
        llm = tiny.tiny_llm("llama", drafter=drafter, adaptive=False)
        with pytest.raises(IndexError):
            llm.generate(PROMPT, params)
        llm.pool.check()
