"""Requests that begin alike and come at the same time: what they share is computed once."""

from __future__ import annotations

import pytest

from draftwood.sampling import SamplingParams
from tests.tiny import (
    CountingModel,
    TinyLLM,
    hf_model,
    random_prompts,
    run_until,
    tiny_llm,
)

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
LENGTH = 80
COUNT = 5
# Five answers of six tokens; the last one's KV is never computed, and a root is its own row.
ANSWER_ROWS = COUNT * (PARAMS.max_tokens or 0) - COUNT


def prompts() -> list[list[int]]:
    """The same 80 tokens, and three more of each one's own."""
    [common] = random_prompts([LENGTH])
    return [[*common, i, i + 1, i + 2] for i in range(COUNT)]


def counting_llm(**config: object) -> tuple[TinyLLM, CountingModel]:
    """Plain decoding, so that rows can be counted by hand."""
    target = CountingModel(hf_model("llama"))
    return tiny_llm(target, **{"drafter": "none", "block_size": 4, **config}), target  # type: ignore[arg-type]


def assert_all_free(llm: TinyLLM) -> None:
    """Nothing but cached prefixes is held."""
    llm.engine.prefix.clear()
    llm.pool.check()
    assert llm.pool.num_free == llm.pool.num_blocks


@pytest.mark.parametrize("rows", [16, 512])
def test_a_common_prefix_is_computed_once(rows: int) -> None:
    llm, target = counting_llm(max_batch_tokens=rows)
    outputs = llm.outputs(prompts(), PARAMS)
    assert target.num_rows == LENGTH + COUNT * 3 + ANSWER_ROWS
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, *[LENGTH] * (COUNT - 1)]
    alone = [tiny_llm("llama", drafter="none").run([one], PARAMS)[0] for one in prompts()]
    assert [list(output.token_ids) for output in outputs] == alone
    assert_all_free(llm)


def test_a_prefix_of_one_that_decodes_already_is_found() -> None:
    llm, target = counting_llm()
    first, second, *_ = prompts()
    one = llm.engine.add(first, PARAMS.but(max_tokens=40))
    for _ in range(4):
        llm.engine.step()
    target.clear()
    other = llm.engine.add(second, PARAMS)
    llm.engine.step()
    assert target.rows == [1 + 3], "one decodes, of the other three tokens are new"
    run_until(llm, [one, other])
    assert_all_free(llm)


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_when_the_first_is_aborted_the_next_computes_it(rounds: int) -> None:
    llm, target = counting_llm(max_batch_tokens=16)
    seqs = [llm.engine.add(one, PARAMS) for one in prompts()]
    for _ in range(rounds):
        llm.engine.step()
    llm.engine.abort(seqs[0])
    run_until(llm, seqs[1:])
    assert [seq.output_ids for seq in seqs[1:]] == tiny_llm("llama", drafter="none").run(
        prompts()[1:], PARAMS
    )
    assert target.num_rows <= 2 * LENGTH + COUNT * 3 + ANSWER_ROWS
    assert_all_free(llm)


def test_tenants_do_not_wait_for_each_other() -> None:
    llm, target = counting_llm()
    params = [PARAMS.but(cache_salt=f"tenant {i}") for i in range(COUNT)]
    seqs = [llm.engine.add(one, own) for one, own in zip(prompts(), params, strict=True)]
    llm.engine.step()
    assert all(seq.lease.length == LENGTH + 3 for seq in seqs)
    run_until(llm, seqs)
    assert target.num_rows == COUNT * (LENGTH + 3) + ANSWER_ROWS
    assert_all_free(llm)


def test_a_block_in_common_is_no_reason_to_wait() -> None:
    llm, target = counting_llm()
    seqs = [llm.engine.add([1, 2, 3, 4, 5 + i, *range(8)], PARAMS) for i in range(COUNT)]
    llm.engine.step()
    assert target.rows == [COUNT * 13]
    run_until(llm, seqs)
    assert_all_free(llm)


def test_others_are_admitted_meanwhile() -> None:
    """Who waits keeps a place, and only that."""
    llm, _ = counting_llm(max_batch_tokens=16, max_num_seqs=3)
    first, second, *_ = prompts()
    [stranger] = random_prompts([8], seed=9)
    seqs = [llm.engine.add(one, PARAMS) for one in (first, second, stranger)]
    llm.engine.step()
    assert [seq.lease.length > 0 for seq in seqs] == [True, False, False]
    assert [seq.metrics.start_s is None for seq in seqs] == [False, True, False]
    run_until(llm, seqs)
    assert_all_free(llm)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_texts_are_the_same_with_trees(temperature: float) -> None:
    params = PARAMS.but(max_tokens=16, temperature=temperature, seed=5)
    llm = tiny_llm("llama", drafter="bushy", block_size=4, max_batch_tokens=40)
    assert llm.run(prompts(), params) == [
        tiny_llm("llama", drafter="none").run([one], params)[0] for one in prompts()
    ]
    assert_all_free(llm)
