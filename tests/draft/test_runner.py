"""The one place where a draft model is fed."""

from __future__ import annotations

import itertools

import torch

from draftwood.attention import Work
from draftwood.draft.pace import Pace
from draftwood.draft.runner import CHUNK, DraftRunner, PlaneKV, expansion
from draftwood.kv import BlockPool, Lease
from draftwood.tree import TokenTree
from tests.tiny import CountingModel, hf_model

MODEL = hf_model("llama", vocab_size=12, calm=True)


def opened(num_slots: int) -> tuple[DraftRunner, PlaneKV, CountingModel, Pace]:
    pool = BlockPool(MODEL.spec.kv, MODEL.spec.kv, num_blocks=60, block_size=16, debug=True)
    assert pool.draft is not None
    lease = Lease(pool)
    lease.reserve(num_slots)
    model, cost = CountingModel(MODEL), Pace()
    ticks = itertools.count()
    return DraftRunner(model, pool.draft, cost, lambda: next(ticks)), PlaneKV(lease), model, cost


def test_it_reads_what_is_missing_in_chunks_and_times_them() -> None:
    runner, kv, model, cost = opened(700)
    kv.computed = 7
    runner.read(kv, [1] * 700, 600)
    assert (model.rows, kv.computed) == ([CHUNK, 600 - 7 - CHUNK], 600)
    assert cost.at(0)(600) > 0
    runner.read(kv, [1] * 700, 608, spare=8)
    assert kv.computed == 600, "a few are left to the next forward"


def test_a_kept_path_is_worth_what_reading_it_is() -> None:
    """Nodes that were run in a tree and kept give the logits of a text that was read."""
    prompt, path = [1, 2, 3, 4], [5, 7, 8]
    tree = TokenTree((5, 6, 7, 8), (-1, 0, 0, 2), (1.0,) * 4, ("",) * 4)
    runner, kv, *_ = opened(20)
    runner.read(kv, prompt, 4)
    runner.forward([expansion(kv, 4, tree, 0)])
    kv.keep(4, [0, 2, 3])
    assert kv.computed == 7
    grown = runner.forward([Work(kv.lease, 7, [9], None, (0,))])
    other, fresh, *_ = opened(20)
    other.read(fresh, [*prompt, *path], 7)
    read = other.forward([Work(fresh.lease, 7, [9], None, (0,))])
    assert torch.allclose(grown, read, atol=1e-5)
