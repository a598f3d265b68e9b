"""The thread that writes blocks to stores, so that the engine never waits for one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from draftwood.kv.tiers.record import Block, Labels, encode
from draftwood.kv.tiers.tier import Tier

_BATCH_BYTES = 8 << 20
_JOIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """One block to be written.

    Attributes:
        key: its chained hash.
        content: the block, or the record itself when it came from a store.
        num_bytes: of memory that it holds while it waits.
        has_draft: whether the draft model's part is in it.
        tiers: where to.
    """

    key: bytes
    content: Block | bytes
    num_bytes: int
    has_draft: bool
    tiers: tuple[Tier, ...]


class Writer:
    """A bounded queue and the thread behind it, which starts with the first job.

    Args:
        labels: written into each record.
        max_bytes: most bytes that wait.
    """

    def __init__(self, labels: Labels, max_bytes: int) -> None:
        self._labels = labels
        self._max_bytes = max_bytes
        self._jobs: deque[Job] = deque()
        self._num_bytes = 0  # waiting and being written
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def room(self) -> int:
        """Bytes that the queue can take now."""
        with self._changed:
            return 0 if self._closed else self._max_bytes - self._num_bytes

    def put(self, jobs: Sequence[Job]) -> None:
        """Queues jobs; the caller has looked at `room` and nobody else fills it much."""
        if not jobs:
            return
        with self._changed:
            self._jobs.extend(jobs)
            self._num_bytes += sum(job.num_bytes for job in jobs)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="draftwood-kv-writer", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all is written, at most so long; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_bytes == 0, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Writes what waits, at most so long, and ends the thread."""
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            for job in self._jobs:
                _lost([job], job.tiers)
            self._num_bytes -= sum(job.num_bytes for job in self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        # A thread that is still in native code when the interpreter ends may abort the process.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while batch := self._next_batch():
            for tier in dict.fromkeys(tier for job in batch for tier in job.tiers):
                self._write(tier, [job for job in batch if tier in job.tiers])
            with self._changed:
                self._num_bytes -= sum(job.num_bytes for job in batch)
                self._changed.notify_all()

    def _next_batch(self) -> list[Job]:
        """The next few megabytes of jobs; none when the writer is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            size, count = 0, 0
            for job in self._jobs:
                size += job.num_bytes
                count += 1
                if size >= _BATCH_BYTES:
                    break
            batch = list(islice(self._jobs, count))
            for _ in batch:
                self._jobs.popleft()
            return batch

    def _write(self, tier: Tier, jobs: Sequence[Job]) -> None:
        if not tier.writes.allows:
            _lost(jobs, [tier])
            return
        try:
            # One with its draft replaces one without; one without never replaces anything.
            for has_draft in (False, True):
                records = [
                    (job.key, self._record(job)) for job in jobs if job.has_draft is has_draft
                ]
                if records:
                    tier.store.put_many(records, replace=has_draft)
                    size = sum(len(record) for _, record in records)
                    tier.count(num_stored=len(records), bytes_written=size)
        except Exception as error:  # whatever a store does, the thread goes on
            tier.writes.failed(error)
            _lost(jobs, [tier])
            return
        tier.writes.succeeded()

    def _record(self, job: Job) -> bytes:
        if isinstance(job.content, bytes):
            return job.content
        return encode(job.key, job.content, self._labels)


def _lost(jobs: Sequence[Job], tiers: Sequence[Tier]) -> None:
    for tier in tiers:
        tier.forget(job.key for job in jobs)
        tier.count(num_dropped=len(jobs))
