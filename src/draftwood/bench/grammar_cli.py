"""`draftwood bench grammar`: what structured output costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.bench.options import (
    AsJson,
    Data,
    Device,
    Draft,
    Dtype,
    Limit,
    Model,
    Out,
    Quantization,
    Threads,
    drafter_list,
    load_llm,
    use_threads,
)
from draftwood.bench.output import print_json, progress_bar
from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from draftwood.bench.grammar import GrammarSummary


def grammar(
    model: Model,
    draft: Draft = None,
    drafters: Annotated[
        str, typer.Option(help="Comma-separated; plain decoding takes part by itself.")
    ] = "auto",
    schema: Annotated[
        Path | None,
        typer.Option(help="A JSON schema.", show_default="a table of names, texts and years"),
    ] = None,
    data: Data = None,
    limit: Limit = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of a text.", min=8)] = 96,
    dtype: Dtype = None,
    quantization: Quantization = None,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a grammar costs: time a token of JSON, over that of free text of that length.

    Without --data the prompts are twelve questions for a table as JSON.
    """
    from draftwood.bench import grammar as measuring
    from draftwood.bench.data import load_prompts, spread
    from draftwood.bench.fingerprint import head_line
    from draftwood.bench.records import open_writer
    from draftwood.bench.tables import console

    use_threads(threads)
    names = drafter_list(drafters, draft)
    form = measuring.SCHEMA if schema is None else _read(schema)
    prompts = load_prompts(data) if data else measuring.table_prompts()
    prompts = prompts if limit is None else spread(prompts, limit)
    with open_writer(out) as writer:
        llm = load_llm(model, draft=draft, dtype=dtype, device=device, quantization=quantization)
        source = {"source": data.name if data else "tables", "count": len(prompts)}
        facts = {"params": {"max_tokens": max_tokens}, "prompts": source, "schema": form}
        writer.write(head_line(llm, "grammar", drafters=names, **facts))
        with progress_bar(2 * len({"none", *names}) * len(prompts)) as watch:
            runs = measuring.measure(
                llm, names, prompts, form, max_tokens, lambda r: writer.write(r.to_json()), watch
            )
        lines = measuring.summarise(runs)
        for line in lines:
            writer.write(line.to_json())
    if as_json:
        print_json([line.to_json() for line in lines])
    else:
        console().print(_table(lines))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a JSON schema: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON schema: that is an object")
    return found


def _table(lines: Sequence[GrammarSummary]) -> RenderableType:
    from rich.table import Table

    from draftwood.bench.tables import interval_cells, titled

    table = Table()
    table.add_column("", no_wrap=True)
    columns = ("free ms", "grammar ms", "x a token", "95 %", "x a round", "95 %", "in form", "same")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            line.drafter,
            f"{line.free_ms:.1f}",
            f"{line.grammar_ms:.1f}",
            *interval_cells(line.per_token),
            *interval_cells(line.per_round),
            f"{line.num_in_form} of {line.num_prompts}",
            f"{line.num_identical} of {line.num_compared}" if line.num_compared else "",
        )
    return titled("A grammar's price: time a token and a round, over free text's", table)
