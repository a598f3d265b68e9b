"""From a name to a folder: aliases, folders, GGUF files, the hub. Nothing here needs a network."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors

from draftwood.errors import CapacityError, ConfigError, DownloadError, ModelError
from draftwood.models import hub, sources
from draftwood.models.packaged import PackagedModel
from draftwood.models.sources import resolve

pytestmark = pytest.mark.usefixtures("root")


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
    path = folder / changed
    # Of weights only the start is read: the end changes, and only the time of the file tells.
    large = 2_000_000 if changed == "model.safetensors" else 0
    path.write_bytes(bytes(large) + b"old")
    before = resolve(str(folder)).fingerprint
    path.write_bytes(bytes(large) + b"new")
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
