"""The leaderboard's table, and beside it what it leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftwood.bench.spec import GROUPS
from draftwood.bench.tables import titled

_LEGEND = (
    "Mean speed of the questions over plain decoding's at the same, prompts included. MAT: tokens"
    " a verification gave, the target's own among them."
)


def spec_tables(summary: dict[str, Any]) -> RenderableType:
    """Speed-ups and, below, accepted tokens by group; then what was skipped or differs."""
    lines: dict[str, Any] = summary["spec"]
    parts: list[RenderableType] = [
        titled("Spec-Bench: speed-up over plain decoding", _speedups(lines)),
        Text(_LEGEND),
        titled(
            "Mean accepted tokens by group; mean speed; texts that are plain decoding's",
            _accepted(lines),
        ),
        *(Text(line) for line in _notes(summary)),
    ]
    return Group(*parts)


def _speedups(lines: dict[str, Any]) -> Table:
    table = _table("MAT", "Overall")
    for name, one in lines.items():
        table.add_row(
            name,
            *(_times(one["speedup"].get(group)) for group in GROUPS),
            _number(one["mean_accepted_tokens"]["overall"]),
            _times(one["speedup"]["overall"]),
        )
    return table


def _accepted(lines: dict[str, Any]) -> Table:
    table = _table("tokens/s", "same")
    for name, one in lines.items():
        accepted, speed = one["mean_accepted_tokens"], one["tokens_per_s"]
        table.add_row(
            name,
            *(_number(accepted.get(group)) for group in GROUPS),
            "" if speed is None else f"{speed:.1f}",
            f"{one['num_identical']}/{one['num_compared']}" if one["num_compared"] else "",
        )
    return table


def _table(*more: str) -> Table:
    table = Table(padding=(0, 0))
    table.add_column("", no_wrap=True)
    for column in (*(name.replace(" ", "\n") for name in GROUPS.values()), *more):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _notes(summary: dict[str, Any]) -> Iterable[str]:
    for name, one in summary["contenders"].items():
        for difference in one["texts"]["differences"]:
            yield (
                f"{name} differs from plain at {difference['prompt']}, token"
                f" {difference['position']}: the target's best two are"
                f" {difference['margin']:.2g} apart there"
            )
    for skip in summary["skipped"]:
        yield f"{skip['prompt']} was skipped: {skip['reason']}"
    if summary["interrupted"]:
        yield "Interrupted: started again with the same --out, it goes on from here."


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
