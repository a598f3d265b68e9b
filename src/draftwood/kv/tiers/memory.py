"""A store in this process's memory: for tests, and the shortest example of a store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import RLock
from time import monotonic

from draftwood.kv.tiers.store import BlockStore, StoredBlock, StoreStats


@dataclass(slots=True)
class _Item:
    record: bytes
    used_s: float


class MemoryStore(BlockStore):
    """Records in a dictionary, least recently used first.

    Args:
        max_bytes: budget; the least recently used go first.
        ttl_s: seconds that an unused block stays.
        clock: seconds, for tests.
    """

    name = "memory"

    def __init__(
        self,
        *,
        max_bytes: int | None = None,
        ttl_s: float | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._items: OrderedDict[bytes, _Item] = OrderedDict()
        self._num_bytes = 0
        self._lock = RLock()

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `BlockStore`."""
        with self._lock:
            self._expire()
            items = [self._items.get(key) for key in keys]
            return [item.record if item else None for item in items]

    def put_many(self, records: Sequence[tuple[bytes, bytes]], *, replace: bool = True) -> None:
        """See `BlockStore`."""
        with self._lock:
            for key, record in records:
                if replace or key not in self._items:
                    self.delete([key])
                    self._items[key] = _Item(record, self._clock())
                    self._num_bytes += len(record)
                self.touch([key])
            while self._max_bytes is not None and self._num_bytes > self._max_bytes:
                self.delete([next(iter(self._items))])

    def run(self, keys: Sequence[bytes]) -> int:
        """See `BlockStore`."""
        with self._lock:
            self._expire()
            return next((i for i, key in enumerate(keys) if key not in self._items), len(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """See `BlockStore`."""
        with self._lock:
            for key in reversed(keys):
                if key in self._items:
                    self._items[key].used_s = self._clock()
                    self._items.move_to_end(key)

    def delete(self, keys: Sequence[bytes]) -> None:
        """See `BlockStore`."""
        with self._lock:
            for key in keys:
                item = self._items.pop(key, None)
                self._num_bytes -= len(item.record) if item else 0

    def ls(self) -> Iterator[StoredBlock]:
        """See `BlockStore`."""
        with self._lock:
            self._expire()
            items = list(self._items.items())
        now = self._clock()
        for key, item in items:
            yield StoredBlock.of(key, len(item.record), now - item.used_s, item.record)

    def stats(self) -> StoreStats:
        """See `BlockStore`."""
        with self._lock:
            self._expire()
            return StoreStats(
                self.name,
                "this process",
                len(self._items),
                self._num_bytes,
                self._max_bytes,
                self._ttl_s,
            )

    def close(self) -> None:
        """See `BlockStore`: here nothing is left, as the memory is the store."""

    def _expire(self) -> None:
        if self._ttl_s is None:
            return
        oldest = self._clock() - self._ttl_s
        self.delete([key for key, item in self._items.items() if item.used_s < oldest])
