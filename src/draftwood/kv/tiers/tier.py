"""A store with what an engine must remember about it: whether it works, and what it has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from threading import Lock
from time import monotonic

from draftwood.kv.tiers.breaker import Breaker
from draftwood.kv.tiers.store import BlockStore

_MAX_KNOWN = 1 << 17
_KNOWN_S = 600.0


@dataclass(slots=True)
class TierCounters:
    """What happened at a tier, in blocks unless said otherwise.

    Attributes:
        num_hits: restored.
        num_misses: asked for and not had, for whatever reason.
        num_stored: written.
        num_dropped: not written, as the queue was full or the store did not work.
        num_corrupt: damaged, and so deleted and computed again.
        num_late: answers that came after the limit.
        num_failures: calls that failed.
        bytes_read, bytes_written: of records.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_dropped: int = 0
    num_corrupt: int = 0
    num_late: int = 0
    num_failures: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class Tier:
    """One store and its state. Threads may share it.

    Args:
        store: where the bytes go.
        ttl_s: of the store; what it is known to have is forgotten well before.
    """

    def __init__(self, store: BlockStore, ttl_s: float | None = None) -> None:
        self.store = store
        self.reads = Breaker(f"reading KV from {store.name}")
        self.writes = Breaker(f"writing KV to {store.name}")
        self._counters = TierCounters()
        self._known: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()
        self._known_s = _KNOWN_S if ttl_s is None else min(_KNOWN_S, ttl_s / 2)
        self._lock = Lock()

    @property
    def name(self) -> str:
        """The store's."""
        return self.store.name

    @property
    def counters(self) -> TierCounters:
        """What happened so far; a copy."""
        with self._lock:
            failures = self.reads.num_failures + self.writes.num_failures
            return TierCounters(**asdict(self._counters) | {"num_failures": failures})

    def count(self, **more: int) -> None:
        """Adds to counters by name."""
        with self._lock:
            for name, number in more.items():
                setattr(self._counters, name, getattr(self._counters, name) + number)

    def lacks(self, key: bytes, has_draft: bool) -> bool:
        """Whether a block is worth writing: unknown, known long ago, or known without its draft."""
        with self._lock:
            known = self._known.get(key)
        return known is None or monotonic() >= known[1] or (has_draft and not known[0])

    def note(self, key: bytes, has_draft: bool) -> None:
        """The store has the block, or soon will."""
        with self._lock:
            self._known[key] = (has_draft, monotonic() + self._known_s)
            self._known.move_to_end(key)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """The store does not have these."""
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
