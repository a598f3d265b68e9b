"""`draftwood bench beams`: beam search beside transformers'."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from draftwood.bench.options import (
    AsJson,
    Data,
    Device,
    Dtype,
    Limit,
    Model,
    Out,
    Threads,
    load_llm,
    use_threads,
)
from draftwood.bench.output import print_json, progress_bar

if TYPE_CHECKING:
    from rich.console import RenderableType

    from draftwood.bench.beams import BeamSummary


def beams(
    model: Model,
    num_beams: Annotated[int, typer.Option("--beams", help="How many.", min=2)] = 4,
    data: Data = None,
    limit: Limit = 12,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", min=2)] = 48,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure beam search beside transformers': same weights, dtype and prompts, in turns.

    Shown is how many times as long transformers takes, and in how many prompts the best texts are the same.
    """  # noqa: E501
    from draftwood.bench import beams as measuring
    from draftwood.bench.data import load_prompts
    from draftwood.bench.fingerprint import head_line
    from draftwood.bench.records import open_writer
    from draftwood.bench.tables import console
    from draftwood.models.sources import resolve
    from draftwood.sampling import SamplingParams

    use_threads(threads)
    params = SamplingParams(max_tokens=max_tokens, num_beams=num_beams)
    prompts = load_prompts(data, limit)
    with open_writer(out) as writer:
        llm = load_llm(model, dtype=dtype, device=device, quantization="none")
        both = measuring.Beams.load(llm, resolve(model), params)
        source = {"source": data.name if data else "packaged", "count": len(prompts)}
        writer.write(head_line(llm, "beams", params=asdict(params), prompts=source))
        taken = [
            measuring.BeamPrompt(prompt.id, prompt.kind, prompt.encode(llm.tokenizer))
            for prompt in prompts
        ]
        with progress_bar(2 * len(taken)) as watch:
            runs = both.measure(taken, lambda run: writer.write(run.to_json()), watch)
        summary = measuring.summarise(runs, num_beams)
        writer.write(summary.to_json())
    if as_json:
        print_json(summary.to_json())
    else:
        console().print(_table(summary))


def _table(summary: BeamSummary) -> RenderableType:
    from rich.table import Table

    from draftwood.bench.tables import interval_cells, titled

    table = Table()
    for column in ("", "tokens/s", "times transformers", "95 %", "worst", "same texts"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_row("transformers", f"{summary.transformers_tokens_per_s:.1f}", "1.00", "", "", "")
    table.add_row(
        "draftwood",
        f"{summary.tokens_per_s:.1f}",
        *interval_cells(summary.ratio),
        f"{summary.worst:.2f}",
        f"{summary.num_identical} of {summary.num_prompts}",
    )
    return titled(f"Beam search with {summary.num_beams} beams (medians over prompts)", table)
