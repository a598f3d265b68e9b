"""Text on stdout as it comes, and who watches meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from draftwood.cli.running import Request

if TYPE_CHECKING:
    from draftwood.engine.observers import RoundTimer
    from draftwood.llm import LLM


class Transcript:
    """Shows texts in the order of their requests, each as it comes once it is its turn.

    Args:
        requests: what was asked; several get a heading each.
        hidden: print nothing until `finish`.
    """

    def __init__(self, requests: Sequence[Request], *, hidden: bool) -> None:
        names = [request.id or str(i) for i, request in enumerate(requests, start=1)]
        several = len(names) > 1
        self._waiting = [f"==> {name} <==\n" if several else "" for name in names]
        self._ended = [False] * len(names)
        self._gap = "\n\n" if several else "\n"
        self._turn = 0
        self._hidden = hidden

    def add(self, index: int, text: str, ended: bool) -> None:
        """A piece of a text has come, perhaps its last."""
        self._waiting[index] += text
        self._ended[index] |= ended
        if not self._hidden:
            self._show()

    def finish(self) -> None:
        """Shows what was held back."""
        self._show()

    def _show(self) -> None:
        while self._turn < len(self._waiting):
            text, self._waiting[self._turn] = self._waiting[self._turn], ""
            ended = self._ended[self._turn]
            if text or ended:
                write(text + (self._gap if ended else ""))
            if not ended:
                return
            self._turn += 1


def write(text: str) -> None:
    """Text to stdout, at once; what the terminal cannot show becomes a question mark."""
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


@contextmanager
def observe(llm: LLM, *, show_tree: bool) -> Iterator[RoundTimer]:
    """Times the rounds meanwhile and, if wanted, prints their trees to stderr."""
    from rich.console import Console

    from draftwood.cli.tree_view import TreeView
    from draftwood.engine.observers import Observer, RoundTimer

    timer = RoundTimer()
    watching: list[Observer] = [timer]
    if show_tree:
        watching.append(TreeView(llm.tokenizer, Console(stderr=True, highlight=False)))
    llm.engine.observers.extend(watching)
    try:
        yield timer
    finally:
        for observer in watching:
            llm.engine.observers.remove(observer)
