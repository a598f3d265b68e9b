"""`draftwood bench check`: documents against records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def check(
    documents: Annotated[
        list[Path] | None,
        typer.Argument(help="Markdown files.", show_default="README.md docs/*.md"),
    ] = None,
    records: Annotated[Path, typer.Option(help="The folder of records.")] = Path(
        "benchmarks/records"
    ),
) -> None:
    """Check that the numbers in documents are those of the records they name; exit 1 if not.

    "Record: `x.jsonl`" under a heading names the record of that section's tables and prose; a column "record" names one for each row. `<!-- no record -->` exempts what follows.
    """  # noqa: E501
    from draftwood.bench.check import Records, check_document

    folder = Records(records)
    paths = documents or [Path("README.md"), *sorted(Path("docs").glob("*.md"))]
    faults = [(path, fault) for path in paths for fault in check_document(path, folder)]
    for path, fault in faults:
        print(f"{path}:{fault.line}: {fault.message}")
    if faults:
        raise typer.Exit(1)
    print(f"{', '.join(str(path) for path in paths)}: all numbers are in their records")
