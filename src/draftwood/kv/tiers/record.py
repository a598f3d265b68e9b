"""One block as bytes: safetensors behind a checksum.

    magic        16 bytes, names the format and its version
    checksum     16 bytes, blake2b of what follows
    safetensors  tokens, target.keys, target.values and, if there, draft.keys, draft.values

The tensors may be compressed (`compression.py`); the header, which can be read alone, says how.
Both planes are one record, so no store can keep half of a block. A record names the key it was
stored under: one that lies under another key is as damaged as one with a flipped bit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from draftwood.errors import MissingExtraError
from draftwood.kv.pool import KVSpec, Plane
from draftwood.kv.tiers.compression import CompressionError, pack, unpack

MAGIC = b"draftwood-kv-v1\n"
HEAD_BYTES = 4096
"""So many bytes of a record hold all that `peek` needs."""

_DIGEST_BYTES = 16
_KV = ("keys", "values")
_START = len(MAGIC) + _DIGEST_BYTES


class RecordError(ValueError):
    """Bytes that are no record, or not the one that was asked for."""


class UnreadableError(RecordError):
    """A sound record, for which a package is missing here: others can read it."""


@dataclass(frozen=True, slots=True)
class PlaneKV:
    """A block's keys and values in one plane, [num_layers, block_size, num_kv_heads, dim] each."""

    keys: Tensor
    values: Tensor

    @classmethod
    def copy_of(cls, plane: Plane, slots: slice) -> PlaneKV:
        """A copy in the host's memory: the pool uses its slots again."""
        return cls(_host_copy(plane.keys[:, slots]), _host_copy(plane.values[:, slots]))

    def write_to(self, plane: Plane, slots: slice) -> None:
        """Copies it into the pool."""
        plane.keys[:, slots] = self.keys.to(plane.keys.device)
        plane.values[:, slots] = self.values.to(plane.values.device)

    def fits(self, spec: KVSpec, block_size: int) -> bool:
        """Whether a plane of this shape and type can take it."""
        shape = (spec.num_layers, block_size, spec.num_kv_heads)
        return (
            tuple(self.keys.shape) == (*shape, spec.key_dim)
            and tuple(self.values.shape) == (*shape, spec.value_dim)
            and self.keys.dtype == self.values.dtype == spec.dtype
        )


@dataclass(frozen=True, slots=True)
class Block:
    """What a record holds.

    Attributes:
        tokens: the ids whose KV it is.
        target: the target's part.
        draft: the draft model's part, where it was computed.
    """

    tokens: tuple[int, ...]
    target: PlaneKV
    draft: PlaneKV | None = None


@dataclass(frozen=True, slots=True)
class Labels:
    """Who made a record.

    Attributes:
        model: the target's name, for people.
        draft: identity of the draft model whose KV is in the draft part; "" for none.
        compression: how the tensors are stored; see `compression.py`.
    """

    model: str = ""
    draft: str = ""
    compression: str = "none"


def encode(key: bytes, block: Block, labels: Labels) -> bytes:
    """The record of a block, to be stored under `key`."""
    tensors = {"tokens": torch.tensor(block.tokens, dtype=torch.int64)}
    draft = labels.draft if block.draft is not None else ""
    facts = {"key": key.hex(), "model": labels.model, "draft": draft}
    if labels.compression != "none":
        facts["compression"] = labels.compression
    for name, part in (("target", block.target), ("draft", block.draft)):
        if part is not None:
            for kind, kv in (("keys", part.keys), ("values", part.values)):
                packed, more = pack(f"{name}.{kind}", kv, labels.compression)
                tensors |= packed
                facts |= more
    body = save(tensors, facts)
    return b"".join((MAGIC, _digest(body), body))


def decode(key: bytes, record: bytes) -> tuple[Block, Labels]:
    """The block that `encode` put into a record.

    Raises:
        RecordError: it is damaged, of another format, or was stored under another key.
        UnreadableError: the package that compressed it is not installed here.
    """
    check(key, record)
    labels, facts = peek(record), _metadata(record)
    try:
        tensors = load(record[_START:])
        parts = [
            PlaneKV(*(unpack(f"{name}.{kind}", tensors, facts, labels.compression) for kind in _KV))
            for name in ("target", "draft")
            if f"{name}.keys" in tensors or name == "target"
        ]
        tokens = tuple(tensors["tokens"].tolist())
    except MissingExtraError as error:
        raise UnreadableError(str(error)) from error
    except (SafetensorError, KeyError, CompressionError) as error:
        raise RecordError(f"not a block: {error}") from error
    return Block(tokens, *parts), labels


def check(key: bytes, record: bytes) -> None:
    """Looks at format, checksum and key, and at nothing that needs the tensors.

    Raises:
        RecordError: one of them is wrong.
    """
    if record[: len(MAGIC)] != MAGIC:
        raise RecordError("it does not begin as a record does")
    if record[len(MAGIC) : _START] != _digest(memoryview(record)[_START:]):
        raise RecordError("its checksum is wrong")
    if _metadata(record).get("key") != key.hex():
        raise RecordError("it belongs under another key")


def peek(head: bytes) -> Labels:
    """Who made a record, from its first `HEAD_BYTES`.

    Raises:
        RecordError: it is no record.
    """
    metadata = _metadata(head)
    compression = str(metadata.get("compression", "none"))
    return Labels(str(metadata.get("model", "")), str(metadata.get("draft", "")), compression)


def has_draft(head: bytes) -> bool:
    """Whether a record holds the draft model's part too, from its first `HEAD_BYTES`."""
    return "draft.keys" in _header(head)


def matches(block: Block, tokens: Sequence[int]) -> bool:
    """Whether a block is that of these tokens: a hash collision must cost time and no more."""
    return block.tokens == tuple(tokens)


def _host_copy(kv: Tensor) -> Tensor:
    if kv.device.type == "cpu":
        return kv.clone(memory_format=torch.contiguous_format)
    return kv.contiguous().cpu()


def _metadata(head: bytes) -> dict[str, Any]:
    metadata = _header(head).get("__metadata__", {})
    return metadata if isinstance(metadata, dict) else {}


def _header(head: bytes) -> dict[str, Any]:
    """The safetensors header: its length in 8 bytes, then JSON."""
    length = int.from_bytes(head[_START : _START + 8], "little")
    text = head[_START + 8 : _START + 8 + length]
    if not head.startswith(MAGIC) or len(text) != length or length == 0:
        raise RecordError("it has no header")
    try:
        header = json.loads(text)
    except ValueError as error:
        raise RecordError(f"its header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise RecordError("its header is no mapping")
    return header


def _digest(body: bytes | memoryview) -> bytes:
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()
