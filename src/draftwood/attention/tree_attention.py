"""Attention of new nodes over a whole context and their own ancestors.

The context is seen whole by every row, so it needs no mask; only the T new nodes need one, [T, T].
Grouped-query heads are read in place: the G query heads that share a key head become G times as
many rows of one matrix product, and keys and values are never repeated.

Where the CPU kernels can be had, `exact.py` computes the same with one order of summation, so that
a row's bits depend on nothing but its own path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.attention import exact
from draftwood.attention.batch import Batch, Segment
from draftwood.attention.rule import AttentionRule
from draftwood.kv import Plane, Slots


def tree_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    batch: Batch,
    plane: Plane,
    layer: int,
    rule: AttentionRule,
) -> Tensor:
    """Stores the new keys and values and attends.

    Args:
        queries: [N, num_heads, key_dim], rotated.
        keys: [N, num_kv_heads, key_dim], rotated.
        values: [N, num_kv_heads, value_dim].
        batch: which rows belong together.
        plane: the KV memory of this model; the new rows are written to it.
        layer: index of the layer in `plane`.
        rule: scaling, window and the like.

    Returns:
        [N, num_heads, value_dim].
    """
    for segment in batch.segments:
        rows = slice(segment.start, segment.stop)
        plane.write(layer, _tail(segment), keys[rows], values[rows])
    if exact.fits(queries, plane, rule):
        return exact.attention(queries, batch, plane, layer, rule)
    outputs = []
    for segment in batch.segments:
        rows = slice(segment.start, segment.stop)
        first, head, tail = segment.bias(rule.window)
        seen_keys, seen_values = plane.read(layer, _from(segment.slots, first))
        outputs.append(_attend(queries[rows], seen_keys, seen_values, head, tail, rule))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    head: Tensor | None,
    tail: Tensor | None,
    rule: AttentionRule,
) -> Tensor:
    """One sequence: [T, H, D] queries over [S, Hkv, D] keys, the tree's nodes last."""
    num_rows, num_heads, key_dim = queries.shape
    num_keys, num_kv_heads, value_dim = values.shape
    groups = num_heads // num_kv_heads
    stacked = (queries * rule.scaling).view(num_rows, num_kv_heads, groups, key_dim)
    stacked = stacked.permute(1, 2, 0, 3).reshape(num_kv_heads, groups * num_rows, key_dim)
    scores = torch.bmm(stacked, keys.permute(1, 2, 0))
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.view(num_kv_heads, groups, num_rows, num_keys)
    if head is not None:
        scores[..., : head.shape[1]] += head
    if tail is not None:
        scores[..., num_keys - tail.shape[1] :] += tail
    weights = _softmax(scores, rule.sinks).to(values.dtype)
    weights = weights.view(num_kv_heads, groups * num_rows, num_keys)
    mixed = torch.bmm(weights, values.permute(1, 0, 2))
    mixed = mixed.view(num_kv_heads, groups, num_rows, value_dim)
    return mixed.permute(2, 0, 1, 3).reshape(num_rows, num_heads, value_dim)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over keys in float32; a sink adds a column that is dropped afterwards."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    column = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores.float(), column], dim=-1), dim=-1)[..., :-1]


def _tail(segment: Segment) -> Slots:
    """The slots of a segment's new rows."""
    if isinstance(segment.slots, slice):
        return slice(segment.slots.stop - segment.num_rows, segment.slots.stop)
    return segment.slots[-segment.num_rows :]


def _from(slots: Slots, first: int) -> Slots:
    if first == 0:
        return slots
    return slice(slots.start + first, slots.stop) if isinstance(slots, slice) else slots[first:]
