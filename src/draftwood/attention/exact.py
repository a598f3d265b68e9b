"""Attention by the CPU kernels, which sum along a row's own path in one order.

A node of a tree then gets the same bits as the same token in plain decoding, where its ancestors
are context: with linear layers that are exact by rows, speculation changes no bit of any logit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.attention.batch import Batch
from draftwood.attention.rule import AttentionRule
from draftwood.kernels import ops
from draftwood.kv import Plane


def layout(batch: Batch) -> ops.Layout:
    """Who sees what, for the kernels; made once for all layers of a forward."""
    if batch.layout is None:
        rows = [ops.Rows(s.num_rows, s.context, s.slots, s.ancestors) for s in batch.segments]
        object.__setattr__(batch, "layout", ops.Layout(rows))
    assert batch.layout is not None
    return batch.layout


def fits(queries: Tensor, plane: Plane, rule: AttentionRule) -> bool:
    """Whether the kernels can compute this attention on this machine."""
    spec = plane.spec
    return (
        spec.device.type == "cpu"
        and spec.dtype == torch.float32
        and spec.key_dim == spec.value_dim
        and rule.sinks is None
        and ops.supports_attention(queries.shape[1], spec.num_kv_heads, spec.key_dim)
        and ops.available()
    )


def attention(
    queries: Tensor, batch: Batch, plane: Plane, layer: int, rule: AttentionRule
) -> Tensor:
    """[N, num_heads, dim] queries to the same shape; the new keys and values are in the plane."""
    return ops.attention(
        queries.contiguous(),
        plane.keys[layer],
        plane.values[layer],
        layout(batch),
        rule.scaling,
        rule.window,
        rule.softcap,
    )
