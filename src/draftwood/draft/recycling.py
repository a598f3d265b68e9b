"""Drafts from the target's own leftovers alone: Token Recycling (arXiv 2408.08696)."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.draft.base import DraftContext, Drafter, Outcome
from draftwood.draft.grow import Calibrator, grow
from draftwood.draft.memory import DraftMemory
from draftwood.draft.recycling_table import context_of, learn_outcome
from draftwood.tree import TokenTree


class RecyclingDrafter(Drafter):
    """Drafts from a tenant's tables, which outlive its sequences."""

    name = "recycling"

    def __init__(self) -> None:
        self.memory = DraftMemory()
        self.calibrator = Calibrator()

    def remember(self, max_bytes: int, answers: bool) -> None:
        """Sets the budget of the tables."""
        self.memory.limit(max_bytes)

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """Grows each tree from the last tokens of its sequence."""
        trees = []
        for seq, budget in zip(seqs, budgets, strict=True):
            table = self.memory.of(seq.params.cache_salt).table
            guessers = [(table, context_of(seq.tokens))]
            trees.append(grow(seq.tokens[-1], guessers, self.calibrator, budget))
        return trees

    def observe(self, seqs: Sequence[DraftContext], outcomes: Sequence[Outcome]) -> None:
        """Takes the top-k of every verified node, accepted or not."""
        for seq, outcome in zip(seqs, outcomes, strict=True):
            self.calibrator.observe(outcome.tree, outcome.verdict)
            learn_outcome(self.memory.of(seq.params.cache_salt).table, seq, outcome)

    def stop(self, seq: DraftContext) -> None:
        """Keeps within the budget."""
        self.memory.trim()

    def state(self) -> bytes:
        """The newest part of the tables."""
        return self.memory.state()

    def restore(self, state: bytes) -> None:
        """Fills the tables."""
        self.memory.restore(state)
