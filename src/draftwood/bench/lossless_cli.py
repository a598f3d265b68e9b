"""`draftwood bench lossless`: does speculation change a text?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from draftwood.bench.options import (
    AsJson,
    Device,
    Draft,
    Dtype,
    Model,
    Out,
    Quantization,
    Threads,
    drafter_list,
    load_llm,
    numbers,
    use_threads,
)
from draftwood.bench.output import print_json, progress_bar


def lossless(
    model: Model,
    draft: Draft = None,
    drafters: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, as for `bench compare`.",
            show_default="suffix,recycling,lookup,auto; and model with --draft",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prompts, as for `bench compare`; may be given again.",
            show_default="30 packaged prompts",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each file, spread over the kinds.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", min=1)] = 64,
    temperatures: Annotated[str, typer.Option(help="Comma-separated; 0 is greedy.")] = "0,0.8",
    seed: Annotated[int, typer.Option(help="Of the noise, when sampled.")] = 7,
    together: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 8,
    adaptive: Annotated[
        bool, typer.Option(help="Draft only where it pays, or always: the harder test.")
    ] = False,
    max_tree_nodes: Annotated[int, typer.Option(help="Most nodes of a tree.", min=1)] = 8,
    dtype: Dtype = None,
    quantization: Quantization = None,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compare each text with that of plain decoding, token by token, over many prompts.

    Exits with 1 when one differs; --out says where, and how close the target's two best tokens were there.
    """  # noqa: E501
    from draftwood.bench import lossless as measuring
    from draftwood.bench.data import load_prompts
    from draftwood.bench.fingerprint import head_line
    from draftwood.bench.records import open_writer
    from draftwood.bench.tables import console, lossless_table
    from draftwood.config import EngineConfig
    from draftwood.sampling import SamplingParams

    use_threads(threads)
    names = [name for name in drafter_list(drafters, draft) if name != "none"]
    settings = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        for temperature in numbers("temperatures", temperatures, 0)
    ]
    files: list[Path | None] = [*data] if data else [None]
    prompts = [prompt for path in files for prompt in load_prompts(path, limit)]
    config = EngineConfig(adaptive=adaptive, max_tree_nodes=max_tree_nodes, max_num_seqs=together)
    with open_writer(out) as writer:
        llm = load_llm(
            model, draft=draft, dtype=dtype, device=device, quantization=quantization, config=config
        )
        facts = {
            "params": asdict(settings[0]),
            "temperatures": [params.temperature for params in settings],
            "prompts": {
                "source": ", ".join(path.name for path in data) if data else "packaged",
                "count": len(prompts),
            },
            "drafters": names,
            "together": together,
        }
        writer.write(head_line(llm, "lossless", **facts))
        with progress_bar(len(prompts) * len(names) * len(settings)) as watch:

            def on_text(text: measuring.ComparedText) -> None:
                watch(text.prompt, text.drafter)
                writer.write(text.to_json())

            texts = measuring.measure(llm, names, prompts, settings, together, on_text)
        lines = measuring.summarise(texts)
        for line in lines:
            writer.write(line.to_json())
    if as_json:
        print_json([line.to_json() for line in lines])
    else:
        console().print(lossless_table(lines))
    if any(line.num_different for line in lines):
        raise typer.Exit(1)
