"""Attention over trees: right against float64, and the bits of plain decoding."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from draftwood.kernels import ops
from tests.kernels.trees import random_tree


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    dim: int
    context: int
    nodes: int
    window: int | None = None
    softcap: float | None = None


CASES = [
    Case(12, 2, 128, 700, 16),
    Case(9, 3, 64, 50, 64),
    Case(14, 2, 64, 0, 5),
    Case(8, 8, 80, 300, 33, window=100),
    Case(4, 1, 256, 40, 7, softcap=30.0),
    Case(12, 2, 128, 511, 20, window=37, softcap=50.0),
    Case(6, 2, 16, 255, 40, window=1),
]


def exact(case: Case, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One row over its own path, in float64."""
    repeat = case.heads // case.kv_heads
    keys = keys.double().repeat_interleave(repeat, 1)
    values = values.double().repeat_interleave(repeat, 1)
    scores = torch.einsum("hd,lhd->hl", q.double(), keys) * case.dim**-0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.window:
        scores[:, : max(0, len(keys) - case.window)] = float("-inf")
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), values)


def run(case: Case, q: Tensor, keys: Tensor, values: Tensor, *rows: ops.Rows) -> Tensor:
    layout = ops.Layout(rows)
    return ops.attention(q, keys, values, layout, case.dim**-0.5, case.window, case.softcap)


def scattered(case: Case, spare: int = 90) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, keys and values of a context and a tree in random places; NaN everywhere else."""
    used = case.context + case.nodes
    slots = torch.randperm(used + spare)[:used]
    keys = torch.full((used + spare, case.kv_heads, case.dim), float("nan"))
    values = keys.clone()
    keys[slots] = torch.randn(used, case.kv_heads, case.dim)
    values[slots] = torch.randn(used, case.kv_heads, case.dim)
    return slots, keys, values


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tree_has_the_bits_of_plain_decoding(kernels: str, case: Case) -> None:
    """Every node alone, its ancestors moved into a contiguous context, gives the same bits."""
    torch.manual_seed(1)
    slots, keys, values = scattered(case)
    mask, _ = random_tree(case.nodes)
    q = torch.randn(case.nodes, case.heads, case.dim) * 3
    out = run(case, q, keys, values, ops.Rows(case.nodes, case.context, slots, mask))
    for node in range(case.nodes):
        path = torch.cat([slots[: case.context], slots[case.context :][mask[node]]])
        expected = exact(case, q[node], keys[path], values[path])
        assert torch.allclose(out[node].double(), expected, atol=2e-5)
        row = ops.Rows(1, len(path) - 1, slice(0, len(path)))
        alone = run(case, q[node : node + 1], keys[path], values[path], row)
        assert torch.equal(alone[0], out[node])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunked_prefill(kernels: str, case: Case) -> None:
    torch.manual_seed(2)
    total = case.context + case.nodes
    shape = (total, case.kv_heads, case.dim)
    keys, values, q = (
        torch.randn(shape),
        torch.randn(shape),
        torch.randn(total, case.heads, case.dim),
    )
    whole = run(case, q, keys, values, ops.Rows(total, 0, slice(0, total)))
    assert not whole.isnan().any()
    start, parts = 0, []
    while start < total:
        stop = min(total, start + int(torch.randint(1, 90, (1,))))
        rows = ops.Rows(stop - start, start, slice(0, stop))
        parts.append(run(case, q[start:stop], keys, values, rows))
        start = stop
    assert torch.equal(torch.cat(parts), whole)


def test_rows_1_to_64(kernels: str) -> None:
    """A tree cut short after any node gives the remaining nodes the same bits."""
    torch.manual_seed(3)
    case = Case(6, 2, 64, 100, 64)
    slots, keys, values = scattered(case)
    mask, _ = random_tree(64)
    q = torch.randn(64, case.heads, case.dim)
    whole = run(case, q, keys, values, ops.Rows(64, 100, slots, mask))
    for rows in range(1, 65):
        share = ops.Rows(rows, 100, slots[: 100 + rows], mask[:rows, :rows])
        assert torch.equal(run(case, q[:rows], keys, values, share), whole[:rows])


def test_a_tree_grown_level_by_level(kernels: str) -> None:
    """Upper nodes have their KV already: only the last rows of the mask are computed."""
    torch.manual_seed(4)
    case = Case(6, 2, 64, 33, 20)
    slots, keys, values = scattered(case)
    mask, _ = random_tree(20)
    q = torch.randn(20, case.heads, case.dim)
    whole = run(case, q, keys, values, ops.Rows(20, 33, slots, mask))
    lower = run(case, q[12:], keys, values, ops.Rows(8, 33, slots, mask[12:]))
    assert torch.equal(lower, whole[12:])
    chain = torch.ones(20, 20).tril().bool()
    whole = run(case, q, keys, values, ops.Rows(20, 33, slots, chain))
    assert torch.equal(run(case, q[12:], keys, values, ops.Rows(8, 33, slots)), whole[12:])


def test_batches(kernels: str, eager_threads: None) -> None:
    """Several sequences, one of them a long prompt, as each alone."""
    torch.manual_seed(5)
    cases = [Case(6, 2, 64, 300, 10), Case(6, 2, 64, 0, 150), Case(6, 2, 64, 5, 1)]
    made = [scattered(case) for case in cases]
    offsets = [0, len(made[0][1]), len(made[0][1]) + len(made[1][1])]
    keys, values = (torch.cat([one[i] for one in made]) for i in (1, 2))
    masks = [random_tree(10)[0], None, None]
    q = [torch.randn(case.nodes, 6, 64) for case in cases]
    shares = [
        ops.Rows(case.nodes, case.context, one[0] + offset, mask)
        for case, one, offset, mask in zip(cases, made, offsets, masks, strict=True)
    ]
    together = run(cases[0], torch.cat(q), keys, values, *shares)
    alone = [
        run(case, rows, keys, values, share)
        for case, rows, share in zip(cases, q, shares, strict=True)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_whatever_the_threads(kernels: str, eager_threads: None) -> None:
    case = Case(9, 3, 64, 900, 7)
    slots, keys, values = scattered(case)
    q = torch.randn(7, 9, 64)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(run(case, q, keys, values, ops.Rows(7, 900, slots)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
