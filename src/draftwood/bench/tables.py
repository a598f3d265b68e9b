"""Results for a person: tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftwood.bench.cost import CostPoint
from draftwood.cache import human_bytes

if TYPE_CHECKING:
    from draftwood.bench.batch import BatchSummary
    from draftwood.bench.intervals import Estimate
    from draftwood.bench.kv import KVPoint
    from draftwood.bench.lossless import DifferenceRate
    from draftwood.bench.ray import LayoutPoint
    from draftwood.bench.scale import ScalePoint
    from draftwood.bench.serve import Load, LoadPoint
    from draftwood.bench.serve_overhead import Overhead

_WIDTH = 118
_BUSY = 0.1
_LEGEND = (
    "Ratios are taken per prompt and averaged by kind (x plain, x transformers: decoding; whole: "
    "the prompt included). median and worst: of x plain, over prompts."
)


def console() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    screen = Console()
    return screen if screen.is_terminal else Console(width=_WIDTH)


def comparison_tables(summary: dict[str, Any]) -> RenderableType:
    """The tables of a `summary` line."""
    contenders: dict[str, Any] = summary["contenders"]
    parts: list[RenderableType] = [
        titled("Speed: tokens/s (median), and how many times the baseline's", _speeds(contenders)),
        Text(_LEGEND),
        titled("Decoding speed over plain, by kind", _by_kind(contenders)),
        titled(
            "Rounds: tokens gained, nodes drafted, and where the time goes", _rounds(contenders)
        ),
    ]
    parts.extend(Text(line) for line in _acceptance(contenders))
    parts.extend(Text(line) for line in _notes(summary))
    return Group(*parts)


def titled(title: str, table: Table) -> Group:
    """A table under its title, which a narrow table does not break into lines."""
    return Group(Text(f"\n{title}", style="bold"), table)


def _speeds(contenders: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("", no_wrap=True)
    for column in ("whole", "decode", "x plain", "median", "worst", "x transformers", "whole x"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("same text", justify="right", no_wrap=True)
    for name, one in contenders.items():
        plain, other = one["to_plain"], one["to_transformers"]
        table.add_row(
            name,
            _number(one["tokens_per_s"], 1),
            _number(one["decode_tokens_per_s"], 1),
            *(_ratio(plain["decode"], field) for field in ("mean", "median", "min")),
            _ratio(other["decode"], "mean"),
            _ratio(other["total"], "mean"),
            _same(one["texts"]),
        )
    return table


def _rounds(contenders: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("", no_wrap=True)
    for column in ("tokens", "nodes", "ms", "draft", "target", "verify", "commit"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, one in contenders.items():
        rounds = one["rounds"]
        if rounds is not None:
            table.add_row(
                name,
                _number(rounds["mean_acceptance_length"], 2),
                _number(rounds["nodes_per_round"], 1),
                _number(1000 * rounds["seconds_per_round"], 1),
                *(_percent(share) for share in rounds["shares"].values()),
            )
    return table


def _by_kind(contenders: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("kind")
    speeds = {name: one["to_plain"]["decode"] for name, one in contenders.items()}
    for name in speeds:
        table.add_column(name, justify="right")
    kinds = dict.fromkeys(kind for one in speeds.values() if one for kind in one["by_kind"])
    for kind in kinds:
        cells = (one["by_kind"].get(kind) if one else None for one in speeds.values())
        table.add_row(kind, *(_number(cell, 2) for cell in cells))
    table.add_section()
    table.add_row("mean", *(_ratio(one, "mean") for one in speeds.values()))
    return table


def _acceptance(contenders: dict[str, Any]) -> Iterable[str]:
    """Acceptance at the first positions, one line per drafter."""
    drafted = {
        name: one["rounds"]["acceptance_by_position"]
        for name, one in contenders.items()
        if one["rounds"] and one["rounds"]["acceptance_by_position"]
    }
    if drafted:
        yield "Rounds that accepted a node at depth 1, 2, ..., of those that had one there:"
    width = max((len(name) for name in drafted), default=0)
    for name, shares in drafted.items():
        yield f"  {name:{width}}  " + "  ".join(_percent(share) for share in shares[:10])


def _notes(summary: dict[str, Any]) -> Iterable[str]:
    for name, one in summary["contenders"].items():
        for difference in one["texts"]["differences"]:
            yield (
                f"{name} differs from plain at {difference['prompt']}, token "
                f"{difference['position']}: the target's best two are "
                f"{difference['margin']:.2g} apart there"
            )
    for skip in summary["skipped"]:
        yield f"{skip['prompt']} was skipped: {skip['reason']}"
    others = [one["neighbours"] or 0.0 for one in summary["contenders"].values()]
    if max(others, default=0.0) > _BUSY:
        yield (
            f"Other processes kept {max(others):.1f} cores busy meanwhile: "
            "measure again when the machine is quiet."
        )
    if summary["interrupted"]:
        yield "Interrupted: the tables show what was done until then."


def quality_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Perplexity of both forms and how far their distributions lie apart, text by text."""
    table = Table(title="Quality against float32")
    for name in ("text", "tokens", "float32", "tested", "change", "KL, nats", "same choice"):
        table.add_column(name, justify="left" if name == "text" else "right")
    for row in rows:
        table.add_row(
            row["text"],
            str(row["num_tokens"]),
            f"{row['reference_perplexity']:.3f}",
            f"{row['perplexity']:.3f}",
            f"{row['perplexity_change']:+.2%}",
            f"{row['divergence']:.4f}",
            f"{row['same_choice']:.1%}",
        )
    return table


