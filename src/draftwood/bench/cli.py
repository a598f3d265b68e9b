"""`draftwood bench`: measurements, for a person and as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.bench.batch_cli import batch
from draftwood.bench.check_cli import check
from draftwood.bench.diff_cli import diff
from draftwood.bench.kv_cli import kv
from draftwood.bench.mlperf_cli import mlperf
from draftwood.bench.options import Device, Dtype, Model, Out, Quantization, Threads
from draftwood.bench.peer_cli import peers
from draftwood.bench.ray_cli import ray
from draftwood.bench.report_cli import report
from draftwood.bench.serve_cli import serve
from draftwood.bench.spec_cli import spec
from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from draftwood.bench.compare import Comparison, Skip, Watch
    from draftwood.bench.data import BenchPrompt
    from draftwood.bench.records import Writer
    from draftwood.llm import LLM

app = typer.Typer(
    help="Measure speed on this machine.", no_args_is_help=True, rich_markup_mode="rich"
)


def _example(arguments: str) -> str:
    """The end of a command's help."""
    return f"[bold]Example:[/bold] draftwood bench {arguments}"


@app.callback()
def _main() -> None:
    """Measure speed on this machine."""


@app.command(epilog=_example("compare smollm2-135m --limit 6 --out result.jsonl"))
def compare(
    model: Model,
    draft: Annotated[
        str | None, typer.Option(help="A smaller model for the drafters auto and model.")
    ] = None,
    drafters: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: none, suffix, recycling, lookup, auto, model, random, oracle.",
            show_default="none,suffix,recycling,lookup,auto; and model with --draft",
        ),
    ] = None,
    transformers: Annotated[
        bool, typer.Option(help="transformers.generate takes part (greedy only).")
    ] = True,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Prompts: JSON lines of ours, Spec-Bench or HumanEval, or a text a line.",
            show_default="30 packaged prompts",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts, spread over the kinds.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the noise, when sampled.")] = 0,
    dtype: Dtype = None,
    quantization: Quantization = None,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Compare ways to decode: transformers, plain, and with each drafter.

    All take turns at the same prompts in one process. Shown are speeds, ratios to plain decoding, how much of what was drafted came true, where the time went, and whether every text is that of plain decoding. Ctrl-C ends early and shows what was measured until then.
    """  # noqa: E501
    from draftwood.bench.compare import make_comparison
    from draftwood.bench.data import load_prompts
    from draftwood.bench.records import open_writer
    from draftwood.sampling import SamplingParams

    _set_threads(threads)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    names = _drafter_names(drafters, draft)
    prompts = load_prompts(data, limit)
    with open_writer(out) as writer:
        llm = _load(
            model,
            draft=draft,
            dtype=dtype,
            device=device,
            quantization=quantization,
        )
        comparison = make_comparison(llm, model, names, params, transformers=transformers)
        source = {"source": data.name if data else "packaged", "count": len(prompts)}
        facts = {"params": asdict(params), "prompts": source, "drafters": names}
        writer.write(_fingerprint(llm, "compare", **facts))
        summary = _run(comparison, prompts, writer)
    _show(summary, as_json)
    if comparison.interrupted:
        raise typer.Exit(130)


@app.command(epilog=_example("cost smollm2-135m --contexts 64,1024 --plot cost.png"))
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the points as JSON.")] = False,
) -> None:
    """Measure what verifying n tokens costs, against one: the price of a tree."""
    from draftwood.bench import cost as measuring
    from draftwood.bench.records import open_writer
    from draftwood.bench.tables import console, cost_table

    _set_threads(threads)
    lengths, sizes = _numbers("contexts", contexts, 0), _numbers("rows", rows, 1)
    if plot is not None:
        measuring.plotting()
    with open_writer(out) as writer:
        llm = _load(model, dtype=dtype, device=device, quantization=quantization)
        writer.write(_fingerprint(llm, "cost", repeats=repeats))
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
        _print_json([point.to_json() for point in points])
    else:
        console().print(cost_table(points))


@app.command(epilog=_example("quality smollm2-135m --quantization int8"))
def quality(
    model: Model,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A text to read; may be given again.", show_default="three texts"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens read of each text.", min=2)] = 700,
    limit: Annotated[int, typer.Option(help="Packaged prompts in the default text.")] = 20,
    quantization: Annotated[str, typer.Option(help="The form to test.")] = "int8",
    threads: Threads = None,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure what a quantisation costs: perplexity and divergence against float32."""
    from draftwood.bench import quality as measuring
    from draftwood.bench.records import open_writer
    from draftwood.bench.tables import console, quality_table
    from draftwood.models.known_quality import KnownQuality, remember
    from draftwood.models.load import Placement, load_model
    from draftwood.models.progress import shown_progress

    _set_threads(threads)
    with open_writer(out) as writer:
        llm = _load(model, quantization=quantization)
        cpu = llm.model.spec.device
        with shown_progress() as progress:
            reference, _, _ = load_model(model, Placement(cpu, quantization="none"), progress)
        writer.write(_fingerprint(llm, "quality", max_tokens=max_tokens))
        results = measuring.compare(
            llm.model, reference, llm.tokenizer, measuring.texts(text or [], limit), max_tokens
        )
        rows = [
            {"type": "quality", **asdict(r), "perplexity_change": r.perplexity_change}
            for r in results
        ]
        for row in rows:
            writer.write(row)
    if not text:
        worst = max(results, key=lambda one: one.divergence)
        change = max((one.perplexity_change for one in results), key=abs)
        remember(llm.model.spec, KnownQuality(worst.divergence, change))
    if as_json:
        _print_json(rows)
    else:
        console().print(quality_table(rows))


