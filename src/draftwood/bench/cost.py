"""What verifying a tree costs: seconds of a target forward by its rows, at given context lengths.

Speculation pays exactly as far as this curve is flat.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from draftwood.attention import Work, pack
from draftwood.bench.fingerprint import Neighbours
from draftwood.errors import CapacityError, ConfigError, MissingExtraError
from draftwood.kv import BlockPool, Lease
from draftwood.models.base import Model
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64)
CONTEXTS = (64, 512, 1024)
_CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPoint:
    """One point of the curve.

    Attributes:
        context: tokens that were computed before.
        rows: nodes of the tree.
        median_s, min_s: of the forward, packing included.
        relative: `median_s` over that of one row at the same context.
        repeats: how often it was measured.
        neighbours: cores that other processes kept busy meanwhile; None where it is not known.
    """

    context: int
    rows: int
    median_s: float
    min_s: float
    relative: float
    repeats: int
    neighbours: float | None

    def to_json(self) -> dict[str, Any]:
        """The fields of a `cost` line."""
        return {"type": "cost", **asdict(self)}


def measure(
    model: Model,
    pool: BlockPool,
    contexts: Iterable[int],
    rows: Sequence[int],
    repeats: int,
    on_point: Callable[[CostPoint], None],
) -> list[CostPoint]:
    """Measures the curve at each context.

    All row counts take turns, in changing order: work of others on the machine meets them alike.

    Args:
        model: the target.
        pool: its KV memory.
        contexts: tokens before the tree.
        rows: nodes of the trees, ascending, with 1 among them.
        repeats: how often each is measured.
        on_point: told each point when its context is done.

    Raises:
        ConfigError: a context and its largest tree do not fit the model or the pool.
    """
    points = []
    for context in contexts:
        _check_room(model, context, max(rows))
        neighbours = Neighbours()
        with _context(model, pool, context) as lease:
            times = _times(model, pool, lease, rows, repeats)
        for point in _points(context, times, repeats, neighbours.cores()):
            points.append(point)
            on_point(point)
    return points


def bushy_tree(num_nodes: int) -> TokenTree:
    """A tree as drafters make them: a spine with a side branch at every other node."""
    builder = TreeBuilder(1)
    spine = 0
    while len(builder) < num_nodes:
        side = builder.add(spine, 2, builder.scores[spine] * 0.3)
        if len(builder) < num_nodes:
            spine = builder.add(spine, 3, builder.scores[spine] * 0.7)
        if len(builder) < num_nodes:
            builder.add(side, 4, builder.scores[side] * 0.3)
    return builder.build()


def plot(points: Sequence[CostPoint], path: Path, title: str) -> None:
    """Draws the curves, cost of n rows over that of one, into a PNG.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = plotting().Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    markers = "os^Dvx"
    for i, context in enumerate(dict.fromkeys(point.context for point in points)):
        own = [point for point in points if point.context == context]
        axes.plot(
            [point.rows for point in own],
            [point.relative for point in own],
            marker=markers[i % len(markers)],
            markersize=4,
            label=f"{context} tokens of context",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64], labels=["1", "2", "4", "8", "16", "32", "64"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows verified in one forward")
    axes.set_ylabel("cost, in plain steps")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def plotting() -> Any:
    """The module `matplotlib.figure`, which draws without a window.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        return import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingExtraError("matplotlib", "bench") from error


def _check_room(model: Model, context: int, rows: int) -> None:
    limit = model.spec.max_model_len
    if context < 0 or context + rows > limit:
        raise ConfigError(
            f"context {context} with {rows} rows does not fit the model's {limit} positions"
        )


@contextmanager
def _context(model: Model, pool: BlockPool, length: int) -> Iterator[Lease]:
    """A lease with `length` random tokens computed."""
    rng = random.Random(0)
    vocabulary = min(model.spec.vocab_size, 10_000)
    lease = Lease(pool)
    try:
        for start in range(0, length, _CHUNK):
            tokens = [rng.randrange(vocabulary) for _ in range(min(_CHUNK, length - start))]
            lease.reserve(len(tokens))
            work = Work(lease, start, tokens, None, [len(tokens) - 1])
            model.forward(pack([work], pool.device), pool.target)
            lease.commit(range(len(tokens)))
        yield lease
    except CapacityError as error:
        raise ConfigError(f"context {length} does not fit the KV memory: {error}") from error
    finally:
        lease.close()


def _times(
    model: Model, pool: BlockPool, lease: Lease, rows: Sequence[int], repeats: int
) -> dict[int, list[float]]:
    """Seconds of forwards by rows, after one of each that does not count."""
    trees = {n: bushy_tree(n) for n in rows}
    rng = random.Random(0)
    times: dict[int, list[float]] = {n: [] for n in rows}
    for turn in range(repeats + 1):
        for n in rng.sample(rows, len(rows)):
            seconds = _forward(model, pool, lease, trees[n])
            if turn:
                times[n].append(seconds)
    return times


def _forward(model: Model, pool: BlockPool, lease: Lease, tree: TokenTree) -> float:
    lease.reserve(len(tree))
    begin = perf_counter()
    work = Work(lease, lease.length, tree.tokens, tree, range(len(tree)))
    model.forward(pack([work], pool.device), pool.target)
    if pool.device.type == "cuda":
        torch.cuda.synchronize(pool.device)
    return perf_counter() - begin


def _points(
    context: int, times: dict[int, list[float]], repeats: int, neighbours: float | None
) -> list[CostPoint]:
    one = median(times[1])
    return [
        CostPoint(
            context=context,
            rows=rows,
            median_s=median(seconds),
            min_s=min(seconds),
            relative=median(seconds) / one,
            repeats=repeats,
            neighbours=neighbours,
        )
        for rows, seconds in times.items()
    ]
