"""`draftwood bench serve`: a server under load, with and without speculation."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from draftwood.bench.options import Out, whole_numbers
from draftwood.bench.output import print_json
from draftwood.errors import ConfigError

_Target = Annotated[
    str,
    typer.Argument(
        metavar="URL|MODEL",
        help="A running server, http://host:port; or a model, which is then served for it.",
        show_default=False,
    ),
]


def serve(
    target: _Target,
    concurrency: Annotated[
        str, typer.Option(help="Clients at a time, comma-separated.")
    ] = "1,2,4,8,16,32",
    requests: Annotated[int, typer.Option(help="Texts in a block.", min=1)] = 16,
    blocks: Annotated[int, typer.Option(help="Blocks of each mode, in turns.", min=1)] = 3,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0, max=2)] = 0.0,
    compare: Annotated[
        bool,
        typer.Option(
            help="With and without speculation; --no-compare sends no field that others refuse."
        ),
    ] = True,
    data: Annotated[
        Path | None,
        typer.Option(help="Prompts, as `bench compare` takes them.", show_default="30 packaged"),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts, spread over the kinds.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="For a server that wants one.", show_default=False)
    ] = None,
    server_option: Annotated[
        list[str] | None,
        typer.Option(
            help="Passed to `draftwood serve MODEL`: --server-option=--max-num-seqs=8; may be "
            "repeated.",
            show_default=False,
        ),
    ] = None,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the points as JSON.")] = False,
) -> None:
    """Measure a server under load: first token, time between tokens, tokens a second.

    So many clients ask at a time. Blocks with and without speculation take turns, and no prompt comes twice.
    """  # noqa: E501
    from draftwood.bench.data import load_prompts
    from draftwood.bench.fingerprint import environment
    from draftwood.bench.records import open_writer
    from draftwood.bench.serve import LoadPlan, measure
    from draftwood.bench.sse import Target
    from draftwood.bench.tables import console, load_table

    clients = tuple(whole_numbers("concurrency", concurrency, 1))
    prompts = load_prompts(data, limit)
    plan = LoadPlan(
        concurrency=clients,
        num_requests=requests,
        num_blocks=blocks,
        max_tokens=max_tokens,
        temperature=temperature,
        compare=compare,
    )
    with open_writer(out) as writer, _url(target, server_option or []) as url:
        facts = {"target": "url" if url == target else target, "server_options": server_option}
        writer.write({"type": "fingerprint", "command": "serve", **environment(), **facts})
        points = measure(
            Target.of(url, api_key), prompts, plan, lambda record: writer.write(record.to_json())
        )
        for point in points:
            writer.write(point.to_json())
    if as_json:
        print_json([point.to_json() for point in points])
        return
    console().print(load_table(points))


def _url(target: str, options: list[str]) -> AbstractContextManager[str]:
    """The server's URL; a model gets a server of its own meanwhile."""
    from draftwood.bench.serve import served
    from draftwood.cli.options import is_nothing
    from draftwood.models.sources import resolve

    if "://" in target:
        if options:
            raise ConfigError("--server-option is for a MODEL: this server runs already")
        return nullcontext(target)
    if is_nothing(target):
        resolve(target)  # says what there is
    return served(os.path.expanduser(target), options)
