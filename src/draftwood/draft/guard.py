"""Keeps a drafter's mistakes from reaching the engine.

A drafter is other people's code. One that raises, or proposes something that is not a tree of the
right shape, costs speed for that round and nothing else; it is named once in a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from draftwood.draft.base import DraftContext, Drafter, Outcome
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder

_log = logging.getLogger("draftwood")


class GuardedDrafter(Drafter):
    """Any drafter, made safe.

    Args:
        inner: the drafter.
        vocab_size: token ids from here on do not exist.
    """

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self.inner = inner
        self.name = inner.name
        self.num_failures = 0
        self._vocab_size = vocab_size
        self._started: set[str] = set()

    def prices(self, seconds: Callable[[int, float], float]) -> None:
        """Passes on what the target's forwards cost."""
        self._safely(lambda: self.inner.prices(seconds))

    def remember(self, max_bytes: int, answers: bool) -> None:
        """Passes on how much it may remember."""
        self._safely(lambda: self.inner.remember(max_bytes, answers))

    def round_s(self) -> float:
        """What the drafter says; 0 if it fails."""
        seconds = [0.0]
        self._safely(lambda: seconds.append(max(float(self.inner.round_s()), 0.0)))
        return seconds[-1]

    def start(self, seq: DraftContext) -> None:
        """Starts the drafter on a sequence; if that fails, none is proposed for it."""
        if self._safely(lambda: self.inner.start(seq)):
            self._started.add(seq.request_id)

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """The drafter's trees; the root alone in the place of one that cannot be used."""
        trees = [TokenTree.root(seq.tokens[-1]) for seq in seqs]
        asked = [
            i
            for i, (seq, budget) in enumerate(zip(seqs, budgets, strict=True))
            if budget > 0 and seq.request_id in self._started
        ]
        if not asked:
            return trees

        def ask() -> None:
            proposed = self.inner.propose([seqs[i] for i in asked], [budgets[i] for i in asked])
            if len(proposed) != len(asked):
                raise ValueError(f"{len(proposed)} trees for {len(asked)} sequences")
            for i, tree in zip(asked, proposed, strict=True):
                trees[i] = self._sound(tree, seqs[i]).best(budgets[i] + 1)

        self._safely(ask)
        return trees

    def observe(self, seqs: Sequence[DraftContext], outcomes: Sequence[Outcome]) -> None:
        """Passes on the outcomes of the sequences the drafter knows."""
        known = [i for i, seq in enumerate(seqs) if seq.request_id in self._started]
        if known:
            self._safely(
                lambda: self.inner.observe([seqs[i] for i in known], [outcomes[i] for i in known])
            )

    def stop(self, seq: DraftContext) -> None:
        """Stops the drafter on a sequence, if it was started."""
        if seq.request_id in self._started:
            self._started.discard(seq.request_id)
            self._safely(lambda: self.inner.stop(seq))

    def state(self) -> bytes:
        """The drafter's state; nothing if it fails."""
        states: list[bytes] = []
        self._safely(lambda: states.append(bytes(self.inner.state())))
        return states[0] if states else b""

    def restore(self, state: bytes) -> None:
        """Restores the drafter if there is something to restore."""
        if state:
            self._safely(lambda: self.inner.restore(state))

    def _sound(self, tree: TokenTree, seq: DraftContext) -> TokenTree:
        """The tree, its scores brought into order; ValueError if its shape cannot be used."""
        if tree.tokens[0] != seq.tokens[-1] or tree.parents[0] != -1:
            raise ValueError("a tree is not rooted at the last token")
        builder = TreeBuilder(seq.tokens[-1])
        nodes = zip(tree.tokens, tree.parents, tree.scores, tree.sources, strict=True)
        for node, (token, parent, score, source) in enumerate(nodes):
            if node == 0:
                continue
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise ValueError(f"a tree has {token!r} for a token id")
            if type(parent) is not int or not 0 <= parent < node:
                raise ValueError("a tree has a node before its parent")
            if not 0 <= score <= 1:
                raise ValueError(f"a tree has {score!r} for a score: a probability is wanted")
            if builder.add(parent, token, score, source) != node:
                raise ValueError("a tree has siblings with the same token")
        return builder.build()

    def _safely(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            self.num_failures += 1
            if self.num_failures == 1:
                _log.warning(
                    "drafter %r failed and is ignored where it does: %s: %s",
                    self.name,
                    type(error).__name__,
                    error,
                )
            return False
        return True
