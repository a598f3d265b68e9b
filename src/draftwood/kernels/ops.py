"""Typed calls into the CPU kernels.

All tensors are contiguous float32 on CPU unless said otherwise. Every operator works row by row:
a row's result has the same bits whatever the other rows are, how many there are, and how many
threads run. `available()` must be true before anything but packing is called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels.build import load
from draftwood.kernels.packing import (
    Packed,
    PackedInt8,
    pack_int8,
    pointer,
    unpack_int8,
)

__all__ = [
    "Layout",
    "PackedInt8",
    "Rows",
    "argmax",
    "attention",
    "available",
    "instruction_set",
    "log_sum_exp",
    "noisy_top",
    "pack_int8",
    "quantised_embedding",
    "quantised_linear",
    "rms_norm",
    "rope_",
    "silu_mul",
    "supports_attention",
    "top_k",
    "top_shares",
    "unpack_int8",
]


def available() -> bool:
    """Whether the kernels can be used on this machine (see `build.why_unavailable`)."""
    return load() is not None


def instruction_set() -> str:
    """Which code runs: "avx512vnni", "avxvnni", "avx2" or "portable"."""
    return bytes(library().dw_isa()).decode()


def library() -> ctypes.CDLL:
    """The loaded kernels; `available()` must be true."""
    loaded = load()
    assert loaded is not None, "call available() first"
    return loaded


def _float_rows(x: Tensor) -> Tensor:
    assert (x.dtype, x.device.type) == (torch.float32, "cpu"), "float32 on CPU expected"
    return x.contiguous()


def int64(value: int) -> ctypes.c_int64:
    """A 64-bit argument of a C call."""
    return ctypes.c_int64(value)


def num_threads() -> int:
    """Threads a kernel may use: PyTorch's own number."""
    return int(torch.get_num_threads())


def quantised_linear(x: Tensor, packed: Packed, out: Tensor | None = None) -> Tensor:
    """[M, k] float32 to [M, n]: x with 8 bits per group, exact integer sums, float32 scales."""
    x = _float_rows(x)
    if out is None:
        out = torch.empty(len(x), packed.n)
    assert x.shape[1] == packed.k
    assert out.is_contiguous()
    library().dw_linear(
        pointer(x),
        int64(len(x)),
        int64(packed.k),
        ctypes.byref(packed.struct),
        packed.group,
        pointer(out),
        num_threads(),
    )
    return out


