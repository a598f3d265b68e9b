"""`draftwood bench serve`: a server under load, with and without speculation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.bench.options import Out, whole_numbers
from draftwood.bench.output import print_json
from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from draftwood.bench.data import BenchPrompt
    from draftwood.bench.serve import LoadPlan

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
    overhead: Annotated[
        bool,
        typer.Option(
            help="Instead of load: MODEL's texts in process and over HTTP in turns, one at a time.",
        ),
    ] = False,
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

    So many clients ask at a time. A MODEL is served twice, with and without speculation, and blocks
    of either take turns; a URL is asked for both. --data with many prompts (Spec-Bench's) keeps
    drafters from meeting texts again.
    """
    from draftwood.bench.data import load_prompts
    from draftwood.bench.serve import LoadPlan

    clients = tuple(whole_numbers("concurrency", concurrency, 1))
    prompts = load_prompts(data, limit)
    source = {"data": data.name if data else "packaged", "num_prompts": len(prompts)}
    if overhead:
        _overhead(target, prompts, max_tokens, blocks, source, out, as_json)
        return
    plan = LoadPlan(
        concurrency=clients,
        num_requests=requests,
        num_blocks=blocks,
        max_tokens=max_tokens,
        temperature=temperature,
        compare=compare,
    )
    _load(target, prompts, plan, api_key, server_option or [], source, out, as_json)


def _load(
    target: str,
    prompts: Sequence[BenchPrompt],
    plan: LoadPlan,
    api_key: str | None,
    options: list[str],
    source: dict[str, Any],
    out: Path | None,
    as_json: bool,
) -> None:
    from draftwood.bench.fingerprint import environment
    from draftwood.bench.records import open_writer
    from draftwood.bench.serve import measure
    from draftwood.bench.sse import Target
    from draftwood.bench.tables import console, load_table

    with open_writer(out) as writer, _urls(target, options, plan) as (url, plain):
        facts = {"target": "url" if url == target else target, "server_options": options}
        writer.write(
            {"type": "fingerprint", "environment": environment()} | facts | source | asdict(plan)
        )
        load = measure(
            Target.of(url, api_key),
            prompts,
            plan,
            lambda record: writer.write(record.to_json()),
            None if plain is None else Target.of(plain, api_key),
        )
        lines = [*(one.to_json() for one in load.points), *(one.to_json() for one in load.ratios)]
        for line in lines:
            writer.write(line)
    if as_json:
        print_json(lines)
        return
    console().print(load_table(load))


def _overhead(
    target: str,
    prompts: Sequence[BenchPrompt],
    max_tokens: int,
    num_rounds: int,
    source: dict[str, Any],
    out: Path | None,
    as_json: bool,
) -> None:
    """The measurement of `--overhead`."""
    if "://" in target:
        raise ConfigError("--overhead is for a MODEL: it generates in process, too")
    from draftwood.bench.fingerprint import environment, model_facts
    from draftwood.bench.records import open_writer
    from draftwood.bench.serve_overhead import measure
    from draftwood.bench.tables import console, overhead_table
    from draftwood.cli.loading import load
    from draftwood.cli.options import ModelOptions
    from draftwood.cli.serve import need_extra

    need_extra()
    with open_writer(out) as writer, load(ModelOptions(model=target)) as llm:
        facts = {"model": model_facts(llm.model.spec), "max_tokens": max_tokens}
        writer.write({"type": "fingerprint", "environment": environment()} | facts | source)
        overhead = measure(
            llm,
            prompts,
            max_tokens=max_tokens,
            num_rounds=num_rounds,
            watch=lambda pair: writer.write(pair.to_json()),
        )
        writer.write(overhead.to_json())
    if as_json:
        print_json([overhead.to_json()])
        return
    console().print(overhead_table(overhead))


@contextmanager
def _urls(target: str, options: list[str], plan: LoadPlan) -> Iterator[tuple[str, str | None]]:
    """The server's URL, and that of one without speculation; a model gets servers meanwhile."""
    from draftwood.bench.served import served
    from draftwood.cli.options import is_nothing
    from draftwood.models.sources import resolve

    if "://" in target:
        if options:
            raise ConfigError("--server-option is for a MODEL: this server runs already")
        yield target, None
        return
    if is_nothing(target):
        resolve(target)  # says what there is
    model = os.path.expanduser(target)
    # What is given comes later on the command line, and so counts.
    options = [f"--max-num-seqs={max(plan.concurrency)}", *options]
    with ExitStack() as stack:
        url = stack.enter_context(served(model, options))
        plain = [*options, "--no-speculation"]
        yield url, stack.enter_context(served(model, plain)) if plan.compare else None
