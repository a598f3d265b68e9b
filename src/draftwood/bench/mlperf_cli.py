"""`draftwood bench mlperf`: MLPerf's LoadGen, plain against speculative."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
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
    Quantization,
    Threads,
    drafter_list,
    load_llm,
    use_threads,
)
from draftwood.bench.output import print_json
from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from draftwood.bench.data import BenchPrompt
    from draftwood.bench.mlperf_run import Plan, Result
    from draftwood.llm import LLM
    from draftwood.sampling import SamplingParams


def mlperf(
    model: Model,
    out: Annotated[Path, typer.Option(help="A folder for LoadGen's logs and record.jsonl.")] = Path(
        "mlperf"
    ),
    draft: Draft = None,
    drafters: Annotated[str, typer.Option(help="Comma-separated.")] = "none,auto",
    scenarios: Annotated[
        str, typer.Option(help="Comma-separated.")
    ] = "Offline,SingleStream,Server",
    modes: Annotated[str, typer.Option(help="Comma-separated.")] = "performance,accuracy",
    data: Data = None,
    kind: Annotated[
        str | None, typer.Option(help="Only prompts of this kind, e.g. summarization.")
    ] = None,
    limit: Limit = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per sample.", min=2)] = 128,
    seconds: Annotated[
        float, typer.Option(help="Least duration of a run; MLPerf asks for 600.", min=0.1)
    ] = 5.0,
    min_queries: Annotated[int, typer.Option(help="Least queries of a run.", min=1)] = 8,
    qps: Annotated[
        float | None,
        typer.Option(
            help="Queries a second in the server scenario.",
            show_default="half of what plain decoding does one by one",
        ),
    ] = None,
    rules: Annotated[
        str, typer.Option(help="The model of mlperf.conf whose limits apply.")
    ] = "llama3_1-8b",
    user_conf: Annotated[
        Path | None, typer.Option(help="A user.conf in the place of these lengths.")
    ] = None,
    mlperf_conf: Annotated[
        Path | None, typer.Option(help="A mlperf.conf above LoadGen's own, below user.conf.")
    ] = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Run MLPerf Inference's LoadGen over the engine, plain and speculative.

    Scenarios Offline, SingleStream and Server with token latencies; accuracy is ROUGE against plain decoding without LoadGen. The logs are the standard ones. This is the LoadGen harness, not an MLPerf result.
    """  # noqa: E501
    from draftwood.bench.mlperf import MODES, SCENARIOS, loadgen
    from draftwood.bench.mlperf_run import Plan
    from draftwood.bench.tables import console
    from draftwood.sampling import SamplingParams

    loadgen()
    use_threads(threads)
    plan = Plan(
        drafters=list(dict.fromkeys(drafter_list(drafters, draft))),
        scenarios=_chosen("scenarios", scenarios, SCENARIOS),
        modes=_chosen("modes", modes, MODES),
        rules=rules,
        seconds=seconds,
        min_queries=min_queries,
        server_qps=qps,
        user_conf=user_conf,
        mlperf_conf=mlperf_conf,
        out=out,
    )
    # A time per token after the first takes a second one.
    params = SamplingParams(max_tokens=max_tokens, min_tokens=2)
    prompts = _prompts(data, kind, limit)
    llm = load_llm(model, draft=draft, dtype=dtype, device=device, quantization=quantization)
    samples = _samples(llm, prompts, max_tokens)
    source = {"source": data.name if data else "packaged", "count": len(samples)}
    results = _run(llm, samples, params, plan, source)
    if as_json:
        print_json([result.to_json() for result in results])
    else:
        console().print(_tables(results))


