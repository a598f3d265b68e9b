"""From what a user writes to a folder that transformers loads.

A name is tried as a packaged alias, a .gguf file, a folder, and a model on the Hugging Face hub, in
this order. A second resolve of the same name only looks at the disk: torch, transformers, gguf and
huggingface_hub are imported when there is work for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeAlias

from draftwood import cache
from draftwood.errors import ConfigError, ModelError, first_line
from draftwood.models.formats import CONVERTER_VERSION, QUANTISED_VERSION, Form
from draftwood.models.packaged import PACKAGED, pull
from draftwood.models.progress import Progress, silent

Kind: TypeAlias = Literal["packaged", "folder", "gguf", "hub"]

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies. `path` is a folder for `from_pretrained`.

    `fingerprint` changes when the weights, config or tokenizer do; use it in the keys of caches.
    Converted and hub models have the same one on every machine, folders only on theirs. `quantised`
    is the folder of the 8-bit or 4-bit weights, if the model was resolved in such a form.
    """

    name: str
    path: Path
    fingerprint: str
    kind: Kind
    quantised: Path | None = None


def resolve(
    name: str,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
    form: Form = "float32",
) -> ModelFiles:
    """The files of the model `name`: an alias, a .gguf file, a folder or a hub id.

    Downloads and converts what is not in the cache yet; `revision` is a hub branch, tag or commit.
    Raises ModelError if there is no such model or it is incomplete, DownloadError if fetching it
    failed, CapacityError if the disk is too small.
    """
    local = os.path.expanduser(name)
    if name in PACKAGED or os.path.exists(local):
        if revision is not None:
            raise ConfigError(f"revision is for models on the hub, and {name} is not one")
        return _local(name, Path(local).absolute(), progress or silent, form)
    return _in_form(_hub(name, revision, progress or silent), progress or silent, form)


def peek_config(name: str, *, revision: str | None = None, progress: Progress | None = None) -> Any:
    """The transformers config of the model `name`, before its weights are converted.

    Downloads what `resolve` would, and raises like it.
    """
    progress = progress or silent
    if name in PACKAGED:
        known = converted_folder(name)
        return _folder_config(name, known) if known else _gguf_config(pull(name, progress))
    local = Path(os.path.expanduser(name)).absolute()
    if local.is_file() and local.suffix.lower() == ".gguf":
        return _gguf_config(local)
    return _folder_config(name, resolve(name, revision=revision, progress=progress).path)


def converted_folder(alias: str) -> Path | None:
    """A folder in the cache made of a packaged model, in whatever form; None if there is none."""
    forms: tuple[Form, ...] = ("float32", "int8", "int4")
    folders = (_converted_path(alias, PACKAGED[alias].sha256, form) for form in forms)
    return next((folder for folder in folders if folder.exists()), None)


def _gguf_config(path: Path) -> Any:
    from draftwood.models.gguf_convert import load_config

    return load_config(path)


