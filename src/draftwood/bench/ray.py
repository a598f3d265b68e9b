"""One process, replicas on Ray, and draft actors, side by side on this machine.

All servers are there from the start, and blocks of requests take turns among them, so that
a machine that gets slower meanwhile slows all. What is compared is tokens a second of all clients.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftwood.bench.data import BenchPrompt
from draftwood.bench.serve import LoadPlan, LoadPoint, measure
from draftwood.bench.served import served
from draftwood.bench.sse import Target


@dataclass(frozen=True, slots=True)
class LayoutPoint:
    """One `layout` line: a layout at a number of clients.

    Attributes:
        layout: its name.
        options: of `draftwood serve`.
        load: medians over blocks of what each block's point says.
        speeds: tokens a second of each block.
    """

    layout: str
    options: tuple[str, ...]
    load: LoadPoint
    speeds: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        about = {"type": "layout", "layout": self.layout, "options": self.options}
        return about | asdict(self.load) | {"speeds": self.speeds}


def layouts(replicas: Sequence[int], draft: str | None) -> dict[str, tuple[str, ...]]:
    """Options of `draftwood serve` by the name of a layout; with a draft model, all have it."""
    found: dict[str, tuple[str, ...]] = {}
    drafts = ("--draft", draft) if draft else ()
    found["one process"] = drafts
    for count in replicas:
        plural = "s" if count > 1 else ""
        found[f"{count} replica{plural}"] = ("--ray", "--replicas", str(count), *drafts)
        if draft:
            found[f"{count} replica{plural}, draft actor"] = (
                *("--ray", "--replicas", str(count), *drafts),
                *("--draft-actors", "1"),
            )
    return found


def compare(
    model: str,
    options: Mapping[str, Sequence[str]],
    prompts: Sequence[BenchPrompt],
    plan: LoadPlan,
    on_block: Callable[[str, LoadPoint], None] = lambda layout, point: None,
) -> list[LayoutPoint]:
    """Serves a model in each layout and loads them in turns.

    Args:
        model: which.
        options: of `draftwood serve`, by the name of a layout.
        prompts: to ask.
        plan: of one layout; its blocks are what takes turns.
        on_block: told each block's point.

    Raises:
        ConfigError: a server did not start.
    """
    one_block = replace(plan, num_blocks=1, compare=False)
    blocks: dict[tuple[str, int], list[LoadPoint]] = {}
    with ExitStack() as stack:
        urls = {name: stack.enter_context(served(model, given)) for name, given in options.items()}
        for block in range(plan.num_blocks):
            asked = _others(prompts, block * plan.num_requests)
            for name in list(urls)[:: 1 if block % 2 == 0 else -1]:
                for point in measure(Target.of(urls[name], None), asked, one_block).points:
                    blocks.setdefault((name, point.concurrency), []).append(point)
                    on_block(name, point)
    return [
        LayoutPoint(
            name,
            tuple(options[name]),
            _middle(points),
            tuple(point.tokens_per_s for point in points),
        )
        for (name, _), points in sorted(blocks.items(), key=lambda item: item[0][1])
    ]


def _others(prompts: Sequence[BenchPrompt], start: int) -> list[BenchPrompt]:
    """The prompts from another place on, and none of them word for word as in other blocks."""
    place = start % len(prompts)
    return [
        replace(prompt, turns=(f"{start}. {prompt.turns[0]}", *prompt.turns[1:]))
        for prompt in (*prompts[place:], *prompts[:place])
    ]


def _middle(points: Sequence[LoadPoint]) -> LoadPoint:
    """The point of the block of median speed, with the counts of all."""
    ranked = sorted(points, key=lambda point: point.tokens_per_s)
    return replace(
        ranked[len(ranked) // 2],
        tokens_per_s=statistics.median(point.tokens_per_s for point in points),
        num_requests=sum(point.num_requests for point in points),
        num_failed=sum(point.num_failed for point in points),
    )
