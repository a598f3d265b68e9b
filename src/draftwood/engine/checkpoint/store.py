"""Checkpoints as files: whole or not at all, checked, and never only one.

    DIR/
    ├── checkpoint-00000041.dwc   the one before
    ├── checkpoint-00000042.dwc   the newest
    ├── lock                      held by the process that writes here
    └── kv/                       KV blocks (the disk tier), unless they are kept elsewhere

A file is `magic`, 16 bytes of blake2b over what follows, and JSON. It is written under another
name, synced and renamed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from draftwood.engine.checkpoint.maker import Maker
from draftwood.engine.checkpoint.saved import SavedRequest
from draftwood.errors import CheckpointError, ConfigError

_log = logging.getLogger("draftwood")
_FAMILY = b"draftwood-checkpoint-"
MAGIC = _FAMILY + b"1\n"
_DIGEST_BYTES = 16
_SUFFIX = ".dwc"
_KEPT = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a process needs to go on where another ended.

    Attributes:
        maker: who made it.
        requests: in the order in which they came.
        num_requests: how many the engine had named, so that names stay different.
        drafter, drafter_state: name of the drafter, and what it wanted to remember.
    """

    maker: Maker
    requests: tuple[SavedRequest, ...]
    num_requests: int = 0
    drafter: str = ""
    drafter_state: bytes = b""

    def encode(self, max_bytes: int) -> tuple[bytes, int]:
        """The bytes of a file, and how many of the last requests had no room in it.

        What the drafter remembers goes first when room is short.
        """
        records, size = [], 4096
        for saved in self.requests:
            record = json.dumps(saved.to_json(), separators=(",", ":")).encode()
            size += len(record) + 1
            if size > max_bytes:
                break
            records.append(record)
        state = b64encode(self.drafter_state).decode("ascii")
        fits = size + len(state) <= max_bytes
        head = {
            "maker": asdict(self.maker),
            "num_requests": self.num_requests,
            "drafter": [self.drafter, state if fits else ""],
        }
        body = b'%s,"requests":[%s]}' % (json.dumps(head).encode()[:-1], b",".join(records))
        return MAGIC + _digest(body) + body, len(self.requests) - len(records)


class CheckpointStore:
    """A folder of checkpoints that one process at a time uses.

    Args:
        folder: made if it is not there.

    Raises:
        ConfigError: it is a file, cannot be written, or another process uses it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser().absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"checkpoint folder {self.folder} cannot be used ({error.strerror}): name a folder "
                "that you may write to"
            ) from error
        # The lock goes with the process, or with this object.
        self._unlock = weakref.finalize(self, os.close, descriptor)
        self._take_lock(descriptor)
        self._damaged: set[Path] = set()

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None where there is none at all.

        Raises:
            CheckpointError: all are damaged, or the newest is of another format.
        """
        found = self._files()
        for path in reversed(found):
            try:
                return _decode(path)
            except _DamagedError as error:
                self._damaged.add(path)
                _log.warning("checkpoint %s is damaged (%s): the one before is used", path, error)
        if found:
            raise CheckpointError(
                f"all checkpoints in {self.folder} are damaged: remove them to begin anew"
            )
        return None

    def write(self, data: bytes) -> None:
        """Makes `data`, as `Checkpoint.encode` gives it, the newest checkpoint.

        Raises:
            OSError: it cannot be written; those that are there stay.
        """
        files = self._files()
        number = int(files[-1].stem.rpartition("-")[2]) + 1 if files else 1
        target = self.folder / f"checkpoint-{number:08d}{_SUFFIX}"
        part = target.with_suffix(".part")
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
        self._sync()
        whole = [path for path in [*files, target] if path not in self._damaged]
        for path in {*files} - {*whole[-_KEPT:]}:
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes all checkpoints: there is nothing to go on with."""
        for path in self._files():  # oldest first: what is left is never an older state
            path.unlink(missing_ok=True)
        self._sync()

    def close(self) -> None:
        """Lets other processes use the folder."""
        self._unlock()

    def _files(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob(f"checkpoint-*{_SUFFIX}"))

    def _sync(self) -> None:
        # Some systems cannot sync a folder; the rename is still whole there.
        with suppress(OSError):
            descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _take_lock(self, descriptor: int) -> None:
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._unlock()
            raise ConfigError(
                f"checkpoint folder {self.folder} is used by another process: name another folder"
            ) from error


class _DamagedError(Exception):
    """Bytes that are no whole checkpoint."""


def _decode(path: Path) -> Checkpoint:
    data = path.read_bytes()
    start = len(MAGIC) + _DIGEST_BYTES
    if data.startswith(_FAMILY) and not data.startswith(MAGIC) and b"\n" in data[:40]:
        kind = data[len(_FAMILY) :].partition(b"\n")[0].decode("ascii", "replace")
        raise CheckpointError(
            f"checkpoint {path} is of format {kind}, and this version reads format 1: use the "
            "version that made it, or another folder"
        )
    if not data.startswith(MAGIC) or len(data) <= start:
        raise _DamagedError("it does not begin as one does")
    if data[len(MAGIC) : start] != _digest(data[start:]):
        raise _DamagedError("its checksum is wrong")
    try:
        return _from_json(json.loads(data[start:]))
    except (KeyError, TypeError, ValueError) as error:
        raise _DamagedError(f"it cannot be read: {error!r}") from error


def _from_json(value: Any) -> Checkpoint:
    records: Sequence[Any] = value["requests"]
    drafter, state = value["drafter"]
    return Checkpoint(
        Maker(**value["maker"]),
        tuple(SavedRequest.from_json(record) for record in records),
        int(value["num_requests"]),
        str(drafter),
        b64decode(state),
    )


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()
