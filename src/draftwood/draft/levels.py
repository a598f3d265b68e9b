"""Growing trees with a draft model, level by level.

The most promising leaves of all sequences are run through the draft model in one forward, each
names its likeliest children, and so on while that promises something (EAGLE-2, arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftwood.attention import Work
from draftwood.draft.base import DraftContext
from draftwood.draft.pace import ForwardCost
from draftwood.draft.runner import CHUNK, DraftKV, DraftRunner, expansion
from draftwood.kv import Plane
from draftwood.models.base import Model
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder

BRANCHES = 4
_WIDTH = 4
_MAX_DEPTH = 8
_MIN_SCORE = 0.1

MAX_EXPANDED = _WIDTH * _MAX_DEPTH
"""Slots that the nodes of one tree take at most, the root not counted."""


@dataclass(slots=True)
class Growth:
    """A tree while it grows, in the draft model's tokens.

    Attributes:
        seq: for whom.
        kv: the draft's KV of the sequence, with room for the tree.
        ids: the sequence as the draft model reads it; the last one is the root.
        builder: all nodes so far.
        budget: most draft nodes.
        max_depth: depth below which the draft model has no positions.
        base: position of the root.
        expanded: nodes with KV, in slot order; the root first.
        depths: depth of each node of `builder`.
    """

    seq: DraftContext
    kv: DraftKV
    ids: Sequence[int]
    budget: int
    max_depth: int
    builder: TreeBuilder = field(init=False)
    base: int = field(init=False)
    expanded: list[int] = field(default_factory=lambda: [0])
    depths: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        self.builder = TreeBuilder(self.ids[-1])
        self.base = len(self.ids) - 1

    def add(self, parent: int, token: int, score: float, label: str) -> None:
        """Adds a leaf."""
        if self.builder.add(parent, token, score, label) == len(self.depths):
            self.depths.append(self.depths[parent] + 1)

    def frontier(self, max_depth: int) -> list[int]:
        """The leaves worth running through the draft model next."""
        max_depth = min(max_depth, self.max_depth)
        if len(self.builder) > self.budget:
            # A leaf outside the best `budget` nodes cannot have a child inside.
            floor = sorted(self.builder.scores, reverse=True)[self.budget]
        else:
            floor = 0.0
        done = set(self.expanded)
        scores = self.builder.scores
        leaves = [
            node
            for node in range(len(self.builder))
            if node not in done
            and self.depths[node] < max_depth
            and scores[node] >= max(floor, _MIN_SCORE)
        ]
        return sorted(sorted(leaves, key=lambda node: -scores[node])[:_WIDTH])

    def expanded_tree(self, fresh: Sequence[int]) -> TokenTree:
        """The tree of the nodes with KV and those about to get it, in slot order."""
        order = [*self.expanded, *fresh]
        place = {node: i for i, node in enumerate(order)}
        place[-1] = -1
        b = self.builder
        return TokenTree(
            tuple(b.tokens[node] for node in order),
            tuple(place[b.parents[node]] for node in order),
            tuple(b.scores[node] for node in order),
            tuple(b.sources[node] for node in order),
        )

    def accepted(self, tokens: Sequence[int]) -> list[int]:
        """Places in slot order of the nodes with KV that `tokens` run through, the root first."""
        place = {node: i for i, node in enumerate(self.expanded)}
        node, path = 0, [0]
        for token in tokens:
            child = self.builder.child(node, token)
            if child is None or child not in place:
                break
            path.append(place[child])
            node = child
        return path


Branch = Callable[[Growth, Sequence[int], Tensor], None]
"""Gives nodes of a growth their likeliest children, from the draft's logits at each, [N, V]."""


class LevelGrower:
    """Runs a draft model over growing trees.

    Args:
        model: the draft model.
        plane: where its KV lies.
        cost: what a forward takes; None for unknown.
    """

    def __init__(self, model: Model, plane: Plane, cost: ForwardCost | None = None) -> None:
        self._runner = DraftRunner(model, plane, cost)

    def round_s(self, mean_accepted: float) -> float:
        """Seconds that growing one sequence's tree is expected to take; 0 where costs are unknown.

        `mean_accepted` is that of `grow`.
        """
        cost = self._runner.cost
        return _num_levels(mean_accepted) * cost.at(0)(_WIDTH) if cost else 0.0

    def grow(self, growths: Sequence[Growth], branch: Branch, mean_accepted: float) -> None:
        """Grows all trees together, one forward per level.

        `mean_accepted`, draft tokens that were right in a round of late, says how deep it pays.
        """
        for growth, logits in zip(growths, self._catch_up(growths), strict=True):
            branch(growth, [0], logits)
        max_depth = _num_levels(mean_accepted)
        for _ in range(max_depth - 1):
            fresh = [(growth, growth.frontier(max_depth)) for growth in growths]
            fresh = [(growth, nodes) for growth, nodes in fresh if nodes]
            if not fresh:
                return
            logits = self._runner.forward([_expansion(growth, nodes) for growth, nodes in fresh])
            rows = torch.split(logits, [len(nodes) for _, nodes in fresh])
            for (growth, nodes), own in zip(fresh, rows, strict=True):
                growth.expanded.extend(nodes)
                branch(growth, nodes, own)

    def read(self, growth: Growth) -> None:
        """Computes the KV of all that stands before the root."""
        self._runner.read(growth.kv, growth.ids, growth.base)

    def _catch_up(self, growths: Sequence[Growth]) -> list[Tensor]:
        """Runs the draft model over what it has not seen; logits at each root, [1, V]."""
        logits: dict[int, Tensor] = {}
        while len(logits) < len(growths):
            works, computed, finals, left = [], [], [], CHUNK
            for i, growth in enumerate(growths):
                if i in logits or left == 0:
                    continue
                # The root is always run: its logits are wanted even where its KV is known.
                start = min(growth.kv.computed, growth.base)
                size = min(len(growth.ids) - start, left)
                left -= size
                last = start + size == len(growth.ids)
                rows = (size - 1,) if last else ()
                ids = growth.ids[start : start + size]
                works.append(Work(growth.kv.lease, start, ids, None, rows))
                computed.append((growth.kv, start + size))
                finals += [i] if last else []
            rows_out = self._runner.forward(works)
            for kv, length in computed:
                kv.computed = length
            logits.update({i: rows_out[row : row + 1] for row, i in enumerate(finals)})
        return [logits[i] for i in range(len(growths))]


def _num_levels(mean_accepted: float) -> int:
    return min(_MAX_DEPTH, round(mean_accepted) + 2)


def _expansion(growth: Growth, nodes: Sequence[int]) -> Work:
    tree = growth.expanded_tree(nodes)
    return expansion(growth.kv, growth.base, tree, len(growth.expanded))
