"""A tree whose scores change with the evidence: lookups' guesses, rated by a draft model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from draftwood.draft.grow import Calibrator
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder


@dataclass(slots=True)
class _Node:
    """A guess and what is known of it.

    Attributes:
        token: its id.
        parent: index of its parent, -1 for the root.
        score: estimated probability that verification reaches it.
        label: the kind of evidence behind `score / parent's score`.
        children: index by token.
        asked: whether the draft model has said what follows.
    """

    token: int
    parent: int
    score: float
    label: str
    children: dict[int, int] = field(default_factory=dict)
    asked: bool = False


class RatedTree:
    """A tree while it grows; nodes keep their indices, scores change with the evidence.

    Args:
        tree: what is proposed without the model.
        budget: most draft nodes of the finished tree.
        base: position of the root.
    """

    def __init__(self, tree: TokenTree, budget: int, base: int) -> None:
        self.budget = budget
        self.base = base
        self.nodes: list[_Node] = []
        self.order: list[int] = []  # nodes with draft KV, in slot order; the root first
        rows = zip(tree.tokens, tree.parents, tree.scores, tree.sources, strict=True)
        for token, parent, score, label in rows:
            self._add(parent, token, score, label)

    def _add(self, parent: int, token: int, score: float, label: str) -> None:
        if parent >= 0:
            self.nodes[parent].children[token] = len(self.nodes)
        self.nodes.append(_Node(token, parent, score, label))

    def scores(self) -> list[float]:
        """Of all draft nodes."""
        return [node.score for node in self.nodes[1:]]

    def scores_if_asked(self, path: Sequence[int], hit: float) -> list[float]:
        """What they are expected to become if the model is asked at the nodes of `path`.

        Args:
            path: from `unasked_path`.
            hit: how often the model's first guess comes true.
        """
        scores = [node.score for node in self.nodes]
        for index in path:
            node = self.nodes[index]
            likely = node.score * hit
            child = max(node.children.values(), key=lambda i: self.nodes[i].score, default=None)
            if child is None:
                scores.append(likely)
            else:
                scores[child] = max(scores[child], likely)
        return scores[1:]

    def best_place(self, hit: float) -> tuple[float, int]:
        """Where the model would add most expected tokens, and how many.

        Args:
            hit: how often the model's first guess comes true.

        Returns:
            (gain, node); asking there answers for the unasked nodes above it too.
        """
        gains: list[float] = []
        best, place = 0.0, 0
        for index, node in enumerate(self.nodes):
            if node.asked:
                gains.append(0.0)
                continue
            known = max((self.nodes[child].score for child in node.children.values()), default=0.0)
            above = gains[node.parent] if node.parent >= 0 else 0.0
            gains.append(above + max(node.score * hit - known, 0.0))
            if gains[index] > best:
                best, place = gains[index], index
        return best, place

    def unasked_path(self, place: int) -> list[int]:
        """The node and those above it that were not asked yet, from the top down."""
        path = []
        while place >= 0 and not self.nodes[place].asked:
            path.append(place)
            place = self.nodes[place].parent
        return path[::-1]

    def depth(self, index: int) -> int:
        """Distance from the root."""
        depth = 0
        while self.nodes[index].parent >= 0:
            index = self.nodes[index].parent
            depth += 1
        return depth

    def answer(
        self, index: int, ranked: Iterable[tuple[int, float]], calibrator: Calibrator
    ) -> None:
        """Takes in what the model says may follow a node.

        Args:
            index: of the node.
            ranked: (token, probability), best first.
            calibrator: turns kinds of evidence into probabilities.
        """
        node = self.nodes[index]
        node.asked = True
        if node.score <= 0:
            return
        unnamed = dict(node.children)
        for rank, (token, share) in enumerate(ranked):
            child = unnamed.pop(token, None)
            before = 0.0 if child is None else self.nodes[child].score / node.score
            agreed = 0 if child is None else 1 + min(int(before * 3), 2)
            label = f"model:{rank}.{min(int(share * 10), 9)}.{agreed}"
            score = node.score * calibrator.probability(label, share)
            if child is None:
                self._add(index, token, score, label)
            else:
                self._rescore(child, score, label)
        for child in unnamed.values():
            before = self.nodes[child].score / node.score
            label = f"unsaid:{min(int(before * 5), 4)}"
            self._rescore(child, node.score * calibrator.probability(label, 0.15), label)

    def _rescore(self, index: int, score: float, label: str) -> None:
        """Gives a node new evidence; what hangs below it keeps its share of it."""
        node = self.nodes[index]
        factor = score / node.score if node.score > 0 else 0.0
        node.score, node.label = score, label
        below = list(node.children.values())
        while below:
            child = self.nodes[below.pop()]
            child.score *= factor
            below.extend(child.children.values())

    def work_tree(self, fresh: Sequence[int]) -> TokenTree:
        """The nodes with draft KV and those about to get it, in slot order."""
        order = [*self.order, *fresh]
        place = {node: i for i, node in enumerate(order)} | {-1: -1}
        tokens = tuple(self.nodes[node].token for node in order)
        parents = tuple(place[self.nodes[node].parent] for node in order)
        return TokenTree(tokens, parents, (1.0,) * len(order), ("",) * len(order))

    def finished(self) -> TokenTree:
        """The best nodes as a tree; a node never scores above its parent, so they hang together."""
        order = sorted(range(1, len(self.nodes)), key=lambda i: (-self.nodes[i].score, i))
        builder = TreeBuilder(self.nodes[0].token)
        place = {0: 0}
        for index in order[: self.budget]:
            node = self.nodes[index]
            if node.parent in place and node.score > 0:
                place[index] = builder.add(place[node.parent], node.token, node.score, node.label)
        return builder.build()

    def kept(self, tokens: Sequence[int]) -> list[int]:
        """Places in slot order of the nodes with draft KV that `tokens` run through, root first."""
        place = {node: i for i, node in enumerate(self.order)}
        index, path = 0, [0] if self.order else []
        for token in tokens:
            child = self.nodes[index].children.get(token)
            if child is None or child not in place:
                break
            path.append(place[child])
            index = child
        return path
