"""A package index with one tiny model in two wheels, and a disk that fills up."""

from __future__ import annotations

import errno
import io
import zipfile
from pathlib import Path
from typing import Any

PARTS = (b"first part, " * 200_000, b"second part " * 100_000)
WHOLE = b"".join(PARTS)


def write_wheel(path: Path, number: int, content: bytes, member: str = "data/part.bin") -> None:
    info = f"tiny_part{number}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"tiny_part{number}/{member}", content)
        archive.writestr(f"tiny_part{number}/__init__.py", "raise SystemExit('package code ran')")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def files_in(root: Path) -> list[Path]:
    """All files in the cache but the locks, which are empty and stay."""
    return [p for p in root.rglob("*") if p.is_file() and p.parent.name != "locks"]


class FullDisk(io.FileIO):
    """A file on a disk that has room for `room` bytes more."""

    room = 0

    def write(self, data: Any, /) -> int:
        FullDisk.room -= memoryview(data).nbytes
        if FullDisk.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)