def cost_table(points: Sequence[CostPoint]) -> RenderableType:
    """Verify cost by rows and context: milliseconds, and plain steps it amounts to."""
    table = Table()
    table.add_column("rows", justify="right")
    by_place = {(point.context, point.rows): point for point in points}
    contexts = list(dict.fromkeys(point.context for point in points))
    for context in contexts:
        table.add_column(f"context {context}", justify="right", no_wrap=True)
    for rows in dict.fromkeys(point.rows for point in points):
        cells = [by_place.get((context, rows)) for context in contexts]
        table.add_row(str(rows), *(_cost(cell) for cell in cells))
    return titled("Milliseconds to verify n rows (in plain steps)", table)


def batch_table(lines: Sequence[BatchSummary]) -> RenderableType:
    """Total speed by the number of requests, and what speculation makes of it."""
    table = Table()
    for column in ("at once", "plain tokens/s", "tokens/s", "x plain", "decoding", "worst", "same"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            str(line.concurrency),
            f"{line.plain_tokens_per_s:.1f}",
            f"{line.tokens_per_s:.1f}",
            f"{line.ratio:.2f}",
            f"{line.decode_ratio:.2f}",
            f"{line.worst:.2f}",
            f"{line.num_identical} of {line.num_texts}",
        )
    return titled("Requests at once: total tokens/s, prompts included (medians)", table)


def lossless_table(lines: Sequence[DifferenceRate]) -> RenderableType:
    """By drafter and temperature: how many texts are not those of plain decoding."""
    table = Table()
    table.add_column("drafter")
    for column in ("temperature", "texts", "tokens", "drafted", "accepted", "different", "rate <"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            line.drafter,
            f"{line.temperature:g}",
            str(line.num_texts),
            str(line.num_tokens),
            str(line.num_draft_tokens),
            str(line.num_accepted_tokens),
            str(line.num_different),
            f"{line.rate_below:.2%}",
        )
    return titled("Texts that are not those of plain decoding (rate: 95 % upper bound)", table)


