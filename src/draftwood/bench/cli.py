"""`draftwood bench`: measurements, for a person and as JSON lines."""

from __future__ import annotations

import typer

from draftwood.bench.ablate_cli import ablate
from draftwood.bench.batch_cli import batch
from draftwood.bench.beams_cli import beams
from draftwood.bench.check_cli import check
from draftwood.bench.compare_cli import compare
from draftwood.bench.cost_cli import cost
from draftwood.bench.diff_cli import diff
from draftwood.bench.grammar_cli import grammar
from draftwood.bench.kept_cli import checkpoints
from draftwood.bench.kv_cli import kv
from draftwood.bench.lossless_cli import lossless
from draftwood.bench.mlperf_cli import mlperf
from draftwood.bench.peer_cli import peers
from draftwood.bench.quality_cli import quality
from draftwood.bench.ray_cli import ray
from draftwood.bench.report_cli import report
from draftwood.bench.scale_cli import scale
from draftwood.bench.serve_cli import serve
from draftwood.bench.spec_cli import spec

app = typer.Typer(
    help="Measure speed on this machine.", no_args_is_help=True, rich_markup_mode="rich"
)


def _example(arguments: str) -> str:
    """The end of a command's help."""
    return f"[bold]Example:[/bold] draftwood bench {arguments}"


@app.callback()
def _main() -> None:
    """Measure speed on this machine."""


app.command(epilog=_example("compare smollm2-135m --limit 6 --out result.jsonl"))(compare)
app.command(epilog=_example("cost smollm2-135m --contexts 64,1024 --plot cost.png"))(cost)
app.command(epilog=_example("quality smollm2-135m --quantization int8"))(quality)
app.command(epilog=_example("peers qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b"))(peers)
app.command(epilog=_example("batch smollm2-135m --concurrency 1,4"))(batch)
app.command(epilog=_example("ablate smollm2-135m --out ablate.jsonl"))(ablate)
app.command(epilog=_example("beams smollm2-135m --beams 4"))(beams)
app.command(epilog=_example("grammar smollm2-135m"))(grammar)
app.command(epilog=_example("lossless smollm2-135m --limit 6 --out texts.jsonl"))(lossless)
app.command(epilog=_example("kv smollm2-135m --tokens 500"))(kv)
app.command(epilog=_example("ray smollm2-135m --replicas 1,2"))(ray)
app.command(epilog=_example("serve smollm2-135m --concurrency 1,8 --out load.jsonl"))(serve)
app.command(epilog=_example("scale --replicas 100 --requests 10000"))(scale)
app.command(epilog=_example("checkpoints smollm2-135m --concurrency 8"))(checkpoints)
app.command(epilog=_example("spec smollm2-135m --data question.jsonl --out spec.jsonl"))(spec)
app.command(epilog=_example("mlperf smollm2-135m --limit 6 --out mlperf"))(mlperf)
app.command(epilog=_example("report compare.jsonl cost.jsonl --out report.html"))(report)
app.command(epilog=_example("check README.md docs/benchmarks.md"))(check)
app.command(epilog=_example("diff before.jsonl after.jsonl"))(diff)
