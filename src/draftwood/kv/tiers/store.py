"""What a store of KV blocks is.

A store keeps bytes under keys and knows nothing of models. It may lose anything at any time: what
is gone is computed again. `tests/kv/tiers/test_contract.py` runs against every implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from draftwood.errors import StoreError
from draftwood.kv.tiers.record import Labels, RecordError, check, has_draft, peek

__all__ = ["BlockStore", "StoreError", "StoreStats", "StoredBlock", "VerifyReport"]

_VERIFY_BATCH = 16


@dataclass(frozen=True, slots=True)
class StoreStats:
    """How full a store is.

    Attributes:
        name: of the tier.
        place: where it is; no password in it.
        num_blocks, num_bytes: what it holds.
        max_bytes: its budget; None where it has none, or keeps it itself.
        ttl_s: seconds that an unused block stays; None for no limit.
    """

    name: str
    place: str
    num_blocks: int
    num_bytes: int
    max_bytes: int | None = None
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block in a store, as a list shows it.

    Attributes:
        key: its chained hash.
        num_bytes: of the record.
        idle_s: seconds since it was used; None where the store does not know.
        labels: who made it; None if it is no record.
        has_draft: whether the draft model's part is there.
    """

    key: bytes
    num_bytes: int
    idle_s: float | None
    labels: Labels | None
    has_draft: bool

    @classmethod
    def of(cls, key: bytes, num_bytes: int, idle_s: float | None, head: bytes) -> StoredBlock:
        """A line of the list, from the first bytes of a record."""
        try:
            return cls(key, num_bytes, idle_s, peek(head), has_draft(head))
        except RecordError:
            return cls(key, num_bytes, idle_s, None, False)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What reading every block found; bad ones are deleted by then."""

    num_good: int
    num_bad: int


class BlockStore(ABC):
    """Bytes under keys. Every method may raise `StoreError` when the store does not work now.

    Methods may be called from several threads at once.
    """

    name: str

    @abstractmethod
    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The records under `keys`, in order; None for each that is not there."""

    @abstractmethod
    def put_many(self, records: Sequence[tuple[bytes, bytes]], *, replace: bool = True) -> None:
        """Stores (key, record) pairs, each whole or not at all.

        Args:
            records: those that come later count as used later.
            replace: False keeps what is there already, and counts it as used.
        """

    @abstractmethod
    def run(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are there: the length of the unbroken run."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """Counts blocks as used now, the first as the most recent, so that chains keep roots."""

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Removes what is there of `keys`."""

    @abstractmethod
    def ls(self) -> Iterator[StoredBlock]:
        """All blocks, in no order."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """How full it is."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of files and connections; what is stored stays. Never raises."""

    def clear(self) -> int:
        """Removes all blocks; returns how many."""
        keys = [block.key for block in self.ls()]
        self.delete(keys)
        return len(keys)

    def verify(self) -> VerifyReport:
        """Reads every block and deletes those that are damaged."""
        good = bad = 0
        for keys in _batches([block.key for block in self.ls()]):
            for key, record in zip(keys, self.get_many(keys), strict=True):
                if record is None:
                    continue  # gone since it was listed
                if _sound(key, record):
                    good += 1
                else:
                    bad += 1
                    self.delete([key])
        return VerifyReport(good, bad)


def _batches(keys: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    for start in range(0, len(keys), _VERIFY_BATCH):
        yield tuple(keys[start : start + _VERIFY_BATCH])


def _sound(key: bytes, record: bytes) -> bool:
    try:
        check(key, record)
    except RecordError:
        return False
    return True
