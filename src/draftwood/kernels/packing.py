"""Weights of 8 and 4 bits in the kernels' layout; plain PyTorch, needs no compiled code."""

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

_CUTS = (1.0, 0.88, 0.76)
"""Shares of a group's largest weight that are tried as the end of the 4-bit range."""


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Address of a tensor's first element for a C call; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


class PackedStruct(ctypes.Structure):
    """`Packed` of linear.hpp."""

    _fields_ = (
        ("w", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("group_scale", ctypes.c_void_p),
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
            pointer(self.weight), pointer(self.scale), pointer(self.bias), None, self.n, padded_k
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


@dataclass(frozen=True)
class PackedInt4:
    """A 4-bit weight matrix in the kernels' layout, the same on every machine.

    Attributes:
        weight: [n / 64, k / 8, 64, 4] uint8, the turned weights' integer plus 8; a byte holds the
            places `8 i + j` (low half) and `8 i + 4 + j` along k. n and k padded as in 8 bits.
        group_scale: [n / 64, groups, 64] float32, one per channel and group.
        bias: [n padded to 64] float32 or None.
        n, k: output and input features, before padding.
        group: neighbours along k that share a scale, a multiple of 16.
    """

    weight: Tensor
    group_scale: Tensor
    bias: Tensor | None
    n: int
    k: int
    group: int = DEFAULT_GROUP
    struct: PackedStruct = field(init=False, repr=False, compare=False)
    _ones: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert 0 < self.group <= 256
        assert self.group % 16 == 0
        assert self.weight.is_contiguous()
        assert self.group_scale.is_contiguous()
        tiles, padded_k = -(-self.n // TILE), self.weight.shape[1] * 8
        assert self.weight.shape == (tiles, padded_k // 8, TILE, 4)
        assert self.group_scale.shape == (tiles, -(-padded_k // self.group), TILE)
        # The kernels multiply by a scale per channel too; here the groups' scales say it all.
        object.__setattr__(self, "_ones", torch.ones(tiles * TILE))
        struct = PackedStruct(
            pointer(self.weight),
            pointer(self._ones),
            pointer(self.bias),
            pointer(self.group_scale),
            self.n,
            padded_k,
        )
        object.__setattr__(self, "struct", struct)

    @property
    def num_bytes(self) -> int:
        """Bytes read to use it once."""
        return self.weight.numel() + 4 * self.group_scale.numel()


Packed = PackedInt8 | PackedInt4
"""A weight matrix for the kernels."""


def pack_int4(weight: Tensor, bias: Tensor | None = None, group: int = DEFAULT_GROUP) -> PackedInt4:
    """Quantises [n, k] weights to 4 bits, one scale per channel and group, and packs them.

    Turned like 8-bit weights. A group's scale is the one of a few that leaves the smallest squared
    error: cutting the largest weights a little makes the steps for all others finer.
    """
    n, k = weight.shape
    tiles, padded_k = -(-n // TILE), -(-k // 16) * 16
    num_groups = -(-padded_k // group)
    packed = torch.empty((tiles, padded_k // 8, TILE, 4), dtype=torch.uint8)
    scale = torch.empty((tiles, num_groups, TILE))
    for first in range(0, n, _SLICE):
        rows = weight[first : first + _SLICE].detach().float()
        rows = rotate_groups(pad(rows, (0, padded_k - k, 0, -len(rows) % TILE)), group)
        scales = torch.empty(len(rows), num_groups)
        levels = torch.empty(rows.shape, dtype=torch.uint8)
        for g in range(num_groups):
            place = slice(g * group, (g + 1) * group)
            levels[:, place], scales[:, g] = _four_bits(rows[:, place])
        pairs = levels.view(-1, TILE, padded_k // 8, 2, 4).transpose(1, 2)
        tile, count = first // TILE, len(pairs)
        packed[tile : tile + count] = pairs[:, :, :, 0] | (pairs[:, :, :, 1] << 4)
        scale[tile : tile + count] = scales.view(-1, TILE, num_groups).transpose(1, 2)
    if bias is not None:
        bias = pad(bias.detach().float(), (0, tiles * TILE - n))
    return PackedInt4(packed, scale, bias, n, k, group)


def _four_bits(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[m, size] weights of one group to levels 0..15 (8 stands for zero) and [m] scales."""
    top = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    best = torch.full_like(top, float("inf"))
    levels, scales = torch.full_like(rows, 8.0), torch.zeros_like(top)
    for cut in _CUTS:
        scale = top * (cut / 7.5)
        tried = (rows / scale).round_().clamp_(-8, 7)
        error = (tried * scale - rows).square_().sum(dim=1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, scale, scales)
        levels = torch.where(better, tried + 8, levels)
    return levels.to(torch.uint8), scales[:, 0]


def unpack_int4(packed: PackedInt4) -> Tensor:
    """The [n, k] float32 weights that `packed` stands for."""
    halves = torch.stack((packed.weight & 15, packed.weight >> 4), dim=2).float() - 8
    # [tiles, k / 8, 2, 64, 4] -> [n, k]
    rows = halves.permute(0, 3, 1, 2, 4).reshape(-1, packed.weight.shape[1] * 8)
    scale = packed.group_scale.transpose(1, 2).reshape(len(rows), -1)
    scale = scale.repeat_interleave(packed.group, dim=1)[:, : rows.shape[1]]
    turned = (rows * scale)[: packed.n]
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
