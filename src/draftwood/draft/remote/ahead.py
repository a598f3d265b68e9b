"""What was drafted for one sequence and is not verified yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwood.draft.remote.messages import Draft
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder

_LIKELY = 0.2  # a path less likely than this is not drafted behind


@dataclass(slots=True)
class Ahead:
    """A tree that may reach further than the next round, and what the desk knows of the sequence.

    Attributes:
        tree: rooted at the last token it was settled on.
        length: how many tokens the sequence had then.
        sent: the sequence as the desk has it once it has read all that was sent.
        num_common: how many of its first tokens are known to be those of the sequence.
    """

    tree: TokenTree
    length: int
    sent: list[int] = field(default_factory=list)
    num_common: int = 0

    @property
    def empty(self) -> bool:
        """Whether there is no draft."""
        return len(self.tree) == 1

    def settle(self, tokens: Sequence[int]) -> None:
        """Follows the sequence to its present end; a draft that took another way is dropped."""
        node = walk(self.tree, 0, tokens[self.length :])
        self.tree = TokenTree.root(tokens[-1]) if node is None else subtree(self.tree, node)
        self.length = len(tokens)
        self.num_common = self.num_sent(tokens)

    def num_sent(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, the sequence and perhaps a guess behind it, the desk has."""
        common, limit = self.num_common, min(len(self.sent), len(tokens))
        while common < limit and self.sent[common] == tokens[common]:
            common += 1
        return common

    def note_sent(self, tokens: list[int], num_sure: int) -> None:
        """The desk was told `tokens`, of which the first `num_sure` are the sequence."""
        self.sent, self.num_common = tokens, num_sure

    def likely_path(self) -> list[int]:
        """Tokens that the next round is likeliest to accept."""
        node, path = 0, list[int]()
        while True:
            children = [i for i, parent in enumerate(self.tree.parents) if parent == node]
            node = max(children, key=lambda i: self.tree.scores[i], default=0)
            if node == 0 or self.tree.scores[node] < _LIKELY:
                return path
            path.append(self.tree.tokens[node])

    def take(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Adds the desk's answer to what was sent last, as far as it still fits.

        Args:
            draft: the answer.
            tokens: the sequence, on which this is settled.
        """
        if draft.num_known < len(self.sent):
            self.forget()
            return
        if not self.sent or not draft.tokens or self.num_common < min(len(self.sent), len(tokens)):
            return
        behind = self.sent[len(tokens) :]
        if behind:
            at = walk(self.tree, 0, behind)
            self.tree = self.tree if at is None else graft(self.tree, at, draft.tree)
            return
        landed = walk(draft.tree, 0, tokens[len(self.sent) :])
        if landed is not None:
            self.tree = self.tree.merge(subtree(draft.tree, landed))

    def forget(self) -> None:
        """The desk has lost the sequence."""
        self.sent, self.num_common = [], 0


def walk(tree: TokenTree, node: int, tokens: Sequence[int]) -> int | None:
    """The node that `tokens` lead to; None if the tree has no such path."""
    for token in tokens:
        child = tree.child(node, token)
        if child is None:
            return None
        node = child
    return node


def subtree(tree: TokenTree, root: int) -> TokenTree:
    """What hangs below a node, which becomes the root; scores as they are once it is reached."""
    if root == 0:
        return tree
    builder, place = TreeBuilder(tree.tokens[root]), {root: 0}
    whole = tree.scores[root]
    for node in range(root + 1, len(tree)):
        parent = place.get(tree.parents[node])
        if parent is not None:
            score = tree.scores[node] / whole if whole > 0 else 0.0
            place[node] = builder.add(parent, tree.tokens[node], score, tree.sources[node])
    return builder.build()


def graft(tree: TokenTree, at: int, other: TokenTree) -> TokenTree:
    """A tree with another one's nodes below one of its own."""
    builder, place = TreeBuilder.of(tree), {0: at}
    for node in range(1, len(other)):
        score = tree.scores[at] * other.scores[node]
        parent = place[other.parents[node]]
        place[node] = builder.add(parent, other.tokens[node], score, other.sources[node])
    return builder.build()