def quantised_embedding(ids: Tensor, packed: PackedInt8) -> Tensor:
    """[M] int64 token ids to [M, k] float32 rows of a packed table."""
    assert ids.dtype == torch.int64
    assert ids.numel() == 0 or 0 <= int(ids.min()) <= int(ids.max()) < packed.n
    ids = ids.contiguous()
    out = torch.empty(len(ids), packed.k)
    library().dw_embedding(
        pointer(ids),
        int64(len(ids)),
        ctypes.byref(packed.struct),
        int64(packed.k),
        packed.group,
        pointer(out),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """[M, n] to x / sqrt(mean(x^2) + eps) * weight.

    With `residual` ([M, n]), x is first added to it in place and the sum is normalised.
    """
    x = _float_rows(x)
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    out = torch.empty_like(x)
    library().dw_rms_norm(
        pointer(x),
        pointer(residual),
        pointer(weight),
        ctypes.c_float(eps),
        int64(x.numel() // x.shape[-1]),
        int64(x.shape[-1]),
        pointer(out),
        num_threads(),
    )
    return out


def rope_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [M, heads, dim] in place by [M, rotary / 2] cosines and sines; returns it.

    Pairs are (i, i + rotary / 2), as in Llama and Qwen. Heads and dim must be contiguous, rows may
    be strided.
    """
    rows, heads, dim = x.shape
    assert x.dtype == torch.float32
    assert x.stride(2) == 1
    assert x.stride(1) == dim
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    library().dw_rope(
        pointer(x),
        pointer(cos),
        pointer(sin),
        int64(rows),
        int64(heads),
        int64(dim),
        int64(2 * cos.shape[1]),
        int64(x.stride(0)),
        num_threads(),
    )
    return x


def silu_mul(gate_up: Tensor) -> Tensor:
    """[M, 2 n] to [M, n]: silu of the first half times the second half."""
    gate_up = _float_rows(gate_up)
    rows, width = gate_up.shape
    out = torch.empty(rows, width // 2)
    library().dw_silu_mul(
        pointer(gate_up), int64(rows), int64(width // 2), pointer(out), num_threads()
    )
    return out


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of every row of [M, V]: values and int64 indices, both [M, k].

    Largest first; among equals the lowest index first, so `top_k(x, 1)` is an argmax with a stated
    rule. NaN is never chosen.
    """
    return _top("dw_top_k", x, k)


def argmax(x: Tensor) -> list[int]:
    """Where each row of [M, V] is largest, the lowest index among equals; on any device."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and available():
        best: list[int] = top_k(x, 1)[1][:, 0].tolist()
    else:
        best = x.argmax(dim=-1).tolist()
    return best


def top_shares(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Like `top_k`, with softmax probabilities over the whole row in the place of values."""
    return _top("dw_top_shares", x, k)


def noisy_top(x: Tensor, temperature: float, key: int, k: int) -> tuple[Tensor, Tensor]:
    """The k tokens of a [V] row with the highest x / temperature + Gumbel noise, best first.

    Args:
        x: logits.
        temperature: above 0.
        key: of the noise's stream, 64 bits; see `sampling.noise`.
        k: how many.

    Returns:
        [k] float64 sums and [k] int64 tokens; among equals the lower token comes first.
    """
    assert (x.dtype, x.device.type) == (torch.float32, "cpu")
    assert x.is_contiguous()
    assert 0 < k <= len(x)
    keys = torch.empty(k, dtype=torch.float64)
    tokens = torch.empty(k, dtype=torch.int64)
    library().dw_noisy_top(
        pointer(x),
        int64(len(x)),
        ctypes.c_float(temperature),
        ctypes.c_uint64(key),
        k,
        pointer(keys),
        pointer(tokens),
    )
    return keys, tokens


def log_sum_exp(x: Tensor, temperature: float, top: float) -> float:
    """log(sum(exp(x / temperature))) of a [V] row whose largest value is `top`."""
    assert (x.dtype, x.device.type) == (torch.float32, "cpu")
    assert x.is_contiguous()
    result = library().dw_log_sum(
        pointer(x), int64(len(x)), ctypes.c_float(temperature), ctypes.c_float(top)
    )
    return float(result)


def _top(function: str, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    assert x.dtype == torch.float32
    assert x.stride(1) == 1
    assert 0 < k <= x.shape[1]
    values = torch.empty(len(x), k)
    indices = torch.empty(len(x), k, dtype=torch.int64)
    getattr(library(), function)(
        pointer(x),
        int64(len(x)),
        int64(x.shape[1]),
        int64(x.stride(0)),
        k,
        pointer(values),
        pointer(indices),
        num_threads(),
    )
    return values, indices


class SegmentStruct(ctypes.Structure):
    """`Segment` of attention.hpp."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("path", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("row0", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("context", ctypes.c_int32),
        ("nodes", ctypes.c_int32),
    )


class ShapeStruct(ctypes.Structure):
    """`AttentionShape` of attention.hpp."""

    _fields_ = (
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's share of the rows of an attention call.

    Attributes:
        rows: T, its number of rows.
        context: tokens that every row sees.
        slots: where the context and then the P nodes behind it lie, as a slice or int64 indices
            ([context + P]). The rows are the last T of the nodes.
        ancestors: [T, P] booleans, row i true at its ancestors and itself, parents before
            children; None for a chain.
    """

    rows: int
    context: int
    slots: slice | Tensor
    ancestors: Tensor | None = None


class Layout:
    """Who sees what, for all attention calls of one step."""

    def __init__(self, shares: Sequence[Rows]) -> None:
        self._kept: list[np.ndarray | Tensor] = []
        self.structs = (SegmentStruct * len(shares))()
        self.num_rows = 0
        for struct, share in zip(self.structs, shares, strict=True):
            self._fill(struct, share)
            self.num_rows += share.rows

    def _fill(self, struct: SegmentStruct, share: Rows) -> None:
        if isinstance(share.slots, slice):
            struct.start = share.slots.start or 0
            total = share.slots.stop - struct.start
        else:
            slots = share.slots.contiguous()
            assert slots.dtype == torch.int64
            self._kept.append(slots)
            struct.slots = slots.data_ptr()
            total = len(slots)
        struct.row0, struct.rows, struct.context = self.num_rows, share.rows, share.context
        struct.nodes = total - share.context
        assert struct.nodes >= share.rows, "slots must name the context and every node"
        if share.ancestors is not None:
            assert share.ancestors.shape == (share.rows, struct.nodes)
            rows, nodes = np.nonzero(share.ancestors.numpy())
            path = np.ascontiguousarray(nodes, dtype=np.int32)
            offset = np.zeros(share.rows + 1, dtype=np.int32)
            np.cumsum(np.bincount(rows, minlength=share.rows), out=offset[1:])
            self._kept += [path, offset]
            struct.path, struct.offset = path.ctypes.data, offset.ctypes.data


def supports_attention(heads: int, kv_heads: int, dim: int) -> bool:
    """Whether `attention` takes this shape."""
    return heads % kv_heads == 0 and dim % 16 == 0 and dim <= 256 and heads // kv_heads <= 192


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of every row over its own path.

    Args:
        q: [N, heads, dim], rows may be strided.
        keys, values: [slots, kv_heads, dim], one layer's planes, the new rows' own included.
        layout: the rows of every sequence, N in all.
        window: a row sees this many last positions, itself included; None for all.
        softcap: scores s become softcap * tanh(s / softcap).

    Returns:
        [N, heads, dim]. A row's bits are a function of its query and of the keys and values along
        its path, in the order of their positions: not of slots, of siblings or of the chunk.
    """
    num_rows, heads, dim = q.shape
    _, kv_heads, _ = keys.shape
    assert supports_attention(heads, kv_heads, dim)
    assert layout.num_rows == num_rows
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert keys.shape == values.shape
    assert q.stride(2) == 1
    assert q.stride(1) == dim
    assert q.dtype == torch.float32
    assert keys.dtype == values.dtype == torch.float32
    if out is None:
        out = torch.empty(num_rows, heads, dim)
    shape = ShapeStruct(heads, kv_heads, dim, window or 0, scale, softcap or 0.0)
    library().dw_attention(
        ctypes.byref(shape),
        layout.structs,
        len(layout.structs),
        pointer(q),
        int64(q.stride(0)),
        pointer(keys),
        pointer(values),
        int64(keys.stride(0)),
        pointer(out),
        int64(out.stride(0)),
        num_threads(),
    )
    return out
