"""A whole forward pass of a Llama-shaped decoder in 8 or 4 bits, one call into the kernels.

Covers decoders of RMSNorm, rotary attention and a gated SiLU MLP: Llama, SmolLM2, Qwen2, Qwen3.
It knows tensors, not models: whoever loads a model fills `DecoderWeights`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels.ops import (
    Layout,
    SegmentStruct,
    ShapeStruct,
    library,
    num_threads,
    supports_attention,
)
from draftwood.kernels.packing import Packed, PackedInt8, PackedStruct, pointer


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a decoder.

    Attributes:
        hidden, inter: width of the residual stream and of the MLP.
        heads, kv_heads, dim: attention.
        eps: of the norms.
        scale: factor of the scores.
        window: positions a row sees, itself included; None for all.
    """

    hidden: int
    inter: int
    heads: int
    kv_heads: int
    dim: int
    eps: float
    scale: float
    window: int | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: q, k, v packed as one matrix in this order, gate and up as another."""

    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: Packed
    o: Packed
    gate_up: Packed
    down: Packed
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights; norms are contiguous float32. `embedding` and `head` may be the same object."""

    embedding: PackedInt8
    layers: Sequence[LayerWeights]
    norm: Tensor
    head: Packed


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("qkv", PackedStruct),
        ("o", PackedStruct),
        ("gate_up", PackedStruct),
        ("down", PackedStruct),
    )


class _ModelStruct(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("embedding", PackedStruct),
        ("head", PackedStruct),
        ("num_layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("inter", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("attention", ShapeStruct),
        ("eps", ctypes.c_float),
    )


class _StepStruct(ctypes.Structure):
    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("segments", ctypes.POINTER(SegmentStruct)),
        ("k_planes", ctypes.c_void_p),
        ("v_planes", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("num_segments", ctypes.c_int32),
        ("num_wanted", ctypes.c_int32),
        ("rotary", ctypes.c_int32),
        ("slot_stride", ctypes.c_int64),
    )


def supports_decoder(shape: DecoderShape) -> bool:
    """Whether `Decoder` takes these sizes."""
    return (
        supports_attention(shape.heads, shape.kv_heads, shape.dim)
        and shape.hidden % 16 == 0
        and shape.inter % 64 == 0
    )


class Decoder:
    """Runs packed rows through all layers, writing their keys and values.

    A row's logits have the same bits whatever other rows run with it, wherever its ancestors lie,
    and whether they are context or new. Not for two threads at once on the same planes.
    """

    def __init__(self, shape: DecoderShape, weights: DecoderWeights) -> None:
        assert supports_decoder(shape)
        self.shape, self.weights = shape, weights
        self._layers = (_LayerStruct * len(weights.layers))(
            *(_layer_struct(layer) for layer in weights.layers)
        )
        groups = {p.group for p in _matrices(weights)}
        assert len(groups) == 1, "all matrices share one group size"
        self._model = _ModelStruct(
            ctypes.cast(self._layers, ctypes.c_void_p),
            pointer(weights.norm),
            weights.embedding.struct,
            weights.head.struct,
            len(weights.layers),
            shape.hidden,
            shape.inter,
            groups.pop(),
            ShapeStruct(
                shape.heads, shape.kv_heads, shape.dim, shape.window or 0, shape.scale, 0.0
            ),
            shape.eps,
        )

    def forward(
        self,
        ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: Layout,
        keys: Tensor,
        values: Tensor,
        wanted: Tensor,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Logits of the wanted rows.

        Args:
            ids: [N] int64 token ids.
            cos, sin: [N, rotary / 2] float32 of the rows' positions.
            layout: who sees what.
            keys, values: [layers, slots, kv_heads, dim] float32 planes, written at the new slots.
            wanted: [W] row numbers.
            hidden: [N, hidden] float32, filled with all rows behind the final norm.

        Returns:
            [W, vocabulary] float32.
        """
        num_layers, _, kv_heads, dim = keys.shape
        assert (num_layers, kv_heads, dim) == (
            len(self._layers),
            self.shape.kv_heads,
            self.shape.dim,
        )
        assert keys.is_contiguous()
        assert values.is_contiguous()
        assert keys.shape == values.shape
        assert keys.dtype == values.dtype == torch.float32
        assert ids.dtype == torch.int64
        assert len(ids) == len(cos) == len(sin) == layout.num_rows
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        assert len(ids) == 0 or 0 <= int(ids.min()) <= int(ids.max()) < self.weights.embedding.n
        ids, wanted = ids.contiguous(), wanted.to(torch.int32).contiguous()
        logits = torch.empty(len(wanted), self.weights.head.n)
        k_planes, v_planes = _planes(keys), _planes(values)
        step = _StepStruct(
            pointer(ids),
            pointer(cos),
            pointer(sin),
            layout.structs,
            ctypes.cast(k_planes, ctypes.c_void_p),
            ctypes.cast(v_planes, ctypes.c_void_p),
            pointer(wanted),
            pointer(logits),
            pointer(hidden),
            len(ids),
            len(layout.structs),
            len(wanted),
            2 * cos.shape[1],
            kv_heads * dim,
        )
        library().dw_forward(ctypes.byref(self._model), ctypes.byref(step), num_threads())
        return logits


def _matrices(weights: DecoderWeights) -> list[Packed]:
    inner = [m for w in weights.layers for m in (w.qkv, w.o, w.gate_up, w.down)]
    return [*inner, weights.head]


def _layer_struct(layer: LayerWeights) -> _LayerStruct:
    return _LayerStruct(
        pointer(layer.attention_norm),
        pointer(layer.mlp_norm),
        pointer(layer.q_norm),
        pointer(layer.k_norm),
        layer.qkv.struct,
        layer.o.struct,
        layer.gate_up.struct,
        layer.down.struct,
    )


def _planes(planes: Tensor) -> ctypes.Array[ctypes.c_void_p]:
    first, step = planes.data_ptr(), planes.stride(0) * planes.element_size()
    return (ctypes.c_void_p * len(planes))(*(first + i * step for i in range(len(planes))))


class RotaryTable:
    """Cosines and sines of positions, each computed once so that they never change.

    Args:
        inverse_frequencies: [rotary / 2] float32.
        scaling: factor of both.
    """

    def __init__(self, inverse_frequencies: Tensor, scaling: float = 1.0) -> None:
        self._frequencies = inverse_frequencies.float()
        self._scaling = scaling
        self._cos = self._sin = torch.empty(0, len(inverse_frequencies))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Two [N, rotary / 2] tensors for [N] int64 positions."""
        last = int(positions.max()) if len(positions) else 0
        if last >= len(self._cos):
            self._grow(max(last + 1, 2 * len(self._cos), 1024))
        return self._cos[positions], self._sin[positions]

    def _grow(self, size: int) -> None:
        new = torch.arange(len(self._cos), size, dtype=torch.float32)
        angles = (new[:, None] * self._frequencies[None, :]).double()
        self._cos = torch.cat([self._cos, (angles.cos() * self._scaling).float()])
        self._sin = torch.cat([self._sin, (angles.sin() * self._scaling).float()])
