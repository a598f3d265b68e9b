"""Compiles the CPU kernels once, for this machine, and loads them.

The result lies in the cache folder under a name made of the sources, the compiler, its options and
the processor's features, so a change of any of them compiles anew (about two seconds). Without a
compiler, or with DRAFTWOOD_KERNELS=0, there are no kernels: `load` returns None and
`why_unavailable` says why; nothing here raises.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch

from draftwood.cache import cache_dir

_SOURCES = Path(__file__).parent
_ABI = 1
_TIMEOUT_S = 120
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
)


@dataclass(frozen=True, slots=True)
class _Outcome:
    library: ctypes.CDLL | None
    reason: str | None


class _BuildError(Exception):
    pass


_lock = Lock()
_outcome: _Outcome | None = None


def load(progress: Callable[[str], None] = lambda message: None) -> ctypes.CDLL | None:
    """The kernels' library, compiled if this machine has none yet; None where there can be none.

    Args:
        progress: told one line before compiling starts.
    """
    global _outcome
    with _lock:
        if _outcome is None:
            _outcome = _attempt(progress)
        return _outcome.library


def why_unavailable() -> str | None:
    """Why `load` returns None, one line; None if it returns the kernels."""
    load()
    assert _outcome is not None
    return _outcome.reason


def _attempt(progress: Callable[[str], None]) -> _Outcome:
    if os.environ.get("DRAFTWOOD_KERNELS", "1") == "0":
        return _Outcome(None, "DRAFTWOOD_KERNELS=0 turns the CPU kernels off")
    try:
        return _Outcome(_opened(progress), None)
    except (OSError, subprocess.SubprocessError, _BuildError, AttributeError) as error:
        return _Outcome(None, f"the CPU kernels cannot be built: {error}")


def _opened(progress: Callable[[str], None]) -> ctypes.CDLL:
    path = _built(progress)
    try:
        return _open(path)
    except OSError:  # damaged, by a full disk perhaps: once more from the sources
        path.unlink()
        return _open(_built(progress))


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    if library.dw_abi() != _ABI:
        raise _BuildError(f"{path} is of another version: delete it")
    library.dw_isa.restype = ctypes.c_char_p
    library.dw_log_sum.restype = ctypes.c_double
    return library


def _built(progress: Callable[[str], None]) -> Path:
    compiler = _compiler()
    march = os.environ.get("DRAFTWOOD_KERNELS_MARCH", "native")
    flags = (*_FLAGS, f"-march={march}" if _is_x86() else f"-mcpu={march}")
    target = cache_dir() / "kernels" / f"cpu-{_key(compiler, flags)}.so"
    if not target.is_file():
        progress("Compiling the CPU kernels (once for this machine, a few seconds)")
        _compile(compiler, flags, target)
    return target


def _is_x86() -> bool:
    return platform.machine().lower() in {"x86_64", "amd64"}


def _compiler() -> str:
    chosen = os.environ.get("CXX")
    for name in [chosen] if chosen else ["g++", "clang++", "c++"]:
        found = shutil.which(name)
        if found:
            return found
    raise _BuildError(f"no C++ compiler ({chosen or 'g++, clang++ or c++'}) on PATH")


def _key(compiler: str, flags: Sequence[str]) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=True
    ).stdout
    digest = hashlib.sha256()
    for part in (version, " ".join(flags).encode(), torch.__version__.encode(), _processor()):
        digest.update(hashlib.sha256(part).digest())
    for source in sorted(_SOURCES.glob("*.[ch]pp")):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _processor() -> bytes:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_bytes().splitlines():
            if line.startswith((b"flags", b"Features")):
                return line
    return f"{platform.machine()} {platform.processor()} {platform.node()}".encode()


def _compile(compiler: str, flags: Sequence[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        # Renamed when whole: two processes may both compile, neither sees half a file.
        built, unit = Path(folder) / "cpu.so", Path(folder) / "cpu.o"
        _run([compiler, *flags, "-c", str(_SOURCES / "cpu.cpp"), "-o", str(unit)])
        _run([compiler, "-shared", str(unit), *_openmp(), "-o", str(built)])
        os.replace(built, target)


def _openmp() -> list[str]:
    """PyTorch's own OpenMP runtime, so that the process keeps a single pool of threads."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(bundled[0])] if bundled else ["-fopenmp"]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line] or lines or ["no message"]
        raise _BuildError(f"{command[0]} failed: {errors[0].strip()}")
