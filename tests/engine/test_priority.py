"""Who is more urgent takes places and memory of others, who lose time by it and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.engine.scheduler import Scheduler
from draftwood.engine.sequence import Sequence, Status
from draftwood.sampling import SamplingParams
from tests.tiny import TinyLLM, bushy_drafter, random_prompts, run_until, tiny_llm
from tests.toys import ToyModel, random_law

TOY = ToyModel(random_law(8, seed=1), 8)
WARM = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=5)


def _llm(**arguments: Any) -> TinyLLM:
    settings = {"drafter": bushy_drafter(8), "block_size": 4, "max_tree_nodes": 4} | arguments
    return tiny_llm(TOY, vocab_size=8, **settings)


def _plain(prompt: list[int], params: SamplingParams = WARM) -> list[int]:
    return tiny_llm(TOY, drafter="none", vocab_size=8).run([prompt], params)[0]


def _add(llm: TinyLLM, prompt: list[int], priority: int, params: SamplingParams = WARM) -> Sequence:
    seq = llm.engine.make(prompt, params)
    seq.priority = priority
    llm.engine.submit(seq)
    return seq


def _put_back(monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """Who is put back from now on."""
    seqs: list[Sequence] = []
    preempt = Scheduler._preempt

    def spy(self: Scheduler, seq: Sequence) -> None:
        seqs.append(seq)
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "_preempt", spy)
    return seqs


def test_an_urgent_request_takes_the_place_of_the_youngest_that_is_less_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_back = _put_back(monkeypatch)
    llm = _llm(max_num_seqs=3)
    prompts = random_prompts((9, 10, 11, 12), vocab_size=8)
    old, middle, young = (_add(llm, p, rank) for p, rank in zip(prompts, (5, 0, 5), strict=False))
    for _ in range(3):
        llm.engine.step()
    told = [list(seq.output_ids) for seq in (old, middle, young)]
    assert all(told)
    urgent = _add(llm, prompts[3], -1)
    llm.engine.step()
    assert put_back == [young]
    assert [seq.status for seq in (old, middle, urgent)] == [Status.RUNNING] * 3
    assert young.output_ids == told[2]
    run_until(llm, [old, middle, young, urgent])
    texts = [seq.output_ids for seq in (old, middle, young, urgent)]
    assert texts == [_plain(prompt) for prompt in prompts]


def test_who_is_as_urgent_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    put_back = _put_back(monkeypatch)
    llm = _llm(max_num_seqs=2)
    prompts = random_prompts((9, 10, 11), vocab_size=8)
    first, second, third = (_add(llm, prompt, 1) for prompt in prompts)
    llm.engine.step()
    less = _add(llm, prompts[0], 2)
    more = _add(llm, prompts[1], 1)
    llm.engine.step()
    assert not put_back
    assert llm.engine.unfinished == (first, second, third, more, less)
    run_until(llm, [first, second, third, less, more])


def test_when_memory_runs_out_the_least_urgent_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is the oldest; the youngest, most urgent one is never put back."""
    put_back = _put_back(monkeypatch)
    llm = _llm(num_blocks=16)
    prompts = random_prompts((16, 17, 18), vocab_size=8)
    seqs = [_add(llm, p, rank) for p, rank in zip(prompts, (2, 1, 0), strict=True)]
    run_until(llm, seqs)
    assert seqs[0] in put_back
    assert seqs[2] not in put_back
    assert [seq.output_ids for seq in seqs] == [_plain(prompt) for prompt in prompts]


def test_who_lost_a_place_only_computes_little_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV stays as long as nobody needs the memory, and is not counted as a cached prompt."""
    put_back = _put_back(monkeypatch)
    llm = _llm(max_num_seqs=1)
    long, short = random_prompts((60, 5), vocab_size=8)
    rows: list[int] = []

    class _Rows:
        def on_round(self, round_: Any) -> None:
            rows.append(round_.num_prefill_rows)

    seq = _add(llm, long, 0)
    for _ in range(3):
        llm.engine.step()
    llm.engine.observers.append(_Rows())
    run_until(llm, [_add(llm, short, -1, WARM.but(max_tokens=2)), seq])
    assert put_back == [seq]
    assert sum(rows) <= 5 + 2 * 4  # the short prompt, and at most a block and what lay behind it
    assert seq.metrics.num_cached_tokens == 0
    assert seq.output_ids == _plain(long)


_requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(-2, 2), st.integers(0, 6), st.booleans()),
    min_size=2,
    max_size=8,
)


@given(_requests, st.integers(1, 3), st.integers(16, 40))
def test_priorities_change_no_text(
    requests: list[tuple[int, int, int, bool]], places: int, num_blocks: int
) -> None:
    """Whoever comes when, is cancelled, or has to wait: each text is that of the prompt alone."""
    llm = _llm(max_num_seqs=places, num_blocks=num_blocks, max_batch_tokens=12)
    prompts = random_prompts(tuple(length for length, *_ in requests), vocab_size=8)
    seqs = []
    for prompt, (_, priority, pause, _) in zip(prompts, requests, strict=True):
        seqs.append(_add(llm, prompt, priority))
        for _ in range(pause):
            llm.engine.step()
    gone = [seq for seq, (*_, gives_up) in zip(seqs, requests, strict=True) if gives_up]
    for seq in gone:
        llm.engine.abort(seq)
    run_until(llm, seqs)
    for seq, prompt in zip(seqs, prompts, strict=True):
        whole = _plain(prompt)
        assert seq.output_ids == whole[: len(seq.output_ids)]
        assert seq in gone or seq.output_ids == whole
    llm.engine.prefix.clear()
    llm.pool.check()
    assert llm.pool.num_free == llm.pool.num_blocks
