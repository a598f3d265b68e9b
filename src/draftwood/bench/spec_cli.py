"""`draftwood bench spec`: Spec-Bench, its groups and its leaderboard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.bench.options import (
    AsJson,
    Device,
    Draft,
    Dtype,
    Model,
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
    from draftwood.bench.records import RunRecord, Writer
    from draftwood.bench.resume import Left


def spec(
    model: Model,
    data: Annotated[
        Path, typer.Option(help="Spec-Bench's question.jsonl, or a part.", show_default=False)
    ],
    draft: Draft = None,
    drafters: Annotated[
        str, typer.Option(help="Comma-separated; as for `bench compare`.")
    ] = "none,lookup,auto",
    limit: Annotated[int | None, typer.Option(help="Questions, spread over the groups.")] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens per turn; Spec-Bench takes 1024.", min=1)
    ] = 1024,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    dtype: Dtype = None,
    quantization: Quantization = None,
    device: Device = None,
    threads: Threads = None,
    out: Annotated[
        Path | None, typer.Option(help="Write JSON lines to this file; go on from what it holds.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run Spec-Bench: speed-up over plain decoding and mean accepted tokens, by group.

    A later turn's prompt holds the model's own first answer. A run that was killed goes on where it stopped when it is started again with the same --out, and no question is run twice.
    """  # noqa: E501
    from draftwood.bench.compare import make_comparison
    from draftwood.bench.data import digest, load_prompts, spread
    from draftwood.bench.fingerprint import head_line
    from draftwood.bench.resume import open_resumed, read_left
    from draftwood.bench.spec import in_groups
    from draftwood.bench.tables import console
    from draftwood.sampling import SamplingParams

    use_threads(threads)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    names = drafter_list(drafters, draft)
    everything = in_groups(load_prompts(data))
    questions = everything if limit is None else spread(everything, limit)
    llm = load_llm(model, draft=draft, dtype=dtype, device=device, quantization=quantization)
    facts = {"params": asdict(params), "drafters": names, "data": digest(everything)}
    source = {"source": data.name, "count": len(questions)}
    fingerprint = head_line(llm, "spec", **facts, prompts=source)
    left = read_left(out, fingerprint, {one.id: len(one.turns) for one in everything})
    comparison = make_comparison(llm, model, names, params, transformers=False)
    with open_resumed(out, left.rows, fingerprint) as writer:
        summary = _run(comparison, questions, left, writer)
    if as_json:
        print_json(summary)
    else:
        from draftwood.bench.spec_table import spec_tables

        console().print(spec_tables(summary))
    if comparison.interrupted:
        raise typer.Exit(130)


def _run(
    comparison: Comparison, questions: Sequence[BenchPrompt], left: Left, writer: Writer
) -> dict[str, Any]:
    from draftwood.bench.records import RunRecord
    from draftwood.bench.spec import run_questions, summarise_spec
    from draftwood.bench.summary import summarise

    records = list(left.records)

    def on_question(results: Sequence[RunRecord | Skip]) -> None:
        for result in results:
            if isinstance(result, RunRecord):
                records.append(result)
                writer.write(result.to_json())
            else:
                writer.write({"type": "skip", **asdict(result)})

    waiting = [question for question in questions if question.id not in left.done]
    total = sum(len(question.turns) for question in waiting) * len(comparison.contenders)
    with progress_bar(total) as watch:
        run_questions(comparison, questions, left.done, on_question, watch)
    skipped = [row for row in left.rows if row["type"] == "skip"]
    summary = {
        "type": "summary",
        "interrupted": comparison.interrupted,
        "skipped": [
            *({"prompt": row["prompt"], "reason": row["reason"]} for row in skipped),
            *(asdict(skip) for skip in comparison.skipped),
        ],
        "contenders": summarise(records),
        "spec": summarise_spec(records),
    }
    writer.write(summary)
    return summary
