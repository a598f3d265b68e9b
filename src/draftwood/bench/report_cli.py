"""`draftwood bench report`: a page with plots from records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwood.errors import ConfigError


def report(
    records: Annotated[
        list[Path] | None,
        typer.Argument(help="Files that bench commands wrote with --out.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    plots: Annotated[Path | None, typer.Option(help="A folder for the plots as PNG files.")] = None,
    readme: Annotated[
        Path | None,
        typer.Option(help="A document whose part `<!-- bench report: ... -->` is made anew."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="The folder of the records it names.")] = Path(
        "benchmarks/records"
    ),
) -> None:
    """Make one self-contained HTML page with plots from records of any bench command.

    With --readme make the table and the picture of a README from the records that it names; `bench check` says when they are stale.
    """  # noqa: E501
    from draftwood.bench.readme import update
    from draftwood.bench.record_file import load_record
    from draftwood.bench.report import make_report

    if not records and readme is None:
        raise ConfigError("there is nothing to report: name records, or a document with --readme")
    if records:
        make_report([load_record(path) for path in records], out, plots)
        print(f"wrote {out}" + (f" and plots into {plots}" if plots else ""))
    if readme is not None:
        print(f"wrote {' and '.join(str(path) for path in update(readme, folder))}")