app.command(epilog=_example("peers qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b"))(peers)
app.command(epilog=_example("batch smollm2-135m --concurrency 1,4"))(batch)
app.command(epilog=_example("kv smollm2-135m --tokens 500"))(kv)
app.command(epilog=_example("ray smollm2-135m --replicas 1,2"))(ray)
app.command(epilog=_example("serve smollm2-135m --concurrency 1,8 --out load.jsonl"))(serve)
app.command(epilog=_example("spec smollm2-135m --data question.jsonl --out spec.jsonl"))(spec)
app.command(epilog=_example("mlperf smollm2-135m --limit 6 --out mlperf"))(mlperf)
app.command(epilog=_example("report compare.jsonl cost.jsonl --out report.html"))(report)
app.command(epilog=_example("check README.md docs/benchmarks.md"))(check)
app.command(epilog=_example("diff before.jsonl after.jsonl"))(diff)


def _numbers(option: str, text: str, least: int) -> list[int]:
    """A comma-separated list of whole numbers."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}: give whole numbers, like 1,2,4") from error
    if min(numbers) < least:
        raise ConfigError(f"{option} holds {min(numbers)}: the least is {least}")
    return numbers


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is None:
        return
    if threads < 1:
        raise ConfigError(f"threads is {threads}: it must be at least 1")
    torch.set_num_threads(threads)


def _drafter_names(drafters: str | None, draft: str | None) -> list[str]:
    from draftwood.draft.base import drafter_names

    if drafters is None:
        return ["none", "suffix", "recycling", "lookup", "auto", *(["model"] if draft else [])]
    names = [name.strip() for name in drafters.split(",") if name.strip()]
    known = {*drafter_names(), "random", "oracle"}
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown drafter {name!r}: known are {', '.join(sorted(known))}")
    if "model" in names and draft is None:
        raise ConfigError("drafter 'model' needs a draft model: give --draft")
    return names


def _load(
    model: str,
    *,
    draft: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    quantization: str | None = None,
) -> LLM:
    from draftwood.llm import LLM
    from draftwood.models.progress import shown_progress

    with shown_progress() as progress:
        return LLM(
            model,
            draft=draft,
            drafter=None if draft else "none",
            dtype=dtype,
            device=device,
            quantization=quantization,
            progress=progress,
        )


def _fingerprint(llm: LLM, command: str, **facts: Any) -> dict[str, Any]:
    from draftwood.bench.fingerprint import environment, model_facts

    return {
        "type": "fingerprint",
        "command": command,
        "model": model_facts(llm.model.spec),
        "draft_model": model_facts(llm.draft_model.spec) if llm.draft_model else None,
        "config": asdict(llm.config),
        **facts,
        "environment": environment(),
    }


def _run(comparison: Comparison, prompts: Sequence[BenchPrompt], writer: Writer) -> dict[str, Any]:
    from draftwood.bench.records import RunRecord
    from draftwood.bench.summary import summarise

    def on_record(result: RunRecord | Skip) -> None:
        if isinstance(result, RunRecord):
            writer.write(result.to_json())
        else:
            writer.write({"type": "skip", **asdict(result)})

    with _progress(len(prompts) * len(comparison.contenders)) as watch:
        comparison.start(prompts, on_record, watch)
    contenders = summarise(comparison.records)
    for contender in comparison.contenders:
        if contender.name in contenders:
            contenders[contender.name]["view"] = contender.view()
    summary = {
        "type": "summary",
        "interrupted": comparison.interrupted,
        "skipped": [asdict(skip) for skip in comparison.skipped],
        "contenders": contenders,
    }
    writer.write(summary)
    return summary


@contextmanager
def _progress(total: int) -> Iterator[Watch]:
    """A bar on stderr while it is a terminal."""
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description:32}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with bars.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as display:
        task = display.add_task("warming up", total=total)
        started = False

        def watch(prompt: str, contender: str) -> None:
            nonlocal started
            display.update(task, description=f"{prompt}: {contender}", advance=int(started))
            started = True

        yield watch


def _show(summary: dict[str, Any], as_json: bool) -> None:
    from draftwood.bench.tables import comparison_tables, console

    if as_json:
        _print_json(summary)
    else:
        console().print(comparison_tables(summary))


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
