"""An ablation for a person: what each part brings, and where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftwood.bench.ablate_summary import AblationLine
from draftwood.bench.intervals import interval_text
from draftwood.bench.tables import titled

_BUSY = 0.1
_LEGEND = (
    "x plain: decoding speed over plain decoding's at the same workload; of all parts: over that of"
    " all parts there. Medians over groups of prompts, with 95 % bootstrap intervals."
)


def ablation_tables(lines: Sequence[AblationLine]) -> RenderableType:
    """A table, and what to know of it."""
    return Group(
        titled("Which part brings what", _table(lines)),
        Text(_LEGEND),
        *(Text(line) for line in _notes(lines)),
    )


def _table(lines: Sequence[AblationLine]) -> Table:
    table = Table()
    table.add_column("changed", no_wrap=True)
    for column in ("tokens/s", "x plain (95 %)", "of all parts (95 %)", "a round"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("same texts", justify="right", no_wrap=True)
    workload = lines[0].workload if lines else None
    for line in lines:
        if line.workload != workload:
            table.add_section()
            workload = line.workload
        table.add_row(
            line.part,
            "" if line.decode_tokens_per_s is None else f"{line.decode_tokens_per_s:.1f}",
            *("" if one is None else interval_text(one) for one in (line.to_plain, line.to_full)),
            f"{line.tokens_per_round:.2f}",
            f"{line.num_identical} of {line.num_texts}" if line.num_texts else "",
        )
    return table


def _notes(lines: Sequence[AblationLine]) -> Iterable[str]:
    busy = max((line.neighbours or 0.0 for line in lines), default=0.0)
    if busy > _BUSY:
        yield (
            f"Other processes kept {busy:.1f} cores busy meanwhile: measure again when the machine"
            " is quiet."
        )
