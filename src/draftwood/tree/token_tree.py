"""An immutable tree of candidate tokens.

Node 0 is the root: the last committed token, whose KV is not computed yet. Every other node is a
guess for the token that follows its parent. Parents come before children, siblings carry different
tokens, and a node's score (the drafter's estimate of the chance that verification reaches it) never
exceeds its parent's. So the n best nodes are always a connected tree, and a path from the root is
an increasing sequence of node indices: the two facts that `best` and the KV commit rest on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=True)
class TokenTree:
    """Candidate continuations of one sequence.

    Attributes:
        tokens: token id of each node; `tokens[0]` is the root.
        parents: index of each node's parent; -1 for the root, and `parents[i] < i`.
        scores: estimated probability that the node is accepted; 1.0 for the root.
        sources: who proposed each node; "" for the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    sources: tuple[str, ...]

    @staticmethod
    def root(token: int) -> TokenTree:
        """The tree of one node: plain decoding."""
        return TokenTree((token,), (-1,), (1.0,), ("",))

    @staticmethod
    def chain(tokens: Sequence[int], source: str = "", decay: float = 1.0) -> TokenTree:
        """A tree without branches; node i has score `decay ** i`."""
        n = len(tokens)
        return TokenTree(
            tuple(tokens),
            tuple(range(-1, n - 1)),
            tuple(decay**i for i in range(n)),
            ("",) + (source,) * (n - 1),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
        }

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the one before it."""
        return self.parents == tuple(range(-1, len(self) - 1))

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, if there is one."""
        return self._children.get((node, token))

    def path(self, node: int) -> tuple[int, ...]:
        """Node indices from the root to `node`, both included; strictly increasing."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def mask(self, first: int = 0) -> NDArray[np.bool_]:
        """[T - first, T] booleans, for the nodes from `first` on: who is an ancestor, or itself."""
        if first > 0:
            rows = np.zeros((len(self) - first, len(self)), dtype=np.bool_)
            for row, node in zip(rows, range(first, len(self)), strict=True):
                row[list(self.path(node))] = True
            return rows
        mask = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node, :node] = mask[parent, :node]
        return mask

    def best(self, n: int) -> TokenTree:
        """The `n` nodes of highest score (root included), ancestors first; ties by depth, order."""
        if n >= len(self):
            return self
        depths = self.depths
        ranked = sorted(range(len(self)), key=lambda i: (-self.scores[i], depths[i], i))
        return self.keep(ranked[: max(n, 1)])

    def clip(self, depth: int) -> TokenTree:
        """The nodes down to `depth`."""
        if max(self.depths) <= depth:
            return self
        return self.keep(node for node, d in enumerate(self.depths) if d <= depth)

    def below(self, tokens: Sequence[int]) -> TokenTree:
        """This tree behind a chain of `tokens`, whose first one becomes the root."""
        n = len(tokens)
        return TokenTree(
            (*tokens, *self.tokens),
            (*range(-1, n), *(parent + n for parent in self.parents[1:])),
            (1.0,) * n + self.scores,
            ("",) * n + self.sources,
        )

    def keep(self, nodes: Iterable[int]) -> TokenTree:
        """The subtree of `nodes`, which must hold the root and be closed under parents."""
        kept = sorted(set(nodes))
        new_index = {old: new for new, old in enumerate(kept)}
        new_index[-1] = -1
        return TokenTree(
            tuple(self.tokens[i] for i in kept),
            tuple(new_index[self.parents[i]] for i in kept),
            tuple(self.scores[i] for i in kept),
            tuple(self.sources[i] for i in kept),
        )

    def merge(self, other: TokenTree) -> TokenTree:
        """Both trees in one: nodes with equal token paths become one, with the higher score.

        Raises:
            ValueError: the roots carry different tokens.
        """
        if self.tokens[0] != other.tokens[0]:
            raise ValueError("trees with different roots cannot be merged")
        builder = TreeBuilder.of(self)
        place = {0: 0}
        for node in range(1, len(other)):
            place[node] = builder.add(
                place[other.parents[node]],
                other.tokens[node],
                other.scores[node],
                other.sources[node],
            )
        return builder.build()


class TreeBuilder:
    """Grows a tree node by node; adding a path that exists keeps the better score.

    Scores are clipped to the parent's, so that what comes out satisfies the tree's invariants
    whatever a drafter says.
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.scores = [1.0]
        self.sources = [""]
        self._children: dict[tuple[int, int], int] = {}

    @staticmethod
    def of(tree: TokenTree) -> TreeBuilder:
        """A builder that already holds `tree`."""
        builder = TreeBuilder(tree.tokens[0])
        for node in range(1, len(tree)):
            builder.add(
                tree.parents[node], tree.tokens[node], tree.scores[node], tree.sources[node]
            )
        return builder

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, if there is one."""
        return self._children.get((node, token))

    def add(self, parent: int, token: int, score: float, source: str = "") -> int:
        """Adds a child of `parent` (or finds it) and returns its index."""
        score = min(score, self.scores[parent])
        node = self._children.get((parent, token))
        if node is None:
            node = len(self.tokens)
            self._children[parent, token] = node
            self.tokens.append(token)
            self.parents.append(parent)
            self.scores.append(score)
            self.sources.append(source)
        elif score > self.scores[node]:
            self.scores[node] = score
            self.sources[node] = source
        return node

    def build(self) -> TokenTree:
        """The finished tree."""
        return TokenTree(
            tuple(self.tokens), tuple(self.parents), tuple(self.scores), tuple(self.sources)
        )


def pack_best(trees: Sequence[TokenTree], num_nodes: int) -> list[TokenTree]:
    """Shares `num_nodes` draft nodes (roots not counted) among trees, best scores first."""
    heap = [
        (-tree.scores[node], tree.depths[node], which, node)
        for which, tree in enumerate(trees)
        for node in range(1, len(tree))
    ]
    heapq.heapify(heap)
    kept: list[list[int]] = [[0] for _ in trees]
    for _ in range(min(num_nodes, len(heap))):
        _, _, which, node = heapq.heappop(heap)
        kept[which].append(node)
    return [tree.keep(nodes) for tree, nodes in zip(trees, kept, strict=True)]
