"""The report's pictures of lines that are not runs: costs, batches, tiers, load, ablations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwood.bench.contenders import PLAIN
from draftwood.bench.picture import FIXED, Plot, log_ticks, make_axes, style
from draftwood.bench.record_file import RecordFile, Row

# Speculation on, off, or as the server does by itself: name, and the contender whose style it has.
_MODES = {True: ("with speculation", "auto"), False: ("without", PLAIN), None: ("served", "suffix")}
_WAITS = (
    ("ttft_p50_s", "ms to the first text, median"),
    ("tpot_p50_s", "ms a token after it, median"),
)


def cost(record: RecordFile) -> Plot | None:
    """What verifying costs, by rows and context."""
    points = record.of("cost")
    if not points:
        return None
    figure, axes = make_axes()
    styles = list(FIXED.values())
    for i, context in enumerate(dict.fromkeys(point["context"] for point in points)):
        own = [point for point in points if point["context"] == context]
        colour, marker, _ = styles[i % len(styles)]
        axes.plot(
            [point["rows"] for point in own],
            [point["relative"] for point in own],
            marker=marker,
            color=colour,
            markersize=5,
            label=f"{context} tokens of context",
        )
    ticks = [2**i for i in range(8) if 2**i <= max(point["rows"] for point in points)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows verified in one forward")
    axes.set_ylabel("cost, in plain steps")
    axes.legend(frameon=False)
    caption = "What verifying n rows costs: speculation pays as far as the curve is flat."
    return Plot("cost", caption, figure)


def batch(record: RecordFile) -> Plot | None:
    """Several requests at once, plain and with a drafter."""
    lines = record.of("batch_summary")
    if not lines:
        return None
    drafter = str(record.fingerprint.get("drafter", "auto"))
    figure, (totals, each) = make_axes(columns=2)
    sizes = [line["concurrency"] for line in lines]
    for i, (name, field) in enumerate(
        ((PLAIN, "plain_tokens_per_s"), (drafter, "tokens_per_s")),
    ):
        colour, marker, _ = style(name, i)
        speeds = [line[field] for line in lines]
        own = [speed / size for speed, size in zip(speeds, sizes, strict=True)]
        totals.plot(sizes, speeds, marker=marker, color=colour, label=name)
        each.plot(own, speeds, marker=marker, color=colour, label=name)
    totals.set_xticks(sizes, labels=[str(size) for size in sizes])
    totals.set_xlabel("requests at once")
    totals.set_ylabel("tokens/s, all together")
    each.set_xlabel("tokens/s of each request")
    for axes in (totals, each):
        axes.set_ylim(bottom=0)
    each.set_xlim(left=0)
    totals.legend(frameon=False)
    caption = "Throughput by the number of requests, and against what each of them gets."
    return Plot("batch", caption, figure)


def kv(record: RecordFile) -> Plot | None:
    """Time to the first token, by where KV was."""
    points = record.of("kv")
    if not points:
        return None
    figure, axes = make_axes(height=1.0 + 0.5 * len(points))
    places = range(len(points))
    times = [1000 * point["ttft_s"] for point in points]
    axes.plot(times, places, "o", color="#0072B2", label="measured")
    for place, time in zip(places, times, strict=True):
        axes.annotate(f"{time:.0f} ms", (time, place), (6, 4), textcoords="offset points")
    floors = [(i, 1000 * p["floor_s"]) for i, p in enumerate(points) if p["floor_s"]]
    if floors:
        axes.plot(
            [floor for _, floor in floors],
            [i for i, _ in floors],
            "D",
            color="#D55E00",
            label="reading the bytes alone",
        )
    axes.set_yticks(places, labels=[point["tier"] for point in points])
    axes.invert_yaxis()
    log_ticks(axes)
    axes.margins(x=0.2)
    axes.set_xlabel(f"ms to the first token of {points[0]['num_tokens']}")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    caption = "Time to the first token of a known prefix, by where its KV lay; cold: computed."
    return Plot("tiers", caption, figure)


def quality(record: RecordFile) -> Plot | None:
    """What a quantisation costs, by text."""
    lines = record.of("quality")
    if not lines:
        return None
    figure, (change, divergence) = make_axes(height=1.2 + 0.4 * len(lines), columns=2)
    places = range(len(lines))
    for axes, field, factor, label in (
        (change, "perplexity_change", 100, "perplexity, % above float32"),
        (divergence, "divergence", 1, "KL from float32, nats a token"),
    ):
        axes.barh(places, [factor * line[field] for line in lines], color="#0072B2")
        axes.axvline(0, color="black", linewidth=1)
        axes.set_xlabel(label)
        axes.invert_yaxis()
    change.set_yticks(places, labels=[line["text"] for line in lines])
    divergence.set_yticks(places, labels=[""] * len(lines))
    return Plot("quality", "What the quantisation costs in quality, by text.", figure)


def load(record: RecordFile) -> Plot | None:
    """Throughput against latency: a line for each mode, a point for each number of clients."""
    lines = [row for row in record.of("load") if all(row[field] for field, _ in _WAITS)]
    if not lines:
        return None
    figure, both = make_axes(columns=2)
    modes = list(dict.fromkeys(row["speculation"] for row in lines))
    for axes, (field, label) in zip(both, _WAITS, strict=True):
        for i, mode in enumerate(modes):
            _draw_load(axes, [row for row in lines if row["speculation"] is mode], field, i)
        axes.set_xlabel(label)
        axes.margins(0.12)
        axes.set_ylim(bottom=0)
    log_ticks(both[0])
    both[1].set_xlim(left=0)
    both[0].set_ylabel("tokens/s, all clients together")
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    caption = (
        "Throughput against latency under load; the numbers are clients at a time. Better is up and"
        " left."
    )
    return Plot("load", caption, figure)


def _draw_load(axes: Any, own: Sequence[Row], field: str, index: int) -> None:
    name, like = _MODES[own[0]["speculation"]]
    colour, marker, _ = style(like, index)
    waits = [1000 * row[field] for row in own]
    speeds = [row["tokens_per_s"] for row in own]
    axes.plot(waits, speeds, marker=marker, color=colour, markersize=5, label=name)
    for wait, speed, row in zip(waits, speeds, own, strict=True):
        place = (4, -11) if index else (-11, 5)  # the two lines' numbers stay apart
        axes.annotate(
            str(row["concurrency"]), (wait, speed), place, textcoords="offset points",
            fontsize=8, color=colour,
        )  # fmt: skip


def ablation(record: RecordFile) -> Plot | None:
    """Each part and workload: times plain decoding, and times all parts."""
    lines = [row for row in record.of("ablation_summary") if row["to_plain"]]
    if not lines:
        return None
    figure, both = make_axes(height=1.1 + 0.26 * len(lines), columns=2)
    sides = (("to_plain", "times plain decoding"), ("to_full", "times all parts"))
    places = range(len(lines))
    for axes, (field, label), like in zip(both, sides, ("auto", "suffix"), strict=True):
        colour, marker, _ = style(like, 0)
        shown = [(i, row[field]) for i, row in enumerate(lines) if row[field]]
        axes.errorbar(
            [one["value"] for _, one in shown],
            [i for i, _ in shown],
            xerr=[_ends([one for _, one in shown], side) for side in ("low", "high")],
            fmt=marker,
            color=colour,
            capsize=2,
            markersize=5,
        )
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xlabel(label)
        axes.set_ylim(len(lines) - 0.5, -0.5)
    both[0].set_yticks(places, labels=[row["part"] for row in lines])
    both[1].set_yticks(places, labels=[""] * len(lines))
    caption = (
        "What each part brings: decoding speed with one thing changed, over plain decoding's and"
        " over that of all parts at the same workload. Medians over groups of prompts, with 95 %"
        " bootstrap intervals."
    )
    return Plot("ablation", caption, figure)


def _ends(estimates: Sequence[Row], side: str) -> list[float]:
    """How far an end of each interval is from its value; nothing where there is none."""
    return [
        0.0 if one[side] is None else max(abs(one[side] - one["value"]), 0.0) for one in estimates
    ]
