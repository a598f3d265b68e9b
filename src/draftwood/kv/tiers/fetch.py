"""Reading the blocks of one prompt from the stores, while the engine does other things."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from time import monotonic

from draftwood.errors import StoreError
from draftwood.kv.tiers.record import Block, Labels, RecordError, UnreadableError, decode, matches
from draftwood.kv.tiers.tier import Tier

_PIECE_BYTES = 8 << 20
_log = logging.getLogger("draftwood")


@dataclass(frozen=True, slots=True)
class Restored:
    """A block that a store had.

    Attributes:
        key: its chained hash.
        block: its KV, in the host's memory.
        tier: who had it.
    """

    key: bytes
    block: Block
    tier: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a fetch needs besides keys.

    Attributes:
        tiers: in the order in which they are asked.
        timeout_s: the most that a store may let the engine wait for its next answer.
        block_bytes: about how large a record is.
        accept: makes of a decoded block what fits the pool; raises RecordError if nothing does.
        promote: told records that a slower tier had, to be written to the faster ones.
    """

    tiers: Sequence[Tier]
    timeout_s: float
    block_bytes: int
    accept: Callable[[Block, Labels], Block]
    promote: Callable[[int, Sequence[tuple[bytes, bytes, bool]]], None]


@dataclass(frozen=True, slots=True)
class _Read:
    """A block that was read; its record is kept where faster tiers may want it."""

    key: bytes
    record: bytes
    num_bytes: int
    has_draft: bool


@cache
def _warn_once(reason: str) -> None:
    _log.warning("stored KV is not used: %s", reason)


class Fetch:
    """Blocks of a chain, read in a thread of its own, first to last.

    They come in pieces of a few megabytes. When the next piece is not there within the time limit,
    the fetch is over: what has come counts, what comes later does not.

    Args:
        keys: (key, token ids) of the blocks wanted; the chain up to the first is in RAM.
        start: how many blocks of the chain that is.
        plan: who is asked, and how.
    """

    def __init__(
        self, keys: Sequence[tuple[bytes, tuple[int, ...]]], start: int, plan: Plan
    ) -> None:
        self.keys = [key for key, _ in keys]
        self.start = start
        self._tokens = [tokens for _, tokens in keys]
        self._plan = plan
        self._restored: list[Restored] = []
        self._moved = threading.Condition()
        self._moved_s = monotonic()
        self._asked: Tier | None = None
        self._over = not keys or not any(tier.reads.allows for tier in plan.tiers)
        self._thread: threading.Thread | None = None
        if not self._over:
            self._thread = threading.Thread(
                target=self._run, name="draftwood-kv-reader", daemon=True
            )
            self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether nothing more will come. Ends the fetch when the store is late."""
        with self._moved:
            if not self._over and monotonic() - self._moved_s >= self._plan.timeout_s:
                self._end_late()
            return self._over

    def wait(self) -> None:
        """Waits until it is ready, which takes no longer than the stores' limit lets it."""
        while not self.ready:
            with self._moved:
                self._moved.wait(max(self._moved_s + self._plan.timeout_s - monotonic(), 0.0))

    def cancel(self) -> None:
        """Ends it: nobody wants the blocks any more."""
        with self._moved:
            self._over = True

    def join(self, timeout_s: float) -> None:
        """Waits until its thread has ended, at most so long."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(timeout_s, 0.0))

    def take(self) -> list[Restored]:
        """The blocks that came in time, in order; they are handed out once."""
        with self._moved:
            restored, self._restored = self._restored, []
        return restored

    def _end_late(self) -> None:
        self._over = True
        if self._asked is not None:
            self._asked.count(num_late=1)
            self._asked.reads.failed(f"no answer within {self._plan.timeout_s:g} s")

    def _run(self) -> None:
        asked: list[tuple[int, list[_Read]]] = []
        found = 0
        for i, tier in enumerate(self._plan.tiers):
            if found == len(self.keys) or self._over:
                break
            if tier.reads.allows:
                asked.append((i, self._ask(i, tier, found)))
                found += len(asked[-1][1])
        with self._moved:
            self._over = True
            self._moved.notify_all()
        for i, read in asked:
            if read:
                self._keep(i, read)

    def _ask(self, number: int, tier: Tier, found: int) -> list[_Read]:
        """Reads on from block `found` as far as one tier goes."""
        self._advance(tier)
        read: list[_Read] = []
        try:
            self._read(number, found, read)
            if not self._over:
                tier.reads.succeeded()
        except Exception as error:  # whatever a store does, it is a miss
            if not self._over:
                tier.reads.failed(error)
        tier.count(
            num_hits=len(read),
            num_misses=len(self.keys) - found - len(read),
            bytes_read=sum(one.num_bytes for one in read),
        )
        for one in read:
            tier.note(one.key, one.has_draft)
        return read

    def _read(self, number: int, found: int, read: list[_Read]) -> None:
        tier = self._plan.tiers[number]
        keys = self.keys[found:]
        stop = tier.store.run(keys)
        tier.forget(keys[stop:])
        size = max(_PIECE_BYTES // self._plan.block_bytes, 1)
        for first in range(0, stop, size):
            self._advance(tier)
            piece = range(first, min(first + size, stop))
            records = tier.store.get_many([keys[i] for i in piece])
            for i, record in zip(piece, records, strict=True):
                block = self._decode(tier, found + i, record)
                if record is None or block is None or self._over:
                    return
                has_draft = block.draft is not None
                kept = record if number else b""
                read.append(_Read(keys[i], kept, len(record), has_draft))
                self._restored.append(Restored(keys[i], block, tier.name))

    def _decode(self, tier: Tier, index: int, record: bytes | None) -> Block | None:
        """The block in a record; None, and the record deleted, if it is damaged."""
        if record is None:
            return None
        key = self.keys[index]
        try:
            block = self._plan.accept(*decode(key, record))
        except UnreadableError as error:
            _warn_once(str(error))
            return None
        except RecordError:
            tier.count(num_corrupt=1)
            tier.forget([key])
            tier.store.delete([key])
            return None
        return block if matches(block, self._tokens[index]) else None

    def _advance(self, tier: Tier) -> None:
        with self._moved:
            self._asked = tier
            self._moved_s = monotonic()

    def _keep(self, number: int, read: Sequence[_Read]) -> None:
        """Keeps what was read for longer, in faster tiers too; the engine need not wait for it."""
        tier = self._plan.tiers[number]
        if number:
            self._plan.promote(number, [(one.key, one.record, one.has_draft) for one in read])
        try:
            if tier.writes.allows:
                tier.store.touch([one.key for one in read])
        except StoreError as error:
            tier.writes.failed(error)
