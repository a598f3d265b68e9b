"""`draftwood bench report`: a page with plots from records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    records: Annotated[
        list[Path],
        typer.Argument(help="Files that bench commands wrote with --out.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    plots: Annotated[Path | None, typer.Option(help="A folder for the plots as PNG files.")] = None,
) -> None:
    """Make one self-contained HTML page with plots from records of any bench command."""
    from draftwood.bench.record_file import load_record
    from draftwood.bench.report import make_report

    make_report([load_record(path) for path in records], out, plots)
    print(f"wrote {out}" + (f" and plots into {plots}" if plots else ""))
