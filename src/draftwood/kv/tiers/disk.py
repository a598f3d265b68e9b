"""Blocks in files.

    DIR/draftwood-kv-1/
    ├── 3f/3f09....kv     one record each, named by its key
    └── tmp/              files being written; a killed process leaves its last one

A file is written in `tmp` and renamed, so no reader sees half of one, and a process that is killed
leaves nothing that has to be repaired. Several processes may share the folder: nothing is locked,
and the file system is the only index. A file's time of modification says when it was last used.
Files are not synced: what a crash of the machine tears, the checksum finds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from threading import Lock

from draftwood.errors import ConfigError, StoreError
from draftwood.kv.tiers.record import HEAD_BYTES
from draftwood.kv.tiers.store import BlockStore, StoredBlock, StoreStats

_FOLDER = "draftwood-kv-1"
_SUFFIX = ".kv"
_STALE_S = 300.0
_SWEEP_S = 300.0


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    num_bytes: int
    used_s: float


class DiskStore(BlockStore):
    """One file a block under a folder.

    The budget holds for the folder, whoever writes there: what other processes wrote is counted
    at each sweep, after a sixteenth of the budget was written or five minutes have passed.

    Args:
        folder: made when it is first written to.
        max_bytes: budget; the least recently used go first, down to fifteen sixteenths of it.
        ttl_s: seconds that an unused block stays.

    Raises:
        ConfigError: there is a file where the folder should be.
    """

    name = "disk"

    def __init__(
        self, folder: str | Path, *, max_bytes: int | None = None, ttl_s: float | None = None
    ) -> None:
        place = Path(folder).expanduser().absolute()
        if place.exists() and not place.is_dir():
            raise ConfigError(f"kv_disk is {str(place)!r}, which is a file: name a folder")
        self._place = place
        self._root = place / _FOLDER
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._lock = Lock()
        self._num_bytes = 0  # as of the last sweep, and what was written since
        self._num_written = 0  # since the last sweep
        self._next_sweep_s = 0.0

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `BlockStore`."""
        with self._errors("read"):
            return [self._get(key) for key in keys]

    def put_many(self, records: Sequence[tuple[bytes, bytes]], *, replace: bool = True) -> None:
        """See `BlockStore`."""
        with self._errors("write"):
            for key, record in records:
                if replace or not self._is_there(key):
                    self._put(key, record)
                else:
                    self.touch([key])
            self._keep_budget()

    def run(self, keys: Sequence[bytes]) -> int:
        """See `BlockStore`."""
        with self._errors("read"):
            return next((i for i, key in enumerate(keys) if not self._is_there(key)), len(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """See `BlockStore`."""
        now = time.time_ns()
        with self._errors("write"):
            for i, key in enumerate(keys):
                with suppress(FileNotFoundError):
                    os.utime(self._path(key), ns=(now - i * 1000, now - i * 1000))

    def delete(self, keys: Sequence[bytes]) -> None:
        """See `BlockStore`."""
        with self._errors("write"):
            for key in keys:
                self._path(key).unlink(missing_ok=True)

    def ls(self) -> Iterator[StoredBlock]:
        """See `BlockStore`."""
        now = time.time()
        with self._errors("read"):
            for file in self._files():
                if self._expired(file.used_s):
                    continue
                with suppress(FileNotFoundError), open(file.path, "rb") as opened:
                    key = bytes.fromhex(file.path.stem)
                    head = opened.read(HEAD_BYTES)
                    yield StoredBlock.of(key, file.num_bytes, max(now - file.used_s, 0.0), head)

    def stats(self) -> StoreStats:
        """See `BlockStore`."""
        with self._errors("read"):
            sizes = [file.num_bytes for file in self._files() if not self._expired(file.used_s)]
        return StoreStats(
            self.name, str(self._place), len(sizes), sum(sizes), self._max_bytes, self._ttl_s
        )

    def close(self) -> None:
        """See `BlockStore`: there is nothing open between two calls."""

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._root / name[:2] / (name + _SUFFIX)

    def _is_there(self, key: bytes) -> bool:
        try:
            return not self._expired(self._path(key).stat().st_mtime)
        except FileNotFoundError:
            return False

    def _get(self, key: bytes) -> bytes | None:
        try:
            with open(self._path(key), "rb") as file:
                if self._expired(os.fstat(file.fileno()).st_mtime):
                    return None
                return file.read()
        except FileNotFoundError:
            return None

    def _put(self, key: bytes, record: bytes) -> None:
        target = self._path(key)
        part = self._root / "tmp" / f"{os.getpid()}-{token_hex(8)}.part"
        # The folder may have been removed by somebody since the last write.
        part.parent.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(exist_ok=True)
        try:
            part.write_bytes(record)
            os.replace(part, target)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        with self._lock:
            self._num_bytes += len(record)
            self._num_written += len(record)

    def _keep_budget(self) -> None:
        """Sweeps when the budget may be spent, or when it is time to look."""
        if self._max_bytes is None:
            due = False
        else:
            due = self._num_bytes > self._max_bytes or self._num_written > self._max_bytes // 16
        if not due and time.monotonic() < self._next_sweep_s:
            return
        wait_s = _SWEEP_S if self._ttl_s is None else min(_SWEEP_S, self._ttl_s / 2)
        self._next_sweep_s = time.monotonic() + wait_s
        self._sweep()

    def _sweep(self) -> None:
        """Removes what is too old or too much, and what killed processes left."""
        with self._lock:
            files = sorted(self._files(), key=lambda file: file.used_s)
            total = sum(file.num_bytes for file in files)
            over = self._max_bytes is not None and total > self._max_bytes
            goal = self._max_bytes * 15 // 16 if over and self._max_bytes is not None else total
            for file in files:
                if total > goal or self._expired(file.used_s):
                    file.path.unlink(missing_ok=True)
                    total -= file.num_bytes
            self._num_bytes, self._num_written = total, 0
        self._remove_stale_parts()

    def _remove_stale_parts(self) -> None:
        oldest = time.time() - _STALE_S
        for part in (self._root / "tmp").glob("*.part"):
            with suppress(FileNotFoundError):
                if part.stat().st_mtime < oldest:
                    part.unlink()

    def _files(self) -> Iterator[_File]:
        for folder in self._root.glob("[0-9a-f][0-9a-f]"):
            for path in folder.glob(f"*{_SUFFIX}"):
                with suppress(FileNotFoundError, ValueError):
                    bytes.fromhex(path.stem)  # somebody else's file is left alone
                    status = path.stat()
                    yield _File(path, status.st_size, status.st_mtime)

    def _expired(self, used_s: float) -> bool:
        return self._ttl_s is not None and used_s < time.time() - self._ttl_s

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise StoreError(f"cannot {what} KV in {self._place}: {reason}") from error
