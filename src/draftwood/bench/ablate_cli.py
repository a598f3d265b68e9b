"""`draftwood bench ablate`: which part brings what."""

from __future__ import annotations

from collections.abc import Sequence
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
    Seed,
    Threads,
    drafter_list,
    load_llm,
    numbers,
    use_threads,
    whole_numbers,
)
from draftwood.bench.output import print_json, progress_bar
from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from draftwood.bench.ablate import Ablation, AblationRun, Block, Factors
    from draftwood.bench.ablate_summary import AblationLine

_SWITCH = {"on": True, "off": False}


def ablate(
    model: Model,
    draft: Draft = None,
    drafters: Annotated[
        str | None,
        typer.Option(
            help="Who drafts.", show_default="auto,suffix,recycling,lookup; model with --draft"
        ),
    ] = None,
    trees: Annotated[str, typer.Option(help="Most nodes of a tree.")] = "32,2,4,8,16,64",
    controller: Annotated[str, typer.Option(help="It chooses tree sizes.")] = "on,off",
    temperatures: Annotated[str, typer.Option(help="0 is greedy.")] = "0,1",
    batches: Annotated[str, typer.Option(help="Requests at once.")] = "1,4,8",
    contexts: Annotated[
        str, typer.Option(help="Tokens before a text at least; 0: the prompt alone.")
    ] = "0,512,1024",
    grid: Annotated[bool, typer.Option("--grid", help="Every combination of all values.")] = False,
    groups: Annotated[int, typer.Option(help="Groups of prompts of each workload.", min=1)] = 10,
    data: Data = None,
    limit: Limit = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", min=2)] = 64,
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
    """Measure which part brings what: drafter, tree size and controller, at several workloads.

    Lists are comma-separated; the first values together are the full setting and the usual workload, and each other value is then tried alone, unless --grid asks for every combination. All take turns, plain decoding among them. A run that was killed goes on where it stopped when it is started again with the same --out.
    """  # noqa: E501
    from draftwood.bench import ablate as measuring
    from draftwood.bench.data import digest, in_turns, load_prompts
    from draftwood.bench.fingerprint import head_line
    from draftwood.sampling import SamplingParams

    use_threads(threads)
    factors = measuring.Factors(
        drafters=_ours(drafters, draft),
        trees=whole_numbers("trees", trees, 1),
        controllers=_switches(controller),
        temperatures=numbers("temperatures", temperatures, 0),
        batches=whole_numbers("batches", batches, 1),
        contexts=whole_numbers("contexts", contexts, 0),
    )
    blocks = measuring.grid(factors) if grid else measuring.one_at_a_time(factors)
    params = SamplingParams(max_tokens=max_tokens, seed=seed)
    prompts = in_turns(load_prompts(data, limit))
    llm = load_llm(model, draft=draft, dtype=dtype, device=device, quantization=quantization)
    ids = [prompt.encode(llm.tokenizer) for prompt in prompts]
    ablation = measuring.Ablation(llm, ids, blocks, groups, params)
    ablation.check()
    source = {"source": data.name if data else "packaged", "count": len(prompts)}
    facts = {"params": asdict(params), "data": digest(prompts), "prompts": source}
    lines, interrupted = _run(ablation, factors, head_line(llm, "ablate", **facts), out)
    _show(lines, as_json)
    if interrupted:
        raise typer.Exit(130)


def _ours(drafters: str | None, draft: str | None) -> list[str]:
    if drafters is None:
        return ["auto", "suffix", "recycling", "lookup", *(["model"] if draft else [])]
    names = drafter_list(drafters, draft)
    for name in names:
        if name in ("none", "random", "oracle"):
            raise ConfigError(f"drafters holds {name!r}: plain decoding takes part by itself")
    return names


def _switches(text: str) -> list[bool]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in _SWITCH:
            raise ConfigError(f"controller holds {name!r}: use on and off")
    return [_SWITCH[name] for name in names]


def _run(
    ablation: Ablation, factors: Factors, head: dict[str, Any], out: Path | None
) -> tuple[Sequence[AblationLine], bool]:
    """Measures what the record lacks; the lines of the summary, and whether it was interrupted."""
    from draftwood.bench.ablate import AblationRun, whole_cells
    from draftwood.bench.ablate_summary import summarise
    from draftwood.bench.resume import open_resumed, read_rows

    rows = read_rows(out, head)
    old = [AblationRun.from_json(row) for row in rows if row["type"] == "ablation"]
    cells = whole_cells(old, ablation.blocks)
    runs = [run for own in cells.values() for run in own]
    resumed = [row for row in rows if row["type"] == "resumed"]
    kept = [*rows[:1], *(run.to_json() for run in runs), *resumed]
    interrupted = False
    with open_resumed(out, kept, head) as writer:

        def on_cell(new: Sequence[AblationRun]) -> None:
            runs.extend(new)
            for run in new:
                writer.write(run.to_json())

        with progress_bar(_num_runs(ablation.blocks, ablation.groups) - len(runs)) as watch:
            try:
                ablation.measure(cells, on_cell, watch)
            except KeyboardInterrupt:
                interrupted = True
        lines = summarise(runs, factors.full, factors.usual)
        for line in lines:
            writer.write(line.to_json())
    return lines, interrupted


def _num_runs(blocks: Sequence[Block], groups: int) -> int:
    return sum(groups * len(block.settings) for block in blocks)


def _show(lines: Sequence[AblationLine], as_json: bool) -> None:
    from draftwood.bench.ablate_table import ablation_tables
    from draftwood.bench.tables import console

    if as_json:
        print_json([line.to_json() for line in lines])
    else:
        console().print(ablation_tables(lines))