def _run(
    llm: LLM,
    samples: Sequence[Sequence[int]],
    params: SamplingParams,
    plan: Plan,
    source: Mapping[str, Any],
) -> list[Result]:
    """All results of a plan, each in the record as soon as it is there."""
    from draftwood.bench.fingerprint import head_line
    from draftwood.bench.mlperf_run import run_plan
    from draftwood.bench.records import open_writer

    _make_folder(plan.out)
    facts = {"rules": plan.rules, "seconds": plan.seconds, "drafters": plan.drafters}
    results = []
    with open_writer(plan.out / "record.jsonl") as writer:
        head = head_line(llm, "mlperf", params=asdict(params), prompts=source, **facts)
        writer.write(head)
        with _status() as status:
            for result in run_plan(llm, samples, params, plan, status):
                writer.write(result.to_json())
                results.append(result)
    return results


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = {name.lower(): name for name in known}
    chosen = [part.strip().lower() for part in text.split(",") if part.strip()]
    for name in chosen:
        if name not in names:
            raise ConfigError(f"{option} holds {name!r}: use {', '.join(known)}")
    if not chosen:
        raise ConfigError(f"{option} is empty: use {', '.join(known)}")
    return [names[name] for name in dict.fromkeys(chosen)]


def _prompts(data: Path | None, kind: str | None, limit: int | None) -> list[BenchPrompt]:
    from draftwood.bench.data import load_prompts, spread

    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}: it must be at least 1")
    prompts = load_prompts(data)
    own = [prompt for prompt in prompts if kind in (None, prompt.kind)]
    if not own:
        kinds = ", ".join(dict.fromkeys(prompt.kind for prompt in prompts))
        raise ConfigError(f"no prompt is of kind {kind!r}: there are {kinds}")
    return own if limit is None else spread(own, limit)


def _samples(llm: LLM, prompts: Sequence[BenchPrompt], max_tokens: int) -> list[list[int]]:
    room = llm.engine.max_length - max_tokens
    encoded = [prompt.encode(llm.tokenizer) for prompt in prompts]
    samples = [ids for ids in encoded if len(ids) <= room]
    if not samples:
        raise ConfigError(f"no prompt fits the context with {max_tokens} new tokens")
    return samples


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}") from error


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Shows on stderr what runs, while that is a terminal."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


def _tables(results: Sequence[Result]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from draftwood.bench.tables import titled

    parts: list[RenderableType] = []
    if speeds := [result for result in results if result.mode == "performance"]:
        parts.append(titled("LoadGen, performance", _performance(speeds)))
    if texts := [result for result in results if result.mode == "accuracy"]:
        parts.append(titled("LoadGen, accuracy against plain decoding", _accuracy(texts)))
    parts.append(Text("The LoadGen harness, not an MLPerf result."))
    return Group(*parts)


def _performance(results: Sequence[Result]) -> Table:
    table = _table("tokens/s", "samples/s", "TTFT p99", "TPOT p99", "p90", "queries")
    table.add_column("LoadGen says")
    for result in results:
        m = result.metrics
        times = (m.get("ttft_p99_s"), m.get("tpot_p99_s"), m.get("latency_p90_s"))
        table.add_row(
            result.contender,
            result.scenario,
            f"{m['tokens_per_s']:.1f}" if "tokens_per_s" in m else "",
            f"{m['samples_per_s']:.2f}" if "samples_per_s" in m else "",
            *("" if time is None else f"{1000 * time:.0f} ms" for time in times),
            f"{m.get('queries', 0):.0f}",
            "VALID" if result.valid else f"INVALID: {result.reason}",
        )
    return table


def _accuracy(results: Sequence[Result]) -> Table:
    table = _table("ROUGE-1", "ROUGE-L", "same tokens", "tokens a sample")
    for result in results:
        m = result.metrics
        table.add_row(
            result.contender,
            result.scenario,
            f"{m['rouge1']:.2f}",
            f"{m['rougeL']:.2f}",
            f"{result.num_identical}/{result.num_samples}",
            f"{m['tokens_per_sample']:.1f}",
        )
    return table


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("", no_wrap=True)
    table.add_column("scenario", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