def kv_table(points: Sequence[KVPoint]) -> RenderableType:
    """Time to first token by tier, beside what moving the bytes takes."""
    table = Table()
    table.add_column("from")
    for column in ("cached", "ms", "x cold", "read", "floor ms", "bandwidth", "same token"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in points:
        floor = point.floor_s
        speed = f"{human_bytes(round(point.num_bytes / floor))}/s" if floor else ""
        table.add_row(
            point.tier,
            str(point.num_cached_tokens),
            f"{1000 * point.ttft_s:.1f}",
            f"{point.speedup:.1f}",
            human_bytes(point.num_bytes) if point.num_bytes else "",
            "" if floor is None else f"{1000 * floor:.1f}",
            speed,
            "yes" if point.same_token else "no",
        )
    num_tokens = points[0].num_tokens if points else 0
    return titled(f"Time to the first token of {num_tokens} tokens", table)


def load_table(load: Load) -> RenderableType:
    """Speeds and waits by number of clients, with and without speculation."""
    table = Table()
    table.add_column("clients", justify="right", no_wrap=True)
    table.add_column("spec.", no_wrap=True)
    columns = ("tokens/s", "x plain", "worst", "first", "p99", "chunk", "p99", "token", "p99")
    for column in (*columns, "a round", "failed"):
        table.add_column(column, justify="right", no_wrap=True)
    ratios = {one.concurrency: one for one in load.ratios}
    for point in load.points:
        ratio = ratios.get(point.concurrency) if point.speculation else None
        table.add_row(
            str(point.concurrency),
            {True: "on", False: "off", None: ""}[point.speculation],
            f"{point.tokens_per_s:.1f}",
            "" if ratio is None else f"{ratio.ratio:.2f}",
            "" if ratio is None else f"{ratio.worst:.2f}",
            *(_milliseconds(value) for value in _waits(point)),
            _number(point.acceptance_length, 2),
            str(point.num_failed),
        )
    return titled(
        "Load: medians and 99th percentiles, in ms: first text, between chunks, a token", table
    )


def overhead_table(overhead: Overhead) -> RenderableType:
    """What HTTP adds to the engine in process."""
    table = Table()
    table.add_column("")
    for column in ("in process", "over HTTP", "more"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, ours, theirs, ratio in (
        ("ms a token", overhead.process_s, overhead.http_s, overhead.ratio),
        ("CPU ms a token", overhead.process_cpu_s, overhead.http_cpu_s, overhead.cpu_ratio),
    ):
        more = f"{100 * (ratio - 1):+.1f}%"
        table.add_row(name, f"{1000 * ours:.2f}", f"{1000 * theirs:.2f}", more)
    return titled("One request at a time (medians)", table)


def scale_table(points: Sequence[ScalePoint]) -> RenderableType:
    """Hit rate, balance and waits by policy."""
    table = Table()
    table.add_column("policy", no_wrap=True)
    columns = ("cached", "possible", "balance", "first s", "p95", "p99", "answer s", "p95", "p99")
    for column in (*columns, "route us", "retried"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in points:
        firsts = (point.ttft_p50_s, point.ttft_p95_s, point.ttft_p99_s)
        answers = (point.latency_p50_s, point.latency_p95_s, point.latency_p99_s)
        table.add_row(
            point.policy,
            f"{point.hit_rate:.1%}",
            f"{point.possible_hit_rate:.1%}",
            f"{point.balance:.2f}",
            *(f"{seconds:.2f}" for seconds in (*firsts, *answers)),
            f"{point.decision_us:.0f}",
            str(point.num_retried),
        )
    return titled("Routing: prompt tokens cached, busiest over mean, waits (medians)", table)


def kept_table(summaries: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Speeds of a server with checkpoints beside those of one without."""
    table = Table()
    columns = ("clients", "off tokens/s", "on tokens/s", "on / off", "95 %", "engine's thread")
    for column in (*columns, "written", "failed"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in summaries:
        low, high = one["ratio_low"], one["ratio_high"]
        table.add_row(
            str(one["concurrency"]),
            f"{one['off_tokens_per_s']:.1f}",
            f"{one['on_tokens_per_s']:.1f}",
            f"{one['ratio']:.3f}",
            "" if low is None else f"{low:.3f} to {high:.3f}",
            f"{100 * one['engine_share']:.2f}%",
            str(one["num_checkpoints"]),
            str(one["num_failed"]),
        )
    return titled("Checkpoints: medians of pairs", table)


def layout_table(points: Sequence[LayoutPoint]) -> RenderableType:
    """Speeds of layouts by number of clients, compared with the first layout."""
    table = Table()
    table.add_column("clients", justify="right")
    table.add_column("layout")
    columns = ("tokens/s", "x first", "first ms", "p99", "chunk ms", "p99", "token ms", "p99")
    for column in (*columns, "a round", "failed"):
        table.add_column(column, justify="right", no_wrap=True)
    first: dict[int, float] = {}
    for point in points:
        load = point.load
        base = first.setdefault(load.concurrency, load.tokens_per_s)
        table.add_row(
            str(load.concurrency),
            point.layout,
            f"{load.tokens_per_s:.1f}",
            f"{load.tokens_per_s / base:.2f}" if base else "",
            *(_milliseconds(value) for value in _waits(load)),
            "" if load.acceptance_length is None else f"{load.acceptance_length:.2f}",
            str(load.num_failed),
        )
    return titled("Layouts: medians and 99th percentiles", table)


def _waits(point: LoadPoint) -> tuple[float | None, ...]:
    return (
        *(point.ttft_p50_s, point.ttft_p99_s),
        *(point.itl_p50_s, point.itl_p99_s),
        *(point.tpot_p50_s, point.tpot_p99_s),
    )


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1000 * seconds:.1f}" if seconds < 1 else f"{1000 * seconds:.0f}"


def interval_cells(one: Estimate | None) -> tuple[str, str]:
    """A statistic, and its interval where there is one."""
    if one is None:
        return "", ""
    if one.low is None or one.high is None:
        return f"{one.value:.2f}", ""
    return f"{one.value:.2f}", f"{one.low:.2f} to {one.high:.2f}"


def _cost(point: CostPoint | None) -> str:
    return "" if point is None else f"{1000 * point.median_s:.1f}  ({point.relative:.2f})"


def _same(texts: dict[str, Any]) -> str:
    if not texts["num_compared"]:
        return ""
    ties = f" +{texts['num_ties']} ties" if texts["num_ties"] else ""
    return f"{texts['num_identical']}/{texts['num_compared']}{ties}"


def _ratio(ratios: dict[str, Any] | None, field: str) -> str:
    return _number(ratios[field] if ratios else None, 2)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.095 or share == 0 else f"{100 * share:.1f}%"
