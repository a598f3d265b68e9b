"""What a draft model's forwards take, for drafters that weigh them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

SMALL = 8
"""Rows of a draft model that cost about what one does."""


class ForwardCost(Protocol):
    """Seconds of a model's forward; `engine.costs.CostModel` is one that was measured."""

    def at(self, context: float) -> Callable[[int], float]:
        """Seconds by number of rows, at so many tokens of context."""

    def observe(self, num_rows: int, context: float, seconds: float) -> None:
        """Learns from a forward that ran."""


class Pace:
    """A `ForwardCost` that knows nothing at first: a base and so much a row, whatever the context.

    It stands in where nothing was measured at the start.
    """

    def __init__(self) -> None:
        self._step_s = 0.0
        self._row_s = 0.0

    def at(self, context: float) -> Callable[[int], float]:
        """Seconds by number of rows; 0 before the first forward."""
        return lambda num_rows: self._step_s + self._row_s * max(num_rows - SMALL, 0)

    def observe(self, num_rows: int, context: float, seconds: float) -> None:
        """Learns from one forward; one that took far longer than usual counts little."""
        if num_rows <= SMALL:
            known = self._step_s
            self._step_s += 0.2 * (min(seconds, 3 * known) - known) if known else seconds
        elif num_rows >= 4 * SMALL:
            own = max(seconds - self._step_s, 0.0) / (num_rows - SMALL)
            self._row_s += 0.3 * (own - self._row_s) if self._row_s else own
