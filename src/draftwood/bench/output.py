"""What commands of `draftwood bench` print besides their tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood.bench.compare import Watch


def print_json(value: Any) -> None:
    """One JSON value on standard output."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


@contextmanager
def progress_bar(total: int) -> Iterator[Watch]:
    """A bar on stderr while it is a terminal.

    Args:
        total: number of runs.

    Yields:
        To be told (prompt, contender) before each run.
    """
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description:32}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with bars.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as display:
        task = display.add_task("warming up", total=total)
        started = False

        def watch(prompt: str, contender: str) -> None:
            nonlocal started
            display.update(task, description=f"{prompt}: {contender}", advance=int(started))
            started = True

        yield watch
