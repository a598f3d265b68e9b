"""The report's pictures: which ones a record has, and those of its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from draftwood.bench import report_points as points
from draftwood.bench.intervals import estimate, middle
from draftwood.bench.picture import Plot, make_axes, style
from draftwood.bench.record_file import RecordFile, Row
from draftwood.bench.spec import GROUPS
from draftwood.bench.speedups import ALL, Speedups, speedups
from draftwood.bench.summary import decode_speed, summarise

_PARTS = (
    ("draft", "#E69F00", "//"),
    ("target", "#0072B2", ""),
    ("verify", "#009E73", ".."),
    ("commit", "#CC79A7", "xx"),
)
_MOST_DEPTHS = 16
_LEAST_ROUNDS = 10  # fewer say nothing about a depth
_KINDS = {**GROUPS, "mt_bench": "Multi-turn"}


def plots(record: RecordFile) -> Iterator[Plot]:
    """The pictures that the lines of a record allow.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    makers: Sequence[Callable[[RecordFile], Plot | None]] = (
        _peers,
        _by_kind,
        _depths,
        _shares,
        points.cost,
        points.batch,
        points.load,
        points.kv,
        points.ablation,
        points.quality,
    )
    for make in makers:
        plot = make(record)
        if plot is not None:
            yield plot


def _peers(record: RecordFile) -> Plot | None:
    """Speeds of programs side by side; they are too many for a picture by kind."""
    if record.command != "peers" or not record.runs:
        return None
    speeds: dict[str, list[float]] = {}
    for run in record.runs:
        speed = decode_speed(run)
        if speed is not None:
            speeds.setdefault(run.contender, []).append(speed)
    found = {name: estimate(values, middle) for name, values in speeds.items()}
    ranked = sorted(found.items(), key=lambda item: -item[1].value)
    ours = {run.contender for run in record.runs if run.rounds}
    figure, axes = make_axes(height=1.1 + 0.3 * len(ranked))
    for place, (name, one) in enumerate(ranked):
        colour, _, hatch = style("auto" if name in ours else "transformers", 0)
        label = ("ours" if name in ours else "others") if name in _firsts(ranked, ours) else None
        axes.barh(place, one.value, color=colour, hatch=hatch, edgecolor="white", label=label)
        if one.low is not None and one.high is not None:
            ends = [[max(one.value - one.low, 0.0)], [max(one.high - one.value, 0.0)]]
            axes.errorbar(one.value, place, xerr=ends, color="black", capsize=3)
    axes.set_yticks(range(len(ranked)), labels=[name for name, _ in ranked])
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s, decoding")
    axes.legend(frameon=False, loc="lower right")
    caption = (
        "Programs side by side: decoding speed, medians over prompts with 95 % bootstrap intervals;"
        " no interval where a program ran fewer than three."
    )
    return Plot("peers", caption, figure)


def _firsts(ranked: Sequence[tuple[str, Any]], ours: set[str]) -> set[str]:
    """The first of ours and the first of the others: one of each is in the legend."""
    names = [name for name, _ in ranked]
    return {next(iter(n for n in names if (n in ours) is own), "") for own in (True, False)}


def _by_kind(record: RecordFile) -> Plot | None:
    found = {} if record.command == "peers" else speedups(record)
    if not found:
        return None
    kinds = list(dict.fromkeys(kind for by in found.values() for kind in by if kind != ALL))
    kinds.append(ALL)
    figure, axes = make_axes(height=1.3 + 0.22 * len(kinds) * (1 + 0.5 * len(found)))
    _draw_speedups(axes, found, kinds)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(kinds)), labels=[_KINDS.get(kind, kind) for kind in kinds])
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    ticks = [t for t in (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16) if low <= t <= high]
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("times the speed of plain decoding")
    figure.legend(loc="outside upper center", ncols=min(5, len(found)), frameon=False)
    whole = "ratio of mean speeds" if record.command == "spec" else "mean over prompts; all: median"
    return Plot(
        "speedup",
        f"Speed-up over plain decoding by kind ({whole}), with 95 % bootstrap intervals over"
        " prompts; where there is no bar, there were fewer than three prompts.",
        figure,
    )


def _draw_speedups(axes: Any, found: Speedups, kinds: Sequence[str]) -> None:
    step = 0.8 / max(len(found), 1)
    for i, (name, by) in enumerate(found.items()):
        colour, marker, _ = style(name, i)
        shown = [(at, by[kind]) for at, kind in enumerate(kinds) if kind in by]
        values = [one.value for _, one in shown]
        ends = [
            [value - (one.low or value) for value, (_, one) in zip(values, shown, strict=True)],
            [(one.high or value) - value for value, (_, one) in zip(values, shown, strict=True)],
        ]
        axes.errorbar(
            values,
            [at + (i - (len(found) - 1) / 2) * step for at, _ in shown],
            # An interval of a skewed statistic may leave the value out.
            xerr=[[max(end, 0.0) for end in side] for side in ends],
            fmt=marker,
            color=colour,
            capsize=2,
            markersize=5,
            label=name,
        )


def _rounds(record: RecordFile) -> dict[str, Row]:
    """Contender to how its rounds went, all together."""
    found = summarise(record.runs) if record.runs else {}
    return {name: one["rounds"] for name, one in found.items() if one["rounds"]}


def _depths(record: RecordFile) -> Plot | None:
    found = {name: _known_depths(rounds) for name, rounds in _rounds(record).items()}
    found = {name: shares for name, shares in found.items() if shares}
    if not found:
        return None
    figure, axes = make_axes()
    for i, (name, shares) in enumerate(found.items()):
        colour, marker, _ = style(name, i)
        depths = range(1, len(shares) + 1)
        axes.plot(depths, shares, marker=marker, color=colour, markersize=5, label=name)
    axes.set_xlabel("depth in the tree")
    axes.set_ylabel("accepted, % of rounds")
    axes.set_ylim(0, 100)
    axes.legend(frameon=False)
    caption = (
        "Rounds that accepted a node at a depth, of the rounds that had drafted one there; as deep"
        f" as {_LEAST_ROUNDS} rounds or more did."
    )
    return Plot("acceptance", caption, figure)


def _known_depths(rounds: Row) -> list[float]:
    """Per cent accepted at depth 1, 2, ..., as far as enough rounds drafted."""
    both = zip(rounds["acceptance_by_position"], rounds["proposed_per_position"], strict=True)
    return [100 * share for share, count in both if count >= _LEAST_ROUNDS][:_MOST_DEPTHS]


def _shares(record: RecordFile) -> Plot | None:
    found = {name: one["shares"] for name, one in _rounds(record).items()}
    if not found:
        return None
    figure, axes = make_axes(height=1.2 + 0.4 * len(found))
    left = [0.0] * len(found)
    for part, colour, hatch in _PARTS:
        widths = [100 * shares[part] for shares in found.values()]
        axes.barh(
            range(len(found)),
            widths,
            left=left,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            label=part,
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(found)), labels=list(found))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the time of decoding rounds")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return Plot("shares", "Where the time of a round goes.", figure)
