"""`draftwood bench ray`: one process against replicas and draft actors."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from draftwood.bench.options import Out, whole_numbers
from draftwood.bench.output import print_json
from draftwood.errors import MissingExtraError


def ray(
    model: Annotated[str, typer.Argument(help="What to serve.", show_default=False)],
    replicas: Annotated[str, typer.Option(help="Numbers of replicas, comma-separated.")] = "1,2",
    draft: Annotated[
        str | None,
        typer.Option(help="A draft model: in the replicas and, in turns, in an actor."),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Clients at a time, comma-separated.")] = "8",
    requests: Annotated[int, typer.Option(help="Texts in a block.", min=1)] = 16,
    blocks: Annotated[int, typer.Option(help="Blocks of each layout, in turns.", min=1)] = 3,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=1)] = 48,
    limit: Annotated[int | None, typer.Option(help="Prompts, spread over the kinds.")] = None,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the points as JSON.")] = False,
) -> None:
    """Measure tokens a second of one process, of replicas on Ray and of draft actors, in turns."""
    if find_spec("ray") is None:
        raise MissingExtraError("ray", "ray")
    from draftwood.bench import ray as measuring
    from draftwood.bench.data import load_prompts
    from draftwood.bench.fingerprint import environment
    from draftwood.bench.records import open_writer
    from draftwood.bench.serve import LoadPlan
    from draftwood.bench.tables import console, layout_table

    plan = LoadPlan(
        concurrency=tuple(whole_numbers("concurrency", concurrency, 1)),
        num_requests=requests,
        num_blocks=blocks,
        max_tokens=max_tokens,
    )
    options = measuring.layouts(whole_numbers("replicas", replicas, 1), draft)
    with open_writer(out) as writer:
        facts = {"model": {"name": model, "dtype": "as served"}, "layouts": options}
        machine = {"environment": environment()}
        writer.write({"type": "fingerprint", "command": "ray", **facts, **machine})
        points = measuring.compare(
            model,
            options,
            load_prompts(None, limit),
            plan,
            lambda name, point: writer.write({**point.to_json(), "layout": name}),
        )
        for point in points:
            writer.write(point.to_json())
    if as_json:
        print_json([point.to_json() for point in points])
        return
    console().print(layout_table(points))
