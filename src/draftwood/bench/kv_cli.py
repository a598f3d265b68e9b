"""`draftwood bench kv`: what a known prefix saves, by where its KV is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwood.bench.options import (
    AsJson,
    Device,
    Dtype,
    Model,
    Out,
    Quantization,
    Threads,
    load_llm,
    use_threads,
)
from draftwood.bench.output import print_json
from draftwood.errors import ConfigError


def kv(
    model: Model,
    tokens: Annotated[int, typer.Option(help="Length of the prefix.", min=1)] = 2000,
    repeats: Annotated[int, typer.Option(help="Measurements of each.", min=1)] = 3,
    disk: Annotated[
        Path | None,
        typer.Option(help="A folder on the disk to measure.", show_default="the temporary folder"),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            help="URL of a Redis server.", show_default="start redis-server, if installed"
        ),
    ] = None,
    compressions: Annotated[
        str, typer.Option(help="Of the stores, comma-separated: none, zstd, fp16, int8.")
    ] = "none",
    dtype: Dtype = None,
    quantization: Quantization = None,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure the time to the first token of a prefix: computed, from RAM, disk and Redis.

    Files are pushed out of the system's memory before they are read, where the system can do that. The floor is the time that reading the same bytes takes alone.
    """  # noqa: E501
    from draftwood.bench import kv as measuring
    from draftwood.bench.fingerprint import head_line
    from draftwood.bench.records import open_writer
    from draftwood.bench.tables import console, kv_table
    from draftwood.kv.tiers import check_compression

    if disk is not None and not disk.is_dir():
        raise ConfigError(f"disk is {str(disk)!r}, which is no folder: name one that is there")
    forms = [check_compression(name.strip()) for name in compressions.split(",")]
    use_threads(threads)
    with open_writer(out) as writer:
        llm = load_llm(model, dtype=dtype, device=device, quantization=quantization)
        writer.write(head_line(llm, "kv", repeats=repeats, num_tokens=tokens))
        points, missing = measuring.measure(
            llm,
            tokens,
            repeats,
            lambda point: writer.write(point.to_json()),
            compressions=forms,
            disk=disk,
            redis=redis,
        )
    if as_json:
        print_json([point.to_json() for point in points])
        return
    console().print(kv_table(points))
    for line in missing:
        print(f"not measured: {line}")
