"""Blocks of KV memory, in two planes under one numbering.

A block is `block_size` slots; a slot holds one token's keys and values for every layer of a model.
The target's plane and the draft's plane use the same block numbers, so one block table, one
reference count and one eviction act on both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.errors import CapacityError

Slots = slice | Tensor
"""Where tokens lie: a slice when the blocks are adjacent (reads are views), else int64 indices."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of one model's KV: `num_layers` x (keys, values) per token."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        width = self.num_kv_heads * (self.key_dim + self.value_dim)
        return self.num_layers * width * self.dtype.itemsize


class Plane:
    """Keys and values of one model: `[num_layers, num_slots, num_kv_heads, dim]` each."""

    def __init__(self, spec: KVSpec, num_slots: int) -> None:
        self.spec = spec
        shape = (spec.num_layers, num_slots, spec.num_kv_heads)
        try:
            self.keys = torch.empty(*shape, spec.key_dim, dtype=spec.dtype, device=spec.device)
            self.values = torch.empty(*shape, spec.value_dim, dtype=spec.dtype, device=spec.device)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            needed = spec.bytes_per_token * num_slots
            raise CapacityError(
                f"no memory for {needed / 2**30:.1f} GiB of KV: lower kv_memory or max_model_len"
            ) from error

    def write(self, layer: int, slots: Slots, keys: Tensor, values: Tensor) -> None:
        """Stores `keys` and `values` ([N, num_kv_heads, dim]) of one layer at `slots`."""
        if isinstance(slots, slice):
            self.keys[layer, slots] = keys
            self.values[layer, slots] = values
        else:
            self.keys[layer].index_copy_(0, slots, keys)
            self.values[layer].index_copy_(0, slots, values)

    def read(self, layer: int, slots: Slots) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [L, num_kv_heads, dim]; views when `slots` is a slice."""
        return self.keys[layer, slots], self.values[layer, slots]

    def copy(self, source: Slots, target: Slots) -> None:
        """Copies whole tokens, all layers; safe when the two overlap."""
        for kv in (self.keys, self.values):
            moved = kv[:, source]
            kv[:, target] = moved.clone() if isinstance(source, slice) else moved

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Moves tokens to smaller slots, both ascending; a target may be an earlier source."""
        if self.keys.device.type == "cpu":
            # One by one: an indexed copy wakes PyTorch's threads, which takes longer than a layer.
            for kv in (self.keys, self.values):
                for source, target in zip(sources, targets, strict=True):
                    kv[:, target] = kv[:, source]
            return
        where = torch.tensor([sources, targets], device=self.keys.device)
        self.copy(where[0], where[1])

    def poison(self, slots: Slots) -> None:
        """Fills slots with NaN, so that reading one that holds nothing shows at once."""
        self.keys[:, slots] = float("nan")
        self.values[:, slots] = float("nan")


class BlockPool:
    """Hands out blocks, counts who holds them, and prefers neighbours.

    Args:
        target: the target's KV shape.
        draft: the draft model's KV shape, when there is one.
        num_blocks: how many blocks there are.
        block_size: slots in a block.
        debug: fill everything that holds no token with NaN.
    """

    def __init__(
        self,
        target: KVSpec,
        draft: KVSpec | None = None,
        *,
        num_blocks: int,
        block_size: int = 16,
        debug: bool = False,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.debug = debug
        num_slots = num_blocks * block_size
        self.target = Plane(target, num_slots)
        self.draft = Plane(draft, num_slots) if draft else None
        self.device = target.device
        self._references = [0] * num_blocks
        self.num_free = num_blocks
        if debug:
            self._poison(range(num_blocks))

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes there are, the target's first."""
        return (self.target, self.draft) if self.draft else (self.target,)

    def references(self, block: int) -> int:
        """How many holders a block has."""
        return self._references[block]

    def take(self, after: int | None = None) -> int:
        """Takes a free block: the one behind `after` if it can be had, else a good place to grow.

        Raises:
            CapacityError: every block is held.
        """
        if self.num_free == 0:
            raise CapacityError("the KV pool is full: raise kv_memory or send fewer requests")
        block = None if after is None else self._free_behind(after)
        if block is None:
            block = self._roomy_place()
        self._references[block] = 1
        self.num_free -= 1
        return block

    def share(self, block: int) -> None:
        """Adds a holder to a block that is held."""
        assert self._references[block] > 0, "a free block cannot be shared"
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Gives up one hold on each block; the last one frees it."""
        freed = []
        for block in blocks:
            assert self._references[block] > 0, "a free block cannot be released"
            self._references[block] -= 1
            if self._references[block] == 0:
                freed.append(block)
        self.num_free += len(freed)
        if self.debug:
            self._poison(freed)

    def slots_of(self, block: int) -> slice:
        """Where a block's tokens lie."""
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def copy_block(self, source: int, target: int) -> None:
        """Copies a block's slots in every plane."""
        for plane in self.planes:
            plane.copy(self.slots_of(source), self.slots_of(target))

    def check(self) -> None:
        """Raises AssertionError when the books do not balance."""
        assert all(count >= 0 for count in self._references)
        assert self.num_free == sum(count == 0 for count in self._references)

    def _free_behind(self, block: int) -> int | None:
        nxt = block + 1
        return nxt if nxt < self.num_blocks and self._references[nxt] == 0 else None

    def _roomy_place(self) -> int:
        """The start of the longest free run, or its middle when a holder in front may grow."""
        start, length = self._longest_free_run()
        return start if start == 0 else start + length // 2

    def _longest_free_run(self) -> tuple[int, int]:
        best, start = (0, 0), None
        for block, count in enumerate([*self._references, 1]):
            if count == 0:
                start = block if start is None else start
            elif start is not None:
                best = max(best, (block - start, -start))
                start = None
        return -best[1], best[0]

    def _poison(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            for plane in self.planes:
                plane.poison(self.slots_of(block))
