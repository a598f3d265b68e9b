"""Smaller records: KV of a block as fewer bytes, with or without loss.

`zstd` gives the same bits back. Floats compress badly as they are, since neighbouring bytes have
little in common, so the bytes are sorted by their place in the number first (as Blosc's shuffle
does). `fp16` and `int8` give other numbers back, and so may change a text; an engine that uses them
looks for its KV under keys of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from draftwood.errors import ConfigError, MissingExtraError

COMPRESSIONS = ("none", "zstd", "fp16", "int8")
LOSSY = frozenset({"fp16", "int8"})

_LEVEL = 1  # higher ones take several times as long for two per cent
_MOST_BYTES = 1 << 28  # of one tensor: a record that claims more is no block
_DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float16, torch.bfloat16)}


class CompressionError(ValueError):
    """Numbers that do not unpack."""


def check_compression(name: str) -> str:
    """The name of a compression that can be used here.

    Raises:
        ConfigError: there is none of this name.
        MissingExtraError: its package is not installed.
    """
    if name not in COMPRESSIONS:
        raise ConfigError(f"kv_compression is {name!r}: use one of {', '.join(COMPRESSIONS)}")
    if name == "zstd":
        _zstandard()
    return name


def pack(name: str, kv: Tensor, how: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What to store of a tensor: tensors, and what must be known to unpack them.

    Args:
        name: of the tensor in the record.
        kv: [..., head size], on the host.
        how: a name of `COMPRESSIONS`.
    """
    if how == "none":
        return {name: kv}, {}
    shape = " ".join(str(size) for size in kv.shape)
    facts = {name: f"{str(kv.dtype).removeprefix('torch.')} {shape}"}
    if how == "zstd":
        data = _zstandard().ZstdCompressor(level=_LEVEL).compress(_shuffled(kv))
        return {name: torch.frombuffer(bytearray(data), dtype=torch.uint8)}, facts
    if how == "fp16":
        return {name: kv.to(torch.float16)}, facts
    scale = kv.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    steps = (kv.float() / scale).round().to(torch.int8)
    return {name: steps, f"{name}.scale": scale}, facts


def unpack(name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], how: str) -> Tensor:
    """The tensor of which `pack` made these.

    Raises:
        KeyError: a part is missing.
        CompressionError: the parts do not fit together.
        MissingExtraError: the package that made them is not installed here.
    """
    packed = tensors[name]
    if how == "none":
        return packed
    dtype, shape = _described(str(facts[name]))
    if how == "zstd":
        return _unshuffled(_inflated(packed, dtype, shape), dtype, shape)
    if how == "fp16":
        kv = packed.to(dtype)
    elif how == "int8":
        kv = (packed.float() * tensors[f"{name}.scale"]).to(dtype)
    else:
        raise CompressionError(f"compression {how!r} is not known")
    if kv.shape != shape:
        raise CompressionError(f"{name} has another shape than it says")
    return kv


def _described(text: str) -> tuple[torch.dtype, torch.Size]:
    kind, *sizes = text.split()
    try:
        dtype, shape = _DTYPES[kind], torch.Size(int(size) for size in sizes)
    except (KeyError, ValueError) as error:
        raise CompressionError(f"{text!r} describes no tensor") from error
    if min(shape, default=0) < 1 or math.prod(shape) * dtype.itemsize > _MOST_BYTES:
        raise CompressionError(f"{text!r} describes no block")
    return dtype, shape


def _shuffled(kv: Tensor) -> bytes:
    width = kv.dtype.itemsize
    data: bytes = kv.contiguous().view(torch.uint8).view(-1, width).T.contiguous().numpy().tobytes()
    return data


def _unshuffled(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    planes = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype.itemsize, -1)
    return planes.T.contiguous().view(-1).view(dtype).view(shape)


def _inflated(packed: Tensor, dtype: torch.dtype, shape: torch.Size) -> bytes:
    """The bytes, as many as the shape wants: a small record cannot grow without end."""
    size = math.prod(shape) * dtype.itemsize
    zstandard = _zstandard()
    try:
        # A frame says how long it is; one that says nothing is held to `max_output_size`.
        frame = packed.numpy().tobytes()
        if zstandard.frame_content_size(frame) not in (-1, size):
            raise CompressionError("a tensor has another length than it says")
        data: bytes = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
    except zstandard.ZstdError as error:
        raise CompressionError(f"zstd: {error}") from error
    if len(data) != size:
        raise CompressionError("a tensor has another length than it says")
    return data


def _zstandard() -> Any:
    try:
        return import_module("zstandard")
    except ImportError as error:
        raise MissingExtraError("zstandard", "zstd") from error
