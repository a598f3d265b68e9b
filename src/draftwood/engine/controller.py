"""How many nodes a round verifies.

The controller knows what a forward costs by its number of rows (measured at the start, corrected as
rounds go by) and how far the drafter's promises were kept. From both it takes the size that
maximises expected tokens per second. Nothing is a legal choice: then the round is plain decoding,
and small probes find out, ever more rarely, whether drafting has become worthwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from draftwood.engine.costs import CostModel
from draftwood.tree import TokenTree
from draftwood.tree.shape import best_size
from draftwood.tree.token_tree import pack_best

_PROBE_NODES = 2
_PROBE_EVERY = 8  # times that no node pays
_MAX_REST = 64
_REMEMBERED = 9  # rounds
_DEAR = 0.5  # drafting that takes this share of a forward may rest for the longest time


@dataclass(slots=True)
class Controller:
    """Chooses tree sizes.

    Attributes:
        cost: what a target forward costs; None verifies whatever is proposed.
        max_nodes: most draft nodes per sequence and round.
        trust: accepted draft tokens over promised ones, as a moving average.
        draft_s: seconds of drafting a round, the median of the last ones: a long prompt that a
            draft model reads once must not speak for the rounds behind it. Before the first it is
            what the drafter expects.
        gain: speed over plain decoding that rounds with a draft were expected to give, as a moving
            average; below 1 drafting rests.
        sizes: how often each number of nodes was chosen.
        num_drafted_rounds: rounds that verified a draft.
        num_expected, num_accepted: draft tokens expected to be accepted in them, and those that
            were.
    """

    cost: CostModel | None
    max_nodes: int
    trust: float = 1.0
    draft_s: float = 0.0
    sizes: dict[int, int] = field(default_factory=dict)
    num_drafted_rounds: int = 0
    num_expected: float = 0.0
    num_accepted: int = 0
    gain: float = 1.0
    _draft_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _unpaid: int = 0
    _resting: int = 0
    _rest: int = 0

    def budget(self) -> int:
        """Draft nodes a sequence may propose in this round; 0 while drafting rests."""
        if self._resting > 0:
            self._resting -= 1
            return 0
        return self.max_nodes

    def choose(
        self,
        trees: Sequence[TokenTree],
        other_rows: int = 0,
        room: int = 1 << 30,
        context: float = 0.0,
    ) -> list[TokenTree]:
        """Cuts the proposed trees to the size that pays.

        Args:
            trees: one per sequence that decodes.
            other_rows: rows in the same forward that are needed anyway.
            room: most draft nodes the forward can take.
            context: tokens of context, averaged over the sequences.
        """
        proposed = sum(len(tree) - 1 for tree in trees)
        if proposed > room:
            trees = pack_best(trees, room)
        if proposed == 0 or room == 0 or self.cost is None:
            return list(trees)
        cost = self.cost.at(context)
        size, gain = best_size(
            trees,
            cost,
            trust=self.trust,
            other_rows=other_rows,
            overhead_s=self.draft_s,
        )
        self.sizes[size] = self.sizes.get(size, 0) + 1
        self.gain += 0.25 * (gain - self.gain)
        # What this round's draft took is spent, so the size that is best now is verified.
        if gain >= 1:
            self._rest = 0
        elif self.gain < 1:
            self._begin_rest(self.draft_s / cost(len(trees)))
        return pack_best(trees, size if size > 0 else self._probe())

    def observe(self, trees: Sequence[TokenTree], num_accepted: int, draft_s: float) -> None:
        """Learns from a round in which something was drafted."""
        promised = sum(sum(tree.scores[1:]) for tree in trees)
        self.num_drafted_rounds += 1
        self.num_expected += promised * self.trust
        self.num_accepted += num_accepted
        if promised > 0:
            # Weighted by the promise: a round that promised little says little.
            weight = min(0.05 * promised, 0.2)
            self.trust += weight * (min(num_accepted / promised, 2.0) - self.trust)
        self._draft_s.append(draft_s)
        self.draft_s = median_low(self._draft_s)

    def view(self) -> dict[str, Any]:
        """What it believes and what it did, for people and for JSON."""
        cost = self.cost
        return {
            "tree_sizes": {str(size): self.sizes[size] for size in sorted(self.sizes)},
            "num_drafted_rounds": self.num_drafted_rounds,
            "num_expected": round(self.num_expected, 2),
            "num_accepted": self.num_accepted,
            "trust": self.trust,
            "draft_s": self.draft_s,
            "cost_rows": list(cost.near.rows) if cost else None,
            "cost_s": list(cost.near.seconds) if cost else None,
            "pace": cost.pace if cost else None,
        }

    def _probe(self) -> int:
        """Nodes to verify where none would pay: now and then a few, to see whether that is so."""
        self._unpaid += 1
        return _PROBE_NODES if self._unpaid % _PROBE_EVERY == 1 else 0

    def _begin_rest(self, price: float) -> None:
        """Drafting does not pay now: it rests, twice as long as last time.

        Args:
            price: seconds of drafting over those of a plain forward. Cheap drafting rests for a few
                rounds only, so that it is there when the text begins to repeat itself.
        """
        longest = max(1, min(_MAX_REST, round(_MAX_REST * price / _DEAR)))
        self._rest = min(max(2 * self._rest, 1), longest)
        self._resting = self._rest
