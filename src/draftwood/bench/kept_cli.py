"""`draftwood bench checkpoints`: what they cost a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwood.bench.options import Out, whole_numbers
from draftwood.bench.output import print_json
from draftwood.errors import ConfigError


def checkpoints(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="As `draftwood serve` takes it.", show_default=False),
    ],
    concurrency: Annotated[str, typer.Option(help="Clients at a time, comma-separated.")] = "1,8",
    every: Annotated[float, typer.Option(help="Seconds between two checkpoints.")] = 5.0,
    requests: Annotated[int, typer.Option(help="Texts in a block.", min=1)] = 8,
    pairs: Annotated[int, typer.Option(help="Blocks of each server, in turns.", min=1)] = 5,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=1)] = 64,
    data: Annotated[
        Path | None,
        typer.Option(help="Prompts, as `bench compare` takes them.", show_default="30 packaged"),
    ] = None,
    server_option: Annotated[
        list[str] | None,
        typer.Option(
            help="Passed to both servers: --server-option=--no-speculation; may be repeated.",
            show_default=False,
        ),
    ] = None,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure what checkpoints cost while serving.

    Two servers, with and without, take turns under the same load.
    """
    from draftwood.bench import kept
    from draftwood.bench.data import load_prompts
    from draftwood.bench.fingerprint import environment
    from draftwood.bench.records import open_writer
    from draftwood.bench.serve import LoadPlan
    from draftwood.bench.tables import console, kept_table

    if not every > 0:
        raise ConfigError(f"every is {every}: it must be a number of seconds above 0")
    clients = tuple(whole_numbers("concurrency", concurrency, 1))
    plan = LoadPlan(
        concurrency=clients,
        num_requests=requests,
        num_blocks=pairs,
        max_tokens=max_tokens,
        compare=False,
    )
    options = server_option or []
    with open_writer(out) as writer:
        facts = {"target": model, "server_options": options, "every_s": every}
        writer.write(
            {"type": "fingerprint", "command": "checkpoints", "environment": environment()} | facts
        )
        found = kept.measure(
            model,
            options,
            load_prompts(data),
            plan,
            every,
            lambda pair: writer.write(pair.to_json()),
        )
        summaries = [kept.summary(found, number) for number in clients]
        for line in summaries:
            writer.write(line)
    if as_json:
        print_json(summaries)
        return
    console().print(kept_table(summaries))
