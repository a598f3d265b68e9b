"""How long work reports itself: a callable, and two ways to show it.

Library code never prints. It calls a `Progress` with a stage, how much is done and how much there
is; whoever started the work decides whether anybody sees it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from draftwood.cache import human_bytes


class Progress(Protocol):
    """Called as work proceeds: `stage` names it, `done` of `total` bytes are finished.

    `done` never falls within a stage. `total` is 0 when the amount is unknown, as while waiting
    for another process. It may raise to cancel the work: nothing is left behind then.
    """

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


def silent(stage: str, done: int, total: int, /) -> None:
    """A `Progress` that shows nothing."""


class LineProgress:
    """One plain line for every 10 % of a stage: for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._shown: dict[str, int] = {}

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        tenth = 10 * done // total if total else 0
        if tenth <= self._shown.get(stage, -1):
            return
        self._shown[stage] = tenth
        amount = f" {10 * tenth:3d} % of {human_bytes(total)}" if total else ""
        print(f"{stage}{amount}", file=self._stream, flush=True)


@contextmanager
def shown_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """A `Progress` for a person: a bar on a terminal, else plain lines; on stderr by default."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield LineProgress(stream)
        return
    with _bar(stream) as progress:
        yield progress


@contextmanager
def _bar(stream: TextIO) -> Iterator[Progress]:
    # Imported here: rich costs 0.1 s, which a resolve from the cache should not pay.
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=False),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(file=stream), transient=True) as display:
        tasks: dict[str, bars.TaskID] = {}

        def update(stage: str, done: int, total: int, /) -> None:
            if stage not in tasks:
                tasks[stage] = display.add_task(stage, total=total or None)
            display.update(tasks[stage], completed=done, total=total or None)

        yield update
