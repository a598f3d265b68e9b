"""Disk and Redis behind the RAM's prefix index: what is written where, and how it comes back.

`KVTiers` belongs to a model and may serve several engines; `TieredPrefix` joins it to the pool and
the prefix index of one of them, and is only called from that engine's thread.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from time import monotonic

from draftwood.kv.pool import BlockPool, KVSpec
from draftwood.kv.prefix import Entry, PrefixIndex
from draftwood.kv.tiers.fetch import Fetch, Plan, Restored
from draftwood.kv.tiers.record import Block, Labels, PlaneKV, RecordError
from draftwood.kv.tiers.store import BlockStore
from draftwood.kv.tiers.tier import Tier, TierCounters
from draftwood.kv.tiers.writer import Job, Writer

QUEUE_BYTES = 256 << 20
CLOSE_S = 10.0
_MAX_FETCHES = 4
_JOIN_S = 1.0
# A thread that is in native code when the interpreter ends may abort the process.
_LAST_S = 5.0


class KVTiers:
    """Stores in the order in which they are asked, and the thread that writes to them.

    Args:
        stores: fastest first.
        target, draft: shapes of what the pool holds.
        block_size: slots of a block.
        labels: who we are. A draft part of another draft model is not used.
        timeout_s: the most that a store may let the engine wait for its next answer.
        ttl_s: of the stores, if they have one.
        queue_bytes: most bytes of copies that wait to be written; more is dropped.
    """

    def __init__(
        self,
        stores: Sequence[BlockStore],
        *,
        target: KVSpec,
        draft: KVSpec | None = None,
        block_size: int,
        labels: Labels,
        timeout_s: float = 0.25,
        ttl_s: float | None = None,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.tiers = tuple(Tier(store, ttl_s) for store in stores)
        self._target = target
        self._draft = draft
        self._block_size = block_size
        self._labels = labels
        self._writer = Writer(labels, queue_bytes)
        width = target.bytes_per_token + (draft.bytes_per_token if draft else 0)
        self.block_bytes = width * block_size
        self._plan = Plan(self.tiers, timeout_s, self.block_bytes, self._accept, self._promote)
        # Also when the interpreter ends: what is queued is still written.
        self._fetches: weakref.WeakSet[Fetch] = weakref.WeakSet()
        self._closer = weakref.finalize(self, _close, self._fetches, self._writer, tuple(stores))

    @property
    def counters(self) -> dict[str, TierCounters]:
        """What happened so far, by tier."""
        return {tier.name: tier.counters for tier in self.tiers}

    def fetch(self, keys: Sequence[tuple[bytes, tuple[int, ...]]], start: int) -> Fetch:
        """Begins to read blocks; `start` blocks of their chain are in RAM."""
        fetch = Fetch(keys, start, self._plan)
        self._fetches.add(fetch)
        return fetch

    def save(self, pool: BlockPool, entries: Sequence[tuple[bytes, Entry]]) -> None:
        """Copies blocks that a store lacks, and queues them.

        Args:
            pool: where the blocks are.
            entries: of the prefix index, those nearer to the prompt's beginning first. When the
                queue is full the rest is dropped: a chain is of no use without its beginning.
        """
        room = self._writer.room()
        jobs: list[Job] = []
        for key, entry in entries:
            tiers = self._lacking(key, entry.has_draft, self.tiers)
            if not tiers:
                continue
            if room < self.block_bytes:
                for tier in tiers:
                    tier.count(num_dropped=1)
                continue
            room -= self.block_bytes
            block = _copy(pool, entry)
            jobs.append(Job(key, block, self.block_bytes, entry.has_draft, tiers))
        self._queue(jobs)

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Waits until what is queued is written, at most so long; returns whether it is."""
        _join(self._fetches)
        return self._writer.flush(timeout_s)

    def close(self) -> None:
        """Writes what is queued, ten seconds at most, and lets go of the stores."""
        self._closer()

    def _lacking(self, key: bytes, has_draft: bool, tiers: Sequence[Tier]) -> tuple[Tier, ...]:
        """The tiers that work and do not have the block."""
        return tuple(tier for tier in tiers if tier.writes.allows and tier.lacks(key, has_draft))

    def _queue(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            for tier in job.tiers:
                tier.note(job.key, job.has_draft)
        # Ends first: the last one written is the last one that a store evicts.
        self._writer.put(jobs[::-1])

    def _promote(self, number: int, records: Sequence[tuple[bytes, bytes, bool]]) -> None:
        """Queues what tier `number` had for the faster tiers. Called from a reader's thread."""
        room = self._writer.room()
        jobs: list[Job] = []
        for key, record, has_draft in records:
            tiers = self._lacking(key, has_draft, self.tiers[:number])
            if tiers and room >= len(record):
                room -= len(record)
                jobs.append(Job(key, record, len(record), has_draft, tiers))
        self._queue(jobs)

    def _accept(self, block: Block, labels: Labels) -> Block:
        """The block as the pool can take it: without a draft part that is another model's.

        Raises:
            RecordError: the target's part does not fit.
        """
        if not block.target.fits(self._target, self._block_size):
            raise RecordError("its shape is not this model's")
        draft, spec = block.draft, self._draft
        if draft is None or (
            spec is not None
            and labels.draft == self._labels.draft
            and draft.fits(spec, self._block_size)
        ):
            return block
        return replace(block, draft=None)


class TieredPrefix:
    """The prefix index of one engine, with the tiers behind it.

    Args:
        prefix: the index; tells us what is published and evicted from now on.
        pool: its blocks.
        tiers: the stores.
    """

    def __init__(self, prefix: PrefixIndex, pool: BlockPool, tiers: KVTiers) -> None:
        self._prefix = prefix
        self._pool = pool
        self._tiers = tiers
        self._open: list[Fetch] = []
        prefix.sink = self

    def saw(self, entries: Sequence[tuple[bytes, Entry]]) -> None:
        """Blocks were published or are about to be evicted: see `PrefixSink`."""
        self._tiers.save(self._pool, entries)

    def open(self, tokens: Sequence[int], salt: bytes = b"") -> Fetch | None:
        """Begins to fetch what RAM lacks of a prompt's beginning.

        Returns:
            None when it is not time yet: others are being fetched, perhaps the same blocks.
        """
        self._open = [fetch for fetch in self._open if not fetch.ready]
        if len(self._open) >= _MAX_FETCHES:
            return None
        keys = self._prefix.keys(tokens[: len(tokens) - 1], salt)
        start = self._prefix.num_known(keys)
        wanted = keys[start:]
        if wanted and any(wanted[0][0] in fetch.keys for fetch in self._open):
            return None
        fetch = self._tiers.fetch(wanted, start)
        self._open.append(fetch)
        return fetch

    def wait(self) -> bool:
        """Waits until one of the open fetches is ready; False when there is none."""
        if not self._open:
            return False
        self._open[0].wait()
        self._open = [fetch for fetch in self._open if not fetch.ready]
        return True

    def adopt(self, fetch: Fetch, tokens: Sequence[int], salt: bytes = b"") -> dict[str, int]:
        """Puts what was fetched into the pool and the index; returns tokens by tier.

        As many blocks as can be had: those that running requests hold are not taken from them.
        """
        restored = fetch.take()
        gained: Counter[str] = Counter()
        if not restored:
            return gained
        match = self._prefix.match(tokens, salt)
        held = list(match.blocks)  # ours meanwhile, so that they are not evicted for the rest
        for i, one in enumerate(restored, start=fetch.start):
            if i < len(held):
                continue
            if i > len(held) or not self._add(one, held):
                break
            gained[one.tier] += self._pool.block_size
        self._pool.release(held)
        return gained

    def _add(self, one: Restored, held: list[int]) -> bool:
        if self._pool.num_free == 0 and not self._prefix.evict(8):
            return False
        block = self._pool.take(held[-1] if held else None)
        slots = self._pool.slots_of(block)
        one.block.target.write_to(self._pool.target, slots)
        draft = one.block.draft
        if draft is not None and self._pool.draft is not None:
            draft.write_to(self._pool.draft, slots)
        self._prefix.adopt(one.key, Entry(block, one.block.tokens, draft is not None))
        held.append(block)
        return True


def _copy(pool: BlockPool, entry: Entry) -> Block:
    slots = pool.slots_of(entry.block)
    draft = None
    if entry.has_draft and pool.draft is not None:
        draft = PlaneKV.copy_of(pool.draft, slots)
    return Block(entry.tokens, PlaneKV.copy_of(pool.target, slots), draft)


def _join(fetches: Collection[Fetch], timeout_s: float = _JOIN_S) -> None:
    """Waits a second at most for readers, which may have something for the writer."""
    end = monotonic() + timeout_s
    for fetch in list(fetches):
        fetch.join(end - monotonic())


def _close(fetches: Collection[Fetch], writer: Writer, stores: Sequence[BlockStore]) -> None:
    _join(fetches)
    for fetch in list(fetches):
        fetch.cancel()
    writer.close(CLOSE_S)
    for store in stores:
        store.close()
    _join(fetches, _LAST_S)
