"""Compiling: once, from several processes, and the ways it can fail without an exception."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from draftwood.kernels import build


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path))
    monkeypatch.delenv("DRAFTWOOD_KERNELS", raising=False)
    monkeypatch.setattr(build, "_outcome", None)


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_compiles_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    messages: list[str] = []
    if build.load(messages.append) is None:
        pytest.skip(str(build.why_unavailable()))
    assert len(messages) == 1
    assert build.why_unavailable() is None
    monkeypatch.setattr(build, "_outcome", None)
    assert build.load(messages.append) is not None
    assert len(messages) == 1
    assert [file.suffix for file in (tmp_path / "kernels").iterdir()] == [".so"]


def test_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_KERNELS", "0")
    assert build.load() is None
    assert "DRAFTWOOD_KERNELS=0" in str(build.why_unavailable())


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.load() is None
    assert "no-such-compiler" in str(build.why_unavailable())


@pytest.mark.parametrize(
    "body",
    [
        "echo 'cpu.cpp:1: error: nothing works' >&2; exit 1",  # fails
        "exit 0",  # succeeds without a result
        "kill -9 $$",
    ],
)
def test_broken_compiler(body: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that answers --version and then fails, does nothing, or dies."""
    text = f'#!/bin/sh\nif [ "$1" = --version ]; then echo fake; exit 0; fi\n{body}\n'
    monkeypatch.setenv("CXX", script(tmp_path / "fake", text))
    assert build.load() is None
    assert "cannot be built" in str(build.why_unavailable())
    assert not list((tmp_path / "kernels").iterdir())


def test_a_damaged_result_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file that was cut short stayed in the cache and turned the kernels off for good."""
    fake = '#!/bin/sh\nif [ "$1" = --version ]; then exec g++ --version; fi\n'
    fake += 'for last; do :; done\necho "not a library" > "$last"\necho >> "$0.calls"\n'
    monkeypatch.setenv("CXX", script(tmp_path / "fake", fake))
    assert build.load() is None
    assert "cannot be built" in str(build.why_unavailable())
    calls = (tmp_path / "fake.calls").read_text().count("\n")
    assert calls == 4  # compiled and linked twice


def test_two_processes_at_once(tmp_path: Path) -> None:
    code = "from draftwood.kernels import load, why_unavailable\nload()\nprint(why_unavailable())"
    command = [sys.executable, "-W", "error", "-c", code]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=120)[0] for process in running]
    assert answers[0] == answers[1]
