"""Which of many replicas is believed to have which KV blocks: bounded, and quick to ask.

Replicas are numbered slots. Who has a block is one integer, bit s for slot s, so following a chain
of blocks over 1,000 replicas is one look-up and one `&` a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt


class BlockViews:
    """For each slot the `max_blocks` blocks that it used last, and for each block its slots."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[bytes, int] = {}
        self._blocks: list[OrderedDict[bytes, None]] = []

    def grow(self) -> None:
        """Makes room for one more slot."""
        self._blocks.append(OrderedDict())

    def num_blocks(self, slot: int) -> int:
        """How many blocks `slot` is believed to have."""
        return len(self._blocks[slot])

    def __len__(self) -> int:
        """How many different blocks somebody has."""
        return len(self._holders)

    def touch(self, slot: int, keys: Sequence[bytes]) -> None:
        """`slot` has these blocks and used them now; `keys` is a chain, or chains, in order."""
        blocks, bit = self._blocks[slot], 1 << slot
        # Deepest first, so that a chain is forgotten from its end, as the replica evicts it.
        for key in reversed(keys):
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = None
                self._holders[key] = self._holders.get(key, 0) | bit
        while len(blocks) > self._max_blocks:
            self._let_go(blocks.popitem(last=False)[0], bit)

    def drop(self, slot: int, keys: Iterable[bytes]) -> None:
        """`slot` no longer has these blocks."""
        blocks, bit = self._blocks[slot], 1 << slot
        for key in keys:
            if key in blocks:
                del blocks[key]
                self._let_go(key, bit)

    def clear(self, slot: int) -> None:
        """`slot` has nothing."""
        self.drop(slot, tuple(self._blocks[slot]))

    def matched(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """[slots] How many of the first blocks of a chain each slot has."""
        lengths = np.zeros(len(self._blocks), np.int64)
        mask = (1 << len(self._blocks)) - 1
        for depth, key in enumerate(keys):
            still = mask & self._holders.get(key, 0)
            if depth and still != mask:
                lengths[self._bits(mask ^ still)] = depth
            mask = still
            if not mask:
                return lengths
        lengths[self._bits(mask)] = len(keys)
        return lengths

    def _let_go(self, key: bytes, bit: int) -> None:
        left = self._holders[key] ^ bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    def _bits(self, mask: int) -> npt.NDArray[np.bool_]:
        size = len(self._blocks)
        packed = np.frombuffer(mask.to_bytes((size + 7) // 8, "little"), np.uint8)
        return np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)
