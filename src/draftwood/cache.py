"""The cache folder on disk: where it is, and how things get into it whole or not at all.

    ~/.cache/draftwood            moved by the environment variable DRAFTWOOD_CACHE
    ├── gguf/                     packaged models, joined and verified
    ├── models/                   folders that transformers loads, made from GGUF files
    ├── identities/               content hashes of GGUF files outside the cache
    ├── locks/                    one file for each name being made
    └── staging/                  work in progress; what a killed run left goes at the next one

Everything is made in `staging` and renamed into place, so a reader never sees half a file. This
module knows nothing about models.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from draftwood.errors import CapacityError, ConfigError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP}
_POLL_S = 0.2


def cache_dir() -> Path:
    """The cache folder, absolute: DRAFTWOOD_CACHE if set, else ~/.cache/draftwood. Not created."""
    chosen = os.environ.get("DRAFTWOOD_CACHE") or Path.home() / ".cache" / "draftwood"
    return Path(chosen).expanduser().absolute()


def human_bytes(count: int) -> str:
    """`count` bytes as a person reads it, in powers of 1000: "98.4 MB"."""
    if count < 1000:
        return f"{count} B"
    power = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.1f} {'kMGT'[power - 1]}B"


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def capacity_error(what: str, need_bytes: int) -> CapacityError:
    """The error for a full disk: what was being made, how much it needs, how to move the cache."""
    root = cache_dir()
    return CapacityError(
        f"{what} needs {human_bytes(need_bytes)} in {root} and {human_bytes(_free_bytes(root))} "
        "are free: make room, or set DRAFTWOOD_CACHE to a folder on a larger disk"
    )


@contextmanager
def disk_errors(what: str, need_bytes: int) -> Iterator[None]:
    """Turn a full disk into CapacityError and a cache that cannot be written into ConfigError."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise capacity_error(what, need_bytes) from error
        if error.errno in _NO_ACCESS:
            raise ConfigError(
                f"{what} cannot be written to {cache_dir()} ({error.strerror}): set "
                "DRAFTWOOD_CACHE to a folder you may write to"
            ) from error
        raise


@contextmanager
def locked(name: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of `name` among all processes that share this cache.

    While another holds it, `waiting` is called every 0.2 s. The lock goes with its process, so a
    killed run never blocks the next.
    """
    folder = cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "wb") as file:
        _acquire(file.fileno(), waiting)
        yield


def _acquire(descriptor: int, waiting: Callable[[], None]) -> None:
    # Windows has no fcntl. Renames still keep the cache whole there; two processes that make the
    # same model only do the work twice.
    if sys.platform != "win32":
        import fcntl

        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                waiting()
                time.sleep(_POLL_S)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return  # some network file systems: as on Windows
                raise


@contextmanager
def staging(name: str, what: str, need_bytes: int) -> Iterator[Path]:
    """An empty folder on the cache's disk to make `name` in; it is gone afterwards.

    Call it under `locked(name)`: then whatever else is staged for `name` is a killed run's, and is
    removed. Raises CapacityError, naming `what`, if fewer than `need_bytes` bytes are free now or
    the disk fills up later.
    """
    root = cache_dir() / "staging"
    with disk_errors(what, need_bytes):
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root, name)
        if _free_bytes(root) < need_bytes:
            raise capacity_error(what, need_bytes)
        folder = Path(tempfile.mkdtemp(prefix=f"{name}@", dir=root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(root: Path, mine: str) -> None:
    """Remove what killed runs left: folders of `mine`, whose lock is held here, or of no one."""
    for folder in root.iterdir():
        name = folder.name.rpartition("@")[0]
        with suppress(_BusyError), nullcontext() if name == mine else locked(name, _give_up):
            shutil.rmtree(folder, ignore_errors=True)


class _BusyError(Exception):
    """Another process holds the lock."""


def _give_up() -> None:
    raise _BusyError


def publish(made: Path, target: Path) -> Path:
    """Move a finished file or folder from `staging` to `target` in one step; returns `target`.

    The bytes are on the disk before the name is, so a crash of the machine cannot leave a name
    with nothing behind it.
    """
    for path in sorted(made.rglob("*")) if made.is_dir() else [made]:
        _sync(path)
    _sync(made)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():  # rename replaces a file, but not a folder with something in it
        shutil.rmtree(target)
    os.replace(made, target)
    _sync(target.parent)
    return target


def _sync(path: Path) -> None:
    # Some file systems cannot sync a folder; the rename is still whole there.
    with suppress(PermissionError, IsADirectoryError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
