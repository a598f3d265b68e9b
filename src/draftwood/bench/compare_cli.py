"""`draftwood bench compare`: ways to decode, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.bench.options import (
    AsJson,
    Data,
    Device,
    Draft,
    DraftMatch,
    DraftQuantization,
    Dtype,
    Limit,
    Model,
    Out,
    Quantization,
    Seed,
    Temperature,
    Threads,
    drafter_list,
    load_llm,
    use_threads,
)
from draftwood.bench.output import print_json, progress_bar

if TYPE_CHECKING:
    from draftwood.bench.compare import Comparison, Skip
    from draftwood.bench.data import BenchPrompt
    from draftwood.bench.records import Writer


def compare(
    model: Model,
    draft: Draft = None,
    draft_match: DraftMatch = "auto",
    draft_quantization: DraftQuantization = None,
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
    data: Data = None,
    limit: Limit = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.")] = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = None,
    quantization: Quantization = None,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compare ways to decode: transformers, plain, and with each drafter.

    All take turns at the same prompts in one process. Shown are speeds, ratios to plain decoding, how much of what was drafted came true, where the time went, and whether every text is that of plain decoding. Ctrl-C ends early and shows what was measured until then.
    """  # noqa: E501
    from draftwood.bench.compare import make_comparison
    from draftwood.bench.data import load_prompts
    from draftwood.bench.fingerprint import head_line
    from draftwood.bench.records import open_writer
    from draftwood.sampling import SamplingParams

    use_threads(threads)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    names = drafter_list(drafters, draft)
    prompts = load_prompts(data, limit)
    with open_writer(out) as writer:
        llm = load_llm(
            model,
            draft=draft,
            draft_match=draft_match,
            draft_quantization=draft_quantization,
            dtype=dtype,
            device=device,
            quantization=quantization,
        )
        comparison = make_comparison(llm, model, names, params, transformers=transformers)
        source = {"source": data.name if data else "packaged", "count": len(prompts)}
        facts = {"params": asdict(params), "prompts": source, "drafters": names}
        writer.write(head_line(llm, "compare", **facts))
        summary = _run(comparison, prompts, writer)
    _show(summary, as_json)
    if comparison.interrupted:
        raise typer.Exit(130)


def _run(comparison: Comparison, prompts: Sequence[BenchPrompt], writer: Writer) -> dict[str, Any]:
    from draftwood.bench.records import RunRecord
    from draftwood.bench.summary import summarise

    def on_record(result: RunRecord | Skip) -> None:
        if isinstance(result, RunRecord):
            writer.write(result.to_json())
        else:
            writer.write({"type": "skip", **asdict(result)})

    with progress_bar(len(prompts) * len(comparison.contenders)) as watch:
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


def _show(summary: dict[str, Any], as_json: bool) -> None:
    from draftwood.bench.tables import comparison_tables, console

    if as_json:
        print_json(summary)
    else:
        console().print(comparison_tables(summary))