def _folder_config(name: str, folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as error:
        message = f"{name}: its config.json cannot be used ({first_line(error)})"
        raise ModelError(message) from error


def _local(name: str, path: Path, progress: Progress, form: Form) -> ModelFiles:
    if name in PACKAGED:
        return _packaged(name, progress, form)
    if path.is_dir():
        files = ModelFiles(name, path, _folder_fingerprint(path), "folder")
        return _in_form(files, progress, form)
    return _gguf(name, path, progress, form)


def _in_form(files: ModelFiles, progress: Progress, form: Form) -> ModelFiles:
    """The same files with quantised weights made of them, if such a form is wanted."""
    if form == "float32":
        return files
    from draftwood.models.quantised_convert import convert_folder

    identity = hashlib.sha256(files.fingerprint.encode()).hexdigest()[:16]
    target = cache.cache_dir() / form / f"{identity}-v{QUANTISED_VERSION[form]}"
    with cache.disk_errors(files.name, 0), cache.locked(f"{form}-{target.name}"):
        if not target.exists():
            convert_folder(files.path, target, files.name, form, progress)
    return replace(files, quantised=target)


def _packaged(alias: str, progress: Progress, form: Form) -> ModelFiles:
    sha256 = PACKAGED[alias].sha256
    path = _converted(alias, sha256, lambda: pull(alias, progress), progress, form)
    return _gguf_files(alias, path, sha256, "packaged", form)


def _gguf_files(name: str, path: Path, sha256: str, kind: Kind, form: Form) -> ModelFiles:
    quantised = None if form == "float32" else path
    return ModelFiles(name, path, f"gguf:{sha256}:{CONVERTER_VERSION}", kind, quantised)


def _gguf(name: str, path: Path, progress: Progress, form: Form) -> ModelFiles:
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{name} is a file, and only .gguf files and folders hold models")
    fingerprint = _file_sha256(path)
    label = re.sub(r"[^\w.-]", "-", path.stem)
    folder = _converted(label, fingerprint, lambda: path, progress, form)
    return _gguf_files(name, folder, fingerprint, "gguf", form)


def _converted(
    label: str, sha256: str, source: Callable[[], Path], progress: Progress, form: Form
) -> Path:
    """The folder in the cache made from the GGUF of `sha256`, which `source` brings if needed."""
    target = _converted_path(label, sha256, form)
    if target.exists():
        return target

    def waiting() -> None:
        progress(f"waiting for another process that unpacks {label}", 0, 0)

    gguf = source()
    with cache.disk_errors(label, 0), cache.locked(target.name, waiting):
        if not target.exists():
            _convert(gguf, target, label, progress, form)
    return target


def _converted_path(label: str, sha256: str, form: Form) -> Path:
    suffix = "" if form == "float32" else f"-{form}-v{QUANTISED_VERSION[form]}"
    return cache.cache_dir() / "models" / f"{label}-{sha256[:16]}-v{CONVERTER_VERSION}{suffix}"


def _convert(gguf: Path, target: Path, label: str, progress: Progress, form: Form) -> None:
    if form == "float32":
        from draftwood.models.gguf_convert import convert

        convert(gguf, target, label, progress)
    else:
        from draftwood.models.quantised_convert import convert_gguf

        convert_gguf(gguf, target, label, form, progress)


def _file_sha256(path: Path) -> str:
    """The hash of a file's content, remembered for as long as its size and time stay the same."""
    status = path.stat()
    state = [str(path), status.st_size, status.st_mtime_ns]
    note = cache.cache_dir() / "identities" / hashlib.sha256(str(path).encode()).hexdigest()
    known = _read_json(note)
    if isinstance(known, dict) and known.get("state") == state:
        return str(known["sha256"])
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    _write_note(note, {"state": state, "sha256": sha256})
    return sha256


def _write_note(note: Path, content: dict[str, Any]) -> None:
    with cache.disk_errors("a content hash", 4096):
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(content))
        os.replace(draft, note)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _folder_fingerprint(folder: Path) -> str:
    """Identity of a model folder; raises ModelError, naming what is missing, if it is none.

    Small files count with their content, weights with header, size and time: to read them whole
    would take longer than to load them.
    """
    digest = hashlib.sha256()
    for path in [*_small_files(folder), *_weight_files(folder)]:
        status = path.stat()
        digest.update(f"{path.name}:{status.st_size}:".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_READ_BYTES))
        if path.suffix in (".safetensors", ".bin"):
            digest.update(str(status.st_mtime_ns).encode())
    return f"folder:{digest.hexdigest()}"


def _small_files(folder: Path) -> list[Path]:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is no model folder: it has no config.json")
    return sorted(p for p in folder.glob("*.json") if p.is_file())


def _weight_files(folder: Path) -> list[Path]:
    """The weights of a folder, complete by its index. Raises ModelError naming what is missing."""
    for index in sorted(folder.glob("*.index.json")):
        named = set((_read_json(index) or {}).get("weight_map", {}).values())
        missing = sorted(file for file in named if not (folder / file).is_file())
        if missing:
            raise ModelError(f"{folder} is incomplete: {index.name} names {missing[0]}")
    for pattern in _WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            return found
    raise ModelError(f"{folder} has a config.json and no weights: it needs *.safetensors files")


def _hub(name: str, revision: str | None, progress: Progress) -> ModelFiles:
    unknown, close = _unknown(name), _close_alias(name)
    hint = f" (did you mean {close}?)" if close else ""
    if not _HUB_ID.fullmatch(name) or name.lower().endswith(".gguf"):
        raise ModelError(f"{unknown}{hint}")
    from draftwood.models.hub import snapshot

    folder = snapshot(name, revision, progress, f"{unknown}{hint}")
    _small_files(folder)
    _weight_files(folder)
    # The hub's cache names a snapshot's folder after its commit.
    return ModelFiles(name, folder, f"hub:{name}@{folder.name}", "hub")


def _unknown(name: str) -> str:
    return f"{name!r} is no packaged model ({', '.join(PACKAGED)}), no folder and no .gguf file"


def _close_alias(name: str) -> str | None:
    last = name.lower().rstrip("/").rpartition("/")[2]
    return next(iter(get_close_matches(last, PACKAGED, n=1)), None)
