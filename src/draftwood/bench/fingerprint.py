"""What a measurement was taken on: machine, software, model. Names no host, user or path."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import torch

import draftwood
from draftwood.models.base import ModelSpec

if TYPE_CHECKING:
    from draftwood.llm import LLM

_FLAGS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)


def environment() -> dict[str, Any]:
    """Machine and software, ready for JSON."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "memory_bytes": _memory_bytes(),
        "load_average": _load_average(),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "draftwood": draftwood.__version__,
        "commit": _commit(Path(__file__).resolve().parents[3]),
    }


def model_facts(spec: ModelSpec) -> dict[str, Any]:
    """The model, ready for JSON; of a local one only the last part of its path."""
    is_path = os.path.exists(spec.name)
    return {
        "name": Path(spec.name).resolve().name if is_path else spec.name,
        "fingerprint": spec.fingerprint,
        "num_parameters": spec.num_parameters,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "quantization": spec.quantization,
        "device": str(spec.device),
    }


def head_line(llm: LLM, command: str, **facts: Any) -> dict[str, Any]:
    """The `fingerprint` line that begins a record.

    Args:
        llm: what is measured.
        command: of `draftwood bench`.
        facts: what else the numbers depend on.
    """
    return {
        "type": "fingerprint",
        "command": command,
        "model": model_facts(llm.model.spec),
        "draft_model": model_facts(llm.draft_model.spec) if llm.draft_model else None,
        "config": asdict(llm.config),
        **facts,
        "environment": environment(),
    }


def _cpu() -> dict[str, Any]:
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "family": info.get("cpu family"),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
    }


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _load_average() -> float | None:
    """Work waiting on the machine before the measurement: above 0, others ran beside it."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit(root: Path) -> str | None:
    """The checkout's commit, "+" behind it when the sources were changed; None outside of one."""
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src")
    return f"{head}+" if head and changed else head or None


def _git(root: Path, *arguments: str) -> str:
    try:
        run = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


class Neighbours:
    """How much of the machine others used since this was made. Linux only.

    A measurement beside other work says little: this tells which ones those are.
    """

    def __init__(self) -> None:
        self._busy, self._own, self._wall = _busy_s(), process_time(), perf_counter()

    def cores(self) -> float | None:
        """Cores that other processes kept busy, on average; None where it is not known."""
        busy = _busy_s()
        if busy is None or self._busy is None:
            return None
        wall = perf_counter() - self._wall
        others = busy - self._busy - (process_time() - self._own)
        return round(max(others, 0.0) / wall, 2) if wall > 0 else None


def _busy_s() -> float | None:
    """Seconds all cores together were busy since the machine started."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, irq, soft, steal = map(int, fields[:8])
        return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
