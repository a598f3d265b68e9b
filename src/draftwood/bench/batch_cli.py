"""`draftwood bench batch`: several requests at once, with and without speculation."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

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
    load_llm,
    use_threads,
    whole_numbers,
)
from draftwood.bench.output import print_json


def batch(
    model: Model,
    draft: Draft = None,
    drafter: Annotated[str, typer.Option(help="Who drafts.")] = "auto",
    concurrency: Annotated[str, typer.Option(help="Requests at once, comma-separated.")] = "1,4,8",
    groups: Annotated[int, typer.Option(help="Groups of each size.", min=1)] = 3,
    data: Data = None,
    limit: Limit = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", min=2)] = 64,
    dtype: Dtype = None,
    quantization: Quantization = None,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Measure several requests at once: total tokens/s, plain and speculative, taking turns."""
    from draftwood.bench import batch as measuring
    from draftwood.bench.data import load_prompts
    from draftwood.bench.fingerprint import head_line
    from draftwood.bench.records import open_writer
    from draftwood.bench.tables import batch_table, console
    from draftwood.sampling import SamplingParams

    use_threads(threads)
    sizes = whole_numbers("concurrency", concurrency, 1)
    params = SamplingParams(max_tokens=max_tokens)
    prompts = load_prompts(data, limit)
    with open_writer(out) as writer:
        llm = load_llm(model, draft=draft, dtype=dtype, device=device, quantization=quantization)
        source = {"source": data.name if data else "packaged", "count": len(prompts)}
        facts = {"params": asdict(params), "prompts": source, "drafter": drafter}
        writer.write(head_line(llm, "batch", **facts))
        ids = [prompt.encode(llm.tokenizer) for prompt in prompts]
        runs = measuring.measure(
            llm, drafter, ids, sizes, groups, params, lambda run: writer.write(run.to_json())
        )
        lines = measuring.summarise(runs)
        for line in lines:
            writer.write(line.to_json())
    if as_json:
        print_json([line.to_json() for line in lines])
    else:
        console().print(batch_table(lines))
