"""`draftwood archive`: a model as TorchServe takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwood.cli import options as opt

Out = Annotated[
    Path, typer.Option("--out", "-o", metavar="FILE.mar", help="Where to; its name is the model's.")
]
Include = Annotated[
    bool,
    typer.Option("--include-weights", help="Put the folder's files into the archive."),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Most requests of one packed run.")]
BatchDelay = Annotated[
    int, typer.Option(min=0, metavar="MS", help="How long TorchServe waits for them.")
]


def archive(
    model: opt.ModelName,
    out: Out,
    include_weights: Include = False,
    batch_size: BatchSize = 8,
    batch_delay: BatchDelay = 20,
    draft: opt.Draft = None,
    quantization: opt.Quantization = None,
    max_model_len: opt.MaxModelLen = None,
    kv_disk: opt.KVDisk = None,
) -> None:
    """Make a .mar archive for TorchServe. Nothing is loaded or downloaded."""
    model_options = opt.ModelOptions(
        model=model,
        draft=draft,
        quantization=quantization,
        max_model_len=max_model_len,
        kv_disk=kv_disk,
    )
    from draftwood.deploy.torchserve import ArchiveOptions, write_archive

    given = {
        "draft": model_options.draft,
        "quantization": model_options.quantization,
        "max_model_len": model_options.max_model_len,
        "kv_disk": model_options.kv_disk,
    }
    llm = {name: value for name, value in given.items() if value is not None}
    options = ArchiveOptions(batch_size=batch_size, max_batch_delay_ms=batch_delay, llm=llm)
    typer.echo(write_archive(model, out, options, include=include_weights))
