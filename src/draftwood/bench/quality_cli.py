"""`draftwood bench quality`: what a quantisation costs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from draftwood.bench.options import AsJson, Model, Out, Threads, load_llm, use_threads
from draftwood.bench.output import print_json


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
    as_json: AsJson = False,
) -> None:
    """Measure what a quantisation costs: perplexity and divergence against float32."""
    from draftwood.bench import quality as measuring
    from draftwood.bench.fingerprint import head_line
    from draftwood.bench.records import open_writer
    from draftwood.bench.tables import console, quality_table
    from draftwood.models.known_quality import KnownQuality, remember
    from draftwood.models.load import Placement, load_model
    from draftwood.models.progress import shown_progress

    use_threads(threads)
    with open_writer(out) as writer:
        llm = load_llm(model, quantization=quantization)
        cpu = llm.model.spec.device
        with shown_progress() as progress:
            reference, _, _ = load_model(model, Placement(cpu, quantization="none"), progress)
        writer.write(head_line(llm, "quality", max_tokens=max_tokens))
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
        print_json(rows)
    else:
        console().print(quality_table(rows))
