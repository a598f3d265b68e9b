"""What peers achieved, for a person."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftwood.bench.peers import OURS

_BUSY = 0.1
_COLUMNS = (
    *("n", "whole", "decode", "x plain", "whole x", "x llama", "whole x"),
    *("true", "same"),
)
_LEGEND = (
    "n: prompts. whole: the prompt included. true: drafted tokens that came true. same: texts that "
    "are those of its own system's plain decoding."
)


def peer_tables(summary: dict[str, Any]) -> RenderableType:
    """The tables of a `summary` line of `bench peers`."""
    parts: list[RenderableType] = [_speeds(summary["contenders"])]
    if summary["best_llama"] is not None:
        parts.append(_by_kind(summary["contenders"], summary["best_llama"]))
    parts.extend(Text(line) for line in _notes(summary))
    return Group(*parts)


def _speeds(contenders: dict[str, Any]) -> Table:
    table = Table(
        title="Speed: tokens/s (median), and how many times our plain one and llama.cpp's best "
        "(mean of kinds)"
    )
    table.add_column("", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, one in contenders.items():
        table.add_row(
            name,
            str(one["num_prompts"]),
            _number(one["tokens_per_s"], 1),
            _number(one["decode_tokens_per_s"], 1),
            *(_mean(one["to_plain"][part]) for part in ("decode", "total")),
            *(_mean(one["to_llama"][part]) for part in ("decode", "total")),
            _acceptance(one),
            _same(one["texts"]),
        )
    return table


def _by_kind(contenders: dict[str, Any], best: str) -> Table:
    """Ours over llama.cpp's best, the decoding speed by kind."""
    table = Table(title=f"Decoding speed over {best}, by kind")
    table.add_column("kind")
    ratios = {
        name: one["to_llama"]["decode"]
        for name, one in contenders.items()
        if one.get("system") == OURS and one["to_llama"]["decode"]
    }
    for name in ratios:
        table.add_column(name, justify="right")
    for kind in dict.fromkeys(kind for one in ratios.values() for kind in one["by_kind"]):
        table.add_row(kind, *(_number(one["by_kind"].get(kind), 2) for one in ratios.values()))
    return table


def _notes(summary: dict[str, Any]) -> Iterable[str]:
    yield _LEGEND
    if summary["best_llama"] is not None:
        yield f"The best of llama.cpp is {summary['best_llama']!r}."
    for one in summary["absent"]:
        yield f"{one['name']} is missing: {one['reason']}"
    for one in summary["skipped"]:
        yield f"{one['prompt']} was skipped: {one['reason']}"
    busy = max((one["neighbours"] or 0.0 for one in summary["contenders"].values()), default=0.0)
    if busy > _BUSY:
        yield (
            f"Other processes kept {busy:.1f} cores busy meanwhile: "
            "measure again when the machine is quiet."
        )
    if summary["interrupted"]:
        yield "Interrupted: the tables show what was done until then."


def _acceptance(one: dict[str, Any]) -> str:
    """The share of drafted tokens that came true."""
    rounds, share = one["rounds"], one.get("view", {}).get("acceptance")
    if rounds and rounds["nodes_per_round"]:
        share = (rounds["mean_acceptance_length"] - 1) / rounds["nodes_per_round"]
    return "" if share is None else f"{100 * share:.0f}%"


def _same(texts: dict[str, Any]) -> str:
    return f"{texts['num_identical']}/{texts['num_compared']}" if texts["num_compared"] else ""


def _mean(ratios: dict[str, Any] | None) -> str:
    return _number(ratios["mean"] if ratios else None, 2)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
