"""`draftwood bench diff`: two records against each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwood.bench.options import AsJson
from draftwood.bench.output import print_json

if TYPE_CHECKING:
    from rich.table import Table

    from draftwood.bench.regression import Change


def diff(
    before: Annotated[Path, typer.Argument(help="The older record.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="The newer record.", show_default=False)],
    ratios: Annotated[
        bool,
        typer.Option("--ratios", help="Compare speed-ups over plain: for unlike machines."),
    ] = False,
    tolerance: Annotated[
        float, typer.Option(help="So much slower is still equal.", min=0.0, max=0.9)
    ] = 0.02,
    as_json: AsJson = False,
) -> None:
    """Compare two records prompt by prompt; exit 1 if something became slower beyond chance.

    Shown are medians and the median ratio with its 95 % bootstrap interval, by contender and kind. A line is a regression when its whole interval lies below 1 by more than the tolerance; with fewer than three prompts there is no interval and no verdict.
    """  # noqa: E501
    from draftwood.bench.record_file import load_record
    from draftwood.bench.regression import compare_records, differences
    from draftwood.bench.tables import console

    old, new = load_record(before), load_record(after)
    changes = compare_records(old, new, to_plain=ratios, tolerance=tolerance)
    if as_json:
        print_json([change.to_json() for change in changes])
    else:
        for line in differences(old, new):
            print(line)
        console().print(_table(changes, ratios))
    if any(change.slower for change in changes):
        raise typer.Exit(1)


def _table(changes: Sequence[Change], ratios: bool) -> Table:
    from rich.table import Table

    table = Table(title="Speed-ups over plain" if ratios else "Decoding, tokens/s (medians)")
    table.add_column("")
    table.add_column("kind")
    for column in ("before", "after", "ratio", "95 %", "prompts", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for change in changes:
        one = change.ratio
        table.add_row(
            change.contender,
            change.kind,
            f"{change.before:.2f}",
            f"{change.after:.2f}",
            f"{one.value:.3f}",
            "" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}",
            str(one.count),
            "slower" if change.slower else "",
        )
    return table
