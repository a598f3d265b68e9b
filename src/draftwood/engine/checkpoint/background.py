"""The thread that writes checkpoints, so that the engine never waits for a disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

from draftwood.engine.checkpoint.store import Checkpoint, CheckpointStore

_log = logging.getLogger("draftwood")
_JOIN_S = 1.0


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """What was written so far.

    Attributes:
        num_written, num_failed: checkpoints that reached the disk, and that did not.
        num_left_out: requests that had no room in the last one.
        last_bytes: size of the last one.
        num_bytes, write_s: of all of them; the seconds are the writing thread's.
        engine_s: seconds that the engine's thread spent on copies.
    """

    num_written: int = 0
    num_failed: int = 0
    num_left_out: int = 0
    last_bytes: int = 0
    num_bytes: int = 0
    write_s: float = 0.0
    engine_s: float = 0.0


class Background:
    """Writes the newest checkpoint that it was given; older ones that still wait are skipped.

    Args:
        store: where to.
        max_bytes: of a checkpoint.
        settle: called before each: lets KV reach the disk first.

    Attributes:
        keeps_empty: whether one without requests is written; else it removes what is there.
        stats: what was written so far.
    """

    def __init__(
        self, store: CheckpointStore, max_bytes: int, settle: Callable[[], object]
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._settle = settle
        self._next: Checkpoint | None = None
        self.keeps_empty = False
        self._num_given = self._num_done = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.stats = CheckpointStats()

    def put(self, checkpoint: Checkpoint) -> int:
        """Takes a checkpoint; returns its number for `wait`."""
        with self._changed:
            self._next = checkpoint
            self._num_given += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="draftwood-checkpoints", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
            return self._num_given

    def wait(self, number: int, timeout_s: float) -> bool:
        """Waits until that checkpoint, or a later one, was dealt with; whether it was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_done >= number, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Writes what waits, at most so long, and ends the thread."""
        self.wait(self._num_given, timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closed)
                checkpoint, self._next = self._next, None
                number = self._num_given
            if checkpoint is None:
                return
            self._write(checkpoint)
            with self._changed:
                self._num_done = number
                self._changed.notify_all()

    def _write(self, checkpoint: Checkpoint) -> None:
        stats = self.stats
        try:
            if not checkpoint.requests and not self.keeps_empty:
                self._store.clear()
                self.stats = replace(stats, num_left_out=0, last_bytes=0)
                return
            self._settle()
            begin = perf_counter()
            data, left_out = checkpoint.encode(self._max_bytes)
            self._store.write(data)
        except Exception as error:  # a full disk must not end a server
            if stats.num_failed == 0:
                _log.warning("a checkpoint could not be written: %s", error)
            self.stats = replace(stats, num_failed=stats.num_failed + 1)
            return
        if left_out and not stats.num_left_out:
            _log.warning("%d requests have no room in a checkpoint", left_out)
        self.stats = replace(
            stats,
            num_written=stats.num_written + 1,
            num_left_out=left_out,
            last_bytes=len(data),
            num_bytes=stats.num_bytes + len(data),
            write_s=stats.write_s + perf_counter() - begin,
        )
