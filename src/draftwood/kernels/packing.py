"""8-bit weights in the kernels' layout; plain PyTorch, needs no compiled code."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 64
"""Output channels in a tile of packed weights."""

DEFAULT_GROUP = 128
"""Neighbours along K that share one scale of the activations."""

_SLICE = 128 * TILE


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Address of a tensor's first element for a C call; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


class PackedStruct(ctypes.Structure):
    """`Packed` of linear.hpp."""

    _fields_ = (
        ("w", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
    )


@dataclass(frozen=True)
class PackedInt8:
    """An 8-bit weight matrix in the kernels' layout, the same on every machine.

    Attributes:
        weight: [n / 64, k / 4, 64, 4] uint8, the turned weights' integer plus 128; n and k padded
            to multiples of 64 and 16.
        scale: [n padded to 64] float32, one per output channel.
        bias: [n padded to 64] float32 or None.
        n, k: output and input features, before padding.
        group: neighbours along k that share a scale of the activations, a multiple of 16.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    n: int
    k: int
    group: int = DEFAULT_GROUP
    struct: PackedStruct = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert 0 < self.group <= 256
        assert self.group % 16 == 0
        assert self.weight.is_contiguous()
        padded_k = self.weight.shape[1] * 4
        assert self.weight.shape == (-(-self.n // TILE), padded_k // 4, TILE, 4)
        struct = PackedStruct(
            pointer(self.weight), pointer(self.scale), pointer(self.bias), self.n, padded_k
        )
        object.__setattr__(self, "struct", struct)

    @property
    def num_bytes(self) -> int:
        """Bytes read to use it once."""
        return self.weight.numel() + 4 * self.scale.numel()


def pack_int8(weight: Tensor, bias: Tensor | None = None, group: int = DEFAULT_GROUP) -> PackedInt8:
    """Quantises [n, k] weights to 8 bits, one scale per output channel, and packs them.

    The weights are first turned by `rotate_groups`; the kernels turn the activations the same way.
    Needs no compiled kernels; takes the weights by slices of rows.
    """
    n, k = weight.shape
    tiles, padded_k = -(-n // TILE), -(-k // 16) * 16
    packed = torch.full((tiles, padded_k // 4, TILE, 4), 128, dtype=torch.uint8)
    scale = torch.zeros(tiles * TILE)
    for first in range(0, n, _SLICE):
        rows = weight[first : first + _SLICE].detach().float()
        rows = pad(rows, (0, padded_k - k, 0, -len(rows) % TILE))
        rows = rotate_groups(rows, group)
        top = rows.abs().amax(dim=1)
        scale[first : first + len(rows)] = top / 127
        inverse = torch.where(top > 1e-30, 127 / top, 0.0)
        bytes_ = (rows * inverse[:, None]).round_().add_(128).to(torch.uint8)
        tiled = bytes_.view(-1, TILE, padded_k // 4, 4).transpose(1, 2)
        packed[first // TILE : first // TILE + len(tiled)] = tiled
    if bias is not None:
        bias = pad(bias.detach().float(), (0, tiles * TILE - n))
    return PackedInt8(packed, scale, bias, n, k, group)


def unpack_int8(packed: PackedInt8) -> Tensor:
    """The [n, k] float32 weights that `packed` stands for."""
    rows = packed.weight.transpose(1, 2).reshape(len(packed.scale), -1)[: packed.n]
    turned = (rows.float() - 128) * packed.scale[: packed.n, None]
    return rotate_groups(turned, packed.group)[:, : packed.k].contiguous()


def rotate_groups(x: Tensor, group: int) -> Tensor:
    """Turns the last dimension (a multiple of 16), group by group, by a Hadamard matrix.

    A group that is not 16 times a power of two is turned in blocks that are, the largest first.
    The turn is its own inverse and leaves dot products as they are.
    """
    size, parts, start = x.shape[-1], [], 0
    if _blocks(group) == [group] and size >= group:
        start = size - size % group
        groups = x[..., :start].reshape(*x.shape[:-1], -1, group)
        parts = [(groups @ _hadamard(group)).reshape(*x.shape[:-1], start)]
    while start < size:
        for block in _blocks(min(group, size - start)):
            parts.append(x[..., start : start + block] @ _hadamard(block))
            start += block
    return torch.cat(parts, -1)


def _blocks(size: int) -> list[int]:
    return [16 << bit for bit in range(8, -1, -1) if size // 16 >> bit & 1]


def _hadamard(size: int) -> Tensor:
    matrix = torch.full((1, 1), size**-0.5)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix
