"""A number that a document may quote, and what it is of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# What a number may be of.
CONTENDER, BASE, KIND, STATISTIC, UNIT = "contender", "base", "kind", "statistic", "unit"
CONTEXT, ROWS, AT_ONCE, TIER, TEXT = "context", "rows", "at once", "tier", "text"
PART, SHARE = "part", "share"
MEASURE, QUANTILE = "measure", "quantile"
SPEED, RATIO = "tokens/s", "ratio"


@dataclass(frozen=True, slots=True)
class Derived:
    """A number and what it is of.

    Attributes:
        value: the number.
        of: dimension to what it is of there; a dimension that is missing does not apply.
    """

    value: float
    of: Mapping[str, str]


def numbers(of: Mapping[str, str], values: Iterable[Any]) -> list[Derived]:
    """The values that are numbers, all of the same."""
    return [Derived(float(value), of) for value in values if isinstance(value, int | float)]
