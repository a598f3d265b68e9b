"""Both ways to compute attention over a tree, against a plain softmax over each row's own path."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftwood.attention import AttentionRule, Work, exact, pack, tree_attention
from draftwood.kv import BlockPool, KVSpec, Lease
from draftwood.tree import TokenTree
from tests.unit.test_token_tree import trees

HEADS, KV_HEADS, DIM = 4, 2, 16
SPEC = KVSpec(1, KV_HEADS, DIM, DIM, torch.float32, torch.device("cpu"))
ways = pytest.mark.parametrize("way", ["torch", "kernels"])


@pytest.fixture(autouse=True)
def _choose_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.getfixturevalue("way") == "torch":
        monkeypatch.setattr(exact, "fits", lambda *args: False)
    else:
        assert exact.ops.available(), "the CPU kernels cannot be built here"


def reference(query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
    """One row, [H, D], over its path, [L, Hkv, D], in float64."""
    first = 0 if rule.window is None else max(0, len(keys) - rule.window)
    keys = keys[first:].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    values = values[first:].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("hd,lhd->hl", query.double(), keys) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), values)


@ways
@settings(max_examples=40, deadline=None)
@given(
    tree=trees(max_nodes=12),
    context=st.integers(0, 40),
    window=st.sampled_from([None, 1, 3, 8, 33]),
    softcap=st.sampled_from([None, 5.0]),
    scattered=st.booleans(),
)
def test_every_row_sees_its_own_path(
    way: str,
    tree: TokenTree,
    context: int,
    window: int | None,
    softcap: float | None,
    scattered: bool,
) -> None:
    torch.manual_seed(context)
    rule = AttentionRule(1 / math.sqrt(DIM), window, softcap)
    pool = BlockPool(SPEC, num_blocks=40, block_size=3, debug=True)
    if scattered:
        pool.release([pool.take() for _ in range(40)][::2])
    lease = Lease.open(pool)
    lease.reserve(context + len(tree))
    old_keys, old_values = torch.randn(2, context, KV_HEADS, DIM)
    pool.target.write(0, lease.slots(0, context), old_keys, old_values)
    batch = pack([Work(lease, context, tree.tokens, tree, [])], SPEC.device)
    queries = torch.randn(len(tree), HEADS, DIM)
    keys, values = torch.randn(2, len(tree), KV_HEADS, DIM)
    out = tree_attention(queries, keys, values, batch=batch, plane=pool.target, layer=0, rule=rule)
    for node in range(len(tree)):
        path = list(tree.path(node))
        expected = reference(
            queries[node],
            torch.cat([old_keys, keys[path]]),
            torch.cat([old_values, values[path]]),
            rule,
        )
        torch.testing.assert_close(out[node].double(), expected, atol=2e-5, rtol=1e-4)


@ways
def test_a_level_of_a_growing_tree_sees_the_levels_above(way: str) -> None:
    """The upper part of the tree has KV already; only the last nodes are rows of this forward."""
    torch.manual_seed(0)
    tree = TokenTree((1, 2, 3, 4), (-1, 0, 0, 1), (1.0,) * 4, ("",) * 4)
    pool = BlockPool(SPEC, num_blocks=4, debug=True)
    lease = Lease.open(pool)
    lease.reserve(9)
    keys, values = torch.randn(2, 9, KV_HEADS, DIM)
    pool.target.write(0, lease.slots(0, 7), keys[:7], values[:7])
    batch = pack([Work(lease, 5, (3, 4), tree, [])], SPEC.device)
    assert batch.positions.tolist() == [6, 7]
    queries = torch.randn(2, HEADS, DIM)
    out = tree_attention(
        queries,
        keys[7:],
        values[7:],
        batch=batch,
        plane=pool.target,
        layer=0,
        rule=AttentionRule(0.25),
    )
    for row, path in ((0, [0, 1, 2, 3, 4, 5, 7]), (1, [0, 1, 2, 3, 4, 5, 6, 8])):
        expected = reference(queries[row], keys[path], values[path], AttentionRule(0.25))
        torch.testing.assert_close(out[row].double(), expected, atol=2e-5, rtol=1e-4)


@ways
def test_sequences_of_a_batch_do_not_see_each_other(way: str) -> None:
    torch.manual_seed(0)
    pool = BlockPool(SPEC, num_blocks=8, debug=True)
    leases = [Lease.open(pool), Lease.open(pool)]
    for lease in leases:
        lease.reserve(4)
    works = [Work(lease, 0, [1, 2, 3], None, []) for lease in leases]
    queries = torch.randn(6, HEADS, DIM)
    keys, values = torch.randn(2, 6, KV_HEADS, DIM)
    out = tree_attention(
        queries,
        keys,
        values,
        batch=pack(works, SPEC.device),
        plane=pool.target,
        layer=0,
        rule=AttentionRule(0.25),
    )
    for row in range(6):
        path = list(range(row // 3 * 3, row + 1))
        expected = reference(queries[row], keys[path], values[path], AttentionRule(0.25))
        torch.testing.assert_close(out[row].double(), expected, atol=2e-5, rtol=1e-4)
