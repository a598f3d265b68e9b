"""`draftwood doctor`: what this machine has, what is missing, and what will be used."""

from __future__ import annotations

import importlib.metadata as packages
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer

from draftwood.cache import cache_dir, human_bytes
from draftwood.cli import options as opt
from draftwood.cli.loading import quiet
from draftwood.cli.pull import packaged_models
from draftwood.cli.running import interruptible

State = Literal["ok", "info", "missing"]

_MARKS = {"ok": "[green]✓[/green]", "info": "[dim]-[/dim]", "missing": "[red]✗[/red]"}
_REQUIREMENT = re.compile(r"^([\w.-]+).*?;.*?extra\s*==\s*['\"]([\w-]+)['\"]")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and what to do if it is missing.

    `state` is "ok", "info" for something that is not there and not needed, or "missing".
    """

    topic: str
    state: State
    text: str


def doctor(as_json: opt.Json = False) -> None:
    """Show what this machine has, what is missing, and what will be used."""
    quiet()
    with interruptible():
        sections = {title: look() for title, look in _SECTIONS.items()}
    if as_json:
        print(json.dumps(_record(sections), ensure_ascii=False))
    else:
        _print(sections)
    if any(finding.state == "missing" for found in sections.values() for finding in found):
        raise typer.Exit(1)


def _record(sections: dict[str, list[Finding]]) -> dict[str, Any]:
    return {
        title: {f.topic: {"state": f.state, "text": f.text} for f in found}
        for title, found in sections.items()
    }


def _print(sections: dict[str, list[Finding]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    for title, found in sections.items():
        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in found:
            table.add_row(_MARKS[finding.state], finding.topic, escape(finding.text))
        console.print(f"[bold]{title}[/bold]")
        console.print(table)


def _software() -> list[Finding]:
    found = [Finding("python", "ok", f"{platform.python_version()} ({platform.system()})")]
    for name in ("draftwood", "torch", "transformers", "tokenizers", "safetensors"):
        found.append(_package(name))
    return found


def _package(name: str) -> Finding:
    try:
        return Finding(name, "ok", packages.version(name))
    except packages.PackageNotFoundError:
        return Finding(name, "missing", f"not installed: run  pip install {name}")


def _machine() -> list[Finding]:
    import torch

    return [
        Finding("processor", "ok", _processor()),
        Finding("instructions", "ok", f"PyTorch uses {torch.backends.cpu.get_cpu_capability()}"),
        Finding("threads", "ok", f"{torch.get_num_threads()} of {os.cpu_count()} processors"),
        Finding("memory", "ok", _memory()),
        _disk(),
        _cuda(),
    ]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> str:
    import torch

    from draftwood.models.memory import available_bytes

    free = human_bytes(available_bytes(torch.device("cpu")))
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return f"{free} free"
    return f"{free} free of {human_bytes(total)}"


def _disk() -> Finding:
    folder = cache_dir()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{human_bytes(free)} free in {cache_dir()} (DRAFTWOOD_CACHE moves it)"
    if not os.access(folder, os.W_OK):
        return Finding("cache", "missing", f"{cache_dir()} cannot be written: set DRAFTWOOD_CACHE")
    return Finding("cache", "ok", text)


def _cuda() -> Finding:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"PyTorch is built for CUDA {built} and sees no device" if built else "CPU build"
        return Finding("CUDA", "info", f"none ({why})")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("CUDA", "ok", f"{torch.version.cuda}: {', '.join(names)}")


def _speed() -> list[Finding]:
    from draftwood.models.packed_linear import packing_available

    packed = (
        Finding("packed float32", "ok", "PyTorch has the kernel")
        if packing_available()
        else Finding("packed float32", "info", "this PyTorch has none: verifying trees is slower")
    )
    return [packed, _compiler(), _kernels()]


def _compiler() -> Finding:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path:
        return Finding("C++ compiler", "ok", path)
    return Finding("C++ compiler", "info", "none found: install g++ or set CXX")


def _kernels() -> Finding:
    from draftwood.kernels import why_unavailable

    reason = why_unavailable()
    return Finding("CPU kernels", "info" if reason else "ok", reason or "compiled and loaded")


def _drafters() -> list[Finding]:
    from draftwood.draft.base import drafter_names, load_drafter_class
    from draftwood.errors import ConfigError

    found = []
    for name in drafter_names():
        try:
            kind = load_drafter_class(name)
        except ConfigError as error:
            found.append(Finding(name, "info", str(error)))
        else:
            found.append(Finding(name, "ok", (kind.__doc__ or "").strip().split("\n")[0]))
    return found


def _models() -> list[Finding]:
    return [
        Finding(
            cached.model.alias,
            "ok" if cached.is_ready else "info",
            "cached" if cached.is_ready else f"{cached.state}: draftwood pull {cached.model.alias}",
        )
        for cached in packaged_models()
    ]


def _extras() -> list[Finding]:
    """Each extra of this package, and which of its packages are not installed."""
    wanted: dict[str, list[str]] = {}
    for line in packages.requires("draftwood") or []:
        if match := _REQUIREMENT.match(line):
            wanted.setdefault(match[2], []).append(match[1])
    found = []
    for extra, names in sorted(wanted.items()):
        missing = [name for name in names if _package(name).state == "missing"]
        how = f"{', '.join(missing)} not installed: run  pip install 'draftwood[{extra}]'"
        found.append(Finding(extra, "info" if missing else "ok", how if missing else "installed"))
    return found


def _used() -> list[Finding]:
    import torch

    cuda = torch.cuda.is_available()
    return [
        Finding("device", "ok", "cuda" if cuda else "cpu"),
        Finding("weights", "ok", "the model's own type" if cuda else _cpu_weights()),
        Finding("drafter", "ok", "auto, with the draft model when --draft is given"),
    ]


def _cpu_weights() -> str:
    from draftwood.kernels import why_unavailable
    from draftwood.models.load import INT8_FROM_PARAMETERS

    if why_unavailable():
        return "float32"
    return f"float32; int8 from {INT8_FROM_PARAMETERS / 1e6:.0f} M parameters on"


_SECTIONS: dict[str, Callable[[], list[Finding]]] = {
    "Software": _software,
    "Machine": _machine,
    "Speed": _speed,
    "Drafters": _drafters,
    "Models": _models,
    "Extras": _extras,
    "Used unless told otherwise": _used,
}
