"""How large a tree is worth verifying: expected tokens against measured cost.

A node's score is the estimated probability that verification reaches it, so a tree is expected to
yield `1 + sum(scores of its draft nodes)` tokens. Verifying costs what the target needs for that
many rows. The best size maximises tokens per second (OPT-Tree, arXiv 2406.17276, with costs).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftwood.tree.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of one forward by number of rows, linear between measured points.

    Attributes:
        rows: measured numbers of rows, ascending.
        seconds: what each took.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, num_rows: int) -> float:
        """Seconds for `num_rows`; beyond the table by its last slope."""
        if len(self.rows) == 1:
            return self.seconds[0] * num_rows / self.rows[0]
        i = min(max(bisect_left(self.rows, num_rows), 1), len(self.rows) - 1)
        x0, x1 = self.rows[i - 1], self.rows[i]
        y0, y1 = self.seconds[i - 1], self.seconds[i]
        return max(y0 + (y1 - y0) * (num_rows - x0) / (x1 - x0), 0.0)


def best_size(
    trees: Sequence[TokenTree],
    cost: Callable[[int], float],
    *,
    trust: float = 1.0,
    other_rows: int = 0,
    overhead_s: float = 0.0,
) -> tuple[int, float]:
    """How many draft nodes, over all trees together, maximise tokens per second.

    Args:
        trees: candidates of the sequences that decode in this round.
        cost: seconds of a forward by number of rows.
        trust: factor on the trees' scores, from how such promises were kept so far.
        other_rows: rows in the same forward that are needed anyway (prompt chunks). What they take
            is no part of the speed: a round that is long for their sake is no reason to draft more,
            as the tokens that a draft saves are decoded in other rounds.
        overhead_s: seconds of the round besides the forward that do not depend on the size.

    Returns:
        The number of draft nodes, 0 for plain decoding; and how many times the speed of a round
        that had not drafted at all this is expected to give. Below 1 the drafting was a loss.
    """
    scores = sorted((score for tree in trees for score in tree.scores[1:]), reverse=True)
    base = len(trees) + other_rows
    expected = float(len(trees))
    plain_s = cost(len(trees))
    others_s = cost(base) - plain_s
    plain_rate = expected / plain_s
    best_rate, best = expected / (plain_s + overhead_s), 0
    for size, score in enumerate(scores, start=1):
        expected += score * trust
        rate = expected / (cost(base + size) - others_s + overhead_s)
        if rate > best_rate:
            best_rate, best = rate, size
    return best, best_rate / plain_rate
