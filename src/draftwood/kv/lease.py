"""One request's hold on KV: its block table and how far each plane is computed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.errors import CapacityError
from draftwood.kv.pool import BlockPool, Plane, Slots
from draftwood.kv.prefix import PrefixIndex


class Lease:
    """Slots for one sequence, growing at the end.

    Slot i of a lease belongs to position i of the sequence once it is committed. Behind the
    committed length a round writes its tree in node order; `commit` keeps the accepted path.

    Lemma. A path is an increasing sequence of node indices that starts at 0, so `path[i] >= i`: an
    accepted node only ever moves down, onto a slot that is not needed any more. Moving in ascending
    order in place is therefore safe. It holds for any increasing sequence, so a set of nodes can be
    kept as well: beams whose texts have parted share one lease.

    Attributes:
        length: tokens whose KV the target has computed.
        draft_length: tokens whose KV the draft model has computed.
    """

    def __init__(self, pool: BlockPool, prefix: PrefixIndex | None = None) -> None:
        self._pool = pool
        self._prefix = prefix
        self._table: list[int] = []
        self._index: Tensor | None = None
        self._adjacent = True
        self.length = 0
        self.draft_length = 0

    @classmethod
    def open(
        cls,
        pool: BlockPool,
        prefix: PrefixIndex | None = None,
        tokens: Sequence[int] = (),
        salt: bytes = b"",
    ) -> Lease:
        """A lease that starts with what the prefix index has of `tokens`."""
        lease = cls(pool, prefix)
        if prefix is not None and tokens:
            match = prefix.match(tokens, salt)
            for block in match.blocks:
                lease._add_block(block)
            lease.length = len(match.blocks) * pool.block_size
            lease.draft_length = match.num_draft_blocks * pool.block_size
        return lease

    def reopen(self, tokens: Sequence[int], salt: bytes = b"") -> Lease:
        """A new lease on the same pool, with what the prefix index has of `tokens` by now."""
        self.close()
        return Lease.open(self._pool, self._prefix, tokens, salt)

    def fork(self, length: int) -> Lease:
        """A new lease that shares this one's first `length` computed tokens."""
        assert length <= self.length
        other = Lease(self._pool, self._prefix)
        for block in self._table[: -(-length // self._pool.block_size)]:
            self._pool.share(block)
            other._add_block(block)
        other.length = length
        other.draft_length = min(self.draft_length, length)
        return other

    @property
    def capacity(self) -> int:
        """Slots held, used or not."""
        return len(self._table) * self._pool.block_size

    @property
    def block_table(self) -> tuple[int, ...]:
        """The blocks held, in order."""
        return tuple(self._table)

    def reserve(self, num_slots: int) -> None:
        """Makes sure that `num_slots` slots behind the committed length can be written.

        Raises:
            CapacityError: the pool cannot give that many, even after evicting cached prefixes.
        """
        first = self.length // self._pool.block_size
        self._own(first)
        needed = -(-(self.length + num_slots) // self._pool.block_size)
        while len(self._table) < needed:
            self._add_block(self._take(self._table[-1] if self._table else None))

    def slots(self, start: int, stop: int) -> Slots:
        """Where positions `start` to `stop` (exclusive) lie."""
        if self._adjacent:
            base = self._table[0] * self._pool.block_size if self._table else 0
            return slice(base + start, base + stop)
        return self._slot_index()[start:stop]

    def commit(self, path: Sequence[int], tail: int = 0) -> None:
        """Keeps the KV of the nodes on `path`, in the target's plane, and drops the other nodes.

        Args:
            path: node indices of the last round, increasing from 0.
            tail: how many of the last ones stay uncommitted: they lie in order behind the new
                length, where a later tree may go on from them.
        """
        self._gather(self._pool.target, self.length, path)
        self.length += len(path) - tail
        self._poison(self._pool.target, self.length + tail)

    def commit_draft(self, start: int, path: Sequence[int]) -> None:
        """The same for the draft's plane, whose nodes lie from position `start` on."""
        assert self._pool.draft is not None
        self._gather(self._pool.draft, start, path)
        self.draft_length = start + len(path)
        self._poison(self._pool.draft, self.draft_length)

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on, in both planes, and frees the blocks."""
        assert 0 <= length <= self.length
        self.length = length
        self.draft_length = min(self.draft_length, length)
        keep = -(-length // self._pool.block_size)
        self._pool.release(self._table[keep:])
        del self._table[keep:]
        self._index = None
        self._adjacent = _adjacent(self._table)
        self._poison(self._pool.target, self.length)

    def publish(self, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Lets other requests find the full committed blocks; `tokens` is the whole sequence."""
        if self._prefix is not None:
            self._prefix.publish(tokens[: self.length], self._table, self.draft_length, salt)

    def close(self) -> None:
        """Gives every block back. A closed lease is an empty one."""
        self._pool.release(self._table)
        self._table = []
        self._index = None
        self._adjacent = True
        self.length = self.draft_length = 0

    def _take(self, after: int | None) -> int:
        if self._pool.num_free == 0 and (self._prefix is None or not self._prefix.evict(8)):
            raise CapacityError("the KV pool is full: raise kv_memory or send fewer requests")
        return self._pool.take(after)

    def _add_block(self, block: int) -> None:
        self._adjacent = self._adjacent and (not self._table or block == self._table[-1] + 1)
        self._table.append(block)
        self._index = None

    def _own(self, first: int) -> None:
        """Replaces shared blocks from table entry `first` on by copies, before they are written."""
        for i in range(first, len(self._table)):
            block = self._table[i]
            if self._pool.references(block) > 1:
                own = self._take(self._table[i - 1] if i else None)
                self._pool.copy_block(block, own)
                self._pool.release([block])
                self._table[i] = own
                self._index = None
                self._adjacent = _adjacent(self._table)

    def _slot_index(self) -> Tensor:
        if self._index is None:
            blocks = torch.tensor(self._table, dtype=torch.int64)
            offsets = torch.arange(self._pool.block_size)
            flat = (blocks[:, None] * self._pool.block_size + offsets).reshape(-1)
            self._index = flat.to(self._pool.device)
        return self._index

    def _gather(self, plane: Plane, start: int, path: Sequence[int]) -> None:
        """Moves the slots of `path` to `start`, `start + 1`, ... in one plane."""
        moved = next((i for i, node in enumerate(path) if node != i), len(path))
        if moved == len(path):
            return
        plane.move(
            [self._slot(start + node) for node in path[moved:]],
            [self._slot(start + place) for place in range(moved, len(path))],
        )

    def _slot(self, position: int) -> int:
        block, offset = divmod(position, self._pool.block_size)
        return self._table[block] * self._pool.block_size + offset

    def _poison(self, plane: Plane, start: int) -> None:
        if not self._pool.debug or start >= self.capacity:
            return
        size = self._pool.block_size
        if start % size and self._pool.references(self._table[start // size]) > 1:
            start += size - start % size  # a shared block is another's too
        for i in range(start // size, len(self._table)):
            if self._pool.references(self._table[i]) == 1:
                plane.poison(self.slots(max(start, i * size), (i + 1) * size))


def _adjacent(table: Sequence[int]) -> bool:
    return all(b == a + 1 for a, b in itertools.pairwise(table))
