"""`draftwood bench cost`: what verifying costs."""

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
    whole_numbers,
)
from draftwood.bench.output import print_json


def cost(
    model: Model,
    contexts: Annotated[
        str, typer.Option(help="Tokens before the tree, comma-separated.")
    ] = "64,512,1024",
    rows: Annotated[
        str, typer.Option(help="Rows to verify, comma-separated; 1 is among them.")
    ] = "1,2,3,4,5,6,8,10,12,16,20,24,32,40,48,56,64",
    repeats: Annotated[int, typer.Option(help="Measurements of each.", min=1)] = 9,
    dtype: Dtype = None,
    quantization: Quantization = None,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what verifying n tokens costs, against one: the price of a tree."""
    from draftwood.bench import cost as measuring
    from draftwood.bench.fingerprint import head_line
    from draftwood.bench.records import open_writer
    from draftwood.bench.tables import console, cost_table

    use_threads(threads)
    lengths, sizes = whole_numbers("contexts", contexts, 0), whole_numbers("rows", rows, 1)
    if plot is not None:
        measuring.plotting()
    with open_writer(out) as writer:
        llm = load_llm(model, dtype=dtype, device=device, quantization=quantization)
        writer.write(head_line(llm, "cost", repeats=repeats))
        points = measuring.measure(
            llm.model,
            llm.pool,
            lengths,
            sorted({1, *sizes}),
            repeats,
            lambda point: writer.write(point.to_json()),
        )
    if plot is not None:
        spec = llm.model.spec
        measuring.plot(points, plot, f"{spec.name}, {str(spec.dtype).removeprefix('torch.')}")
    if as_json:
        print_json([point.to_json() for point in points])
    else:
        console().print(cost_table(points))
