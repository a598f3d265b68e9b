"""The report's pictures.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; markers and
hatches differ as well, so that a grey print can be read.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from draftwood.bench.contenders import PLAIN, TRANSFORMERS
from draftwood.bench.cost import plotting
from draftwood.bench.record_file import RecordFile, Row
from draftwood.bench.spec import GROUPS
from draftwood.bench.speedups import ALL, Speedups, speedups
from draftwood.bench.summary import summarise

_FIXED = {
    PLAIN: ("#000000", "o", ""),
    TRANSFORMERS: ("#56B4E9", "v", ".."),
    "suffix": ("#E69F00", "^", "//"),
    "recycling": ("#CC79A7", "s", "\\\\"),
    "lookup": ("#D55E00", "D", "xx"),
    "auto": ("#0072B2", "P", "++"),
    "model": ("#009E73", "X", "oo"),
}
_SPARE = tuple(zip(("#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"), "<>hpd*", strict=False))
_PARTS = (
    ("draft", "#E69F00", "//"),
    ("target", "#0072B2", ""),
    ("verify", "#009E73", ".."),
    ("commit", "#CC79A7", "xx"),
)
_MOST_DEPTHS = 16
_LEAST_ROUNDS = 10  # fewer say nothing about a depth
_KINDS = {**GROUPS, "mt_bench": "Multi-turn"}


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture.

    Attributes:
        name: for its file.
        caption: what it shows and how to read it; also its text for those who cannot see it.
        figure: matplotlib's.
    """

    name: str
    caption: str
    figure: Any

    def png(self) -> bytes:
        """The picture, 160 points an inch."""
        return self._saved("png")

    def svg(self) -> bytes:
        """The picture, letters as outlines: it needs no font."""
        return self._saved("svg")

    def _saved(self, form: str) -> bytes:
        buffer = io.BytesIO()
        fixed = {"svg.fonttype": "path", "svg.hashsalt": self.name}
        with import_module("matplotlib").rc_context(fixed):
            made = {"Date": None} if form == "svg" else None
            self.figure.savefig(buffer, format=form, dpi=160, metadata=made)
        return buffer.getvalue()


def plots(record: RecordFile) -> Iterator[Plot]:
    """The pictures that the lines of a record allow.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    makers: Sequence[Callable[[RecordFile], Plot | None]] = (
        _by_kind,
        _depths,
        _shares,
        _cost,
        _batch,
        _kv,
        _quality,
    )
    for make in makers:
        plot = make(record)
        if plot is not None:
            yield plot


def style(name: str, index: int) -> tuple[str, str, str]:
    """Colour, marker and hatch of a contender."""
    if name in _FIXED:
        return _FIXED[name]
    colour, marker = _SPARE[index % len(_SPARE)]
    return colour, marker, "--"


def _axes(width: float = 6.8, height: float = 3.6, columns: int = 1) -> tuple[Any, Any]:
    figure = plotting().Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.subplots(1, columns)
    for one in [axes] if columns == 1 else axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.3)
        one.set_axisbelow(True)
    return figure, axes


def _by_kind(record: RecordFile) -> Plot | None:
    found = speedups(record)
    if not found:
        return None
    kinds = list(dict.fromkeys(kind for by in found.values() for kind in by if kind != ALL))
    kinds.append(ALL)
    figure, axes = _axes(height=1.3 + 0.22 * len(kinds) * (1 + 0.5 * len(found)))
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
    figure, axes = _axes()
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
    figure, axes = _axes(height=1.2 + 0.4 * len(found))
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


def _cost(record: RecordFile) -> Plot | None:
    points = record.of("cost")
    if not points:
        return None
    figure, axes = _axes()
    styles = list(_FIXED.values())
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


def _batch(record: RecordFile) -> Plot | None:
    lines = record.of("batch_summary")
    if not lines:
        return None
    drafter = str(record.fingerprint.get("drafter", "auto"))
    figure, (totals, each) = _axes(columns=2)
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


def _kv(record: RecordFile) -> Plot | None:
    points = record.of("kv")
    if not points:
        return None
    figure, axes = _axes(height=1.0 + 0.5 * len(points))
    places = range(len(points))
    times = [1000 * point["ttft_s"] for point in points]
    axes.plot(times, places, "o", color="#0072B2", label="measured")
    for place, time in zip(places, times, strict=True):
        axes.annotate(f"{time:.3g} ms", (time, place), (6, 4), textcoords="offset points")
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
    axes.set_xscale("log")
    axes.margins(x=0.2)
    axes.set_xlabel(f"ms to the first token of {points[0]['num_tokens']}")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    caption = "Time to the first token of a known prefix, by where its KV lay; cold: computed."
    return Plot("tiers", caption, figure)


def _quality(record: RecordFile) -> Plot | None:
    lines = record.of("quality")
    if not lines:
        return None
    figure, (change, divergence) = _axes(height=1.2 + 0.4 * len(lines), columns=2)
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
