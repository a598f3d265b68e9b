"""How far a measured number may be trusted: bootstrap intervals (Efron 1979), the percentile kind.

Prompts are drawn with replacement from those that were measured, and the statistic is taken anew;
the middle 95 % of what comes out is the interval. It says how much depends on the choice of
prompts, and nothing about a machine that was busy the whole time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# Takes [draws, prompts, columns] and gives [draws].
Statistic = Callable[[Array], Array]
_DRAWS = 2000
_LEVEL = 0.95
# Fewer values than this are all that can be said of them.
_LEAST = 3


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic and its interval.

    Attributes:
        value: of what was measured.
        low, high: the ends of the interval; None when there were fewer than three values.
        count: values.
    """

    value: float
    low: float | None
    high: float | None
    count: int


def mean(values: Array) -> Array:
    """The mean of the only column."""
    result: Array = values[:, :, 0].mean(axis=1)
    return result


def middle(values: Array) -> Array:
    """The median of the only column."""
    result: Array = np.median(values[:, :, 0], axis=1)
    return result


def ratio_of_means(values: Array) -> Array:
    """The first column's mean over the second's."""
    means = values.mean(axis=1)
    result: Array = means[:, 0] / means[:, 1]
    return result


def estimate(values: Sequence[float] | Sequence[Sequence[float]], statistic: Statistic) -> Estimate:
    """A statistic of values with its interval; the same values always give the same one.

    Args:
        values: one number, or one row of numbers, for each prompt; not empty.
        statistic: what to take.
    """
    table = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
    value = float(statistic(table[None])[0])
    if len(table) < _LEAST:
        return Estimate(value, None, None, len(table))
    drawn = np.random.default_rng(0).integers(len(table), size=(_DRAWS, len(table)))
    tails = 50 * (1 - _LEVEL)
    low, high = np.percentile(statistic(table[drawn]), [tails, 100 - tails])
    return Estimate(value, float(low), float(high), len(table))


def interval_text(one: Estimate) -> str:
    """A statistic with its interval, for a table."""
    if one.low is None or one.high is None:
        return f"{one.value:.2f}"
    return f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})"
