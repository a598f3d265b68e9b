"""What needs no second model: suffix matches and recycled candidates in one tree.

Both guess at every node, also below each other's guesses, and the calibrated acceptance of each
kind of evidence decides which nodes the tree gets. Nothing else has to be loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.draft.base import DraftContext, Drafter, Outcome
from draftwood.draft.grow import Calibrator, grow
from draftwood.draft.recycling import RecyclingTable, context_of, learn_outcome
from draftwood.draft.suffix import SuffixDrafter
from draftwood.tree import TokenTree


class LookupDrafter(Drafter):
    """Suffix automaton and recycling tables, merged by expected acceptance."""

    name = "lookup"

    def __init__(self) -> None:
        self.calibrator = Calibrator()
        self.table = RecyclingTable()
        self._suffix = SuffixDrafter()

    def start(self, seq: DraftContext) -> None:
        """Indexes the prompt."""
        self._suffix.start(seq)

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """Grows each tree from both sources at once."""
        return [
            grow(
                seq.tokens[-1],
                [self._suffix.guesser(seq), (self.table, context_of(seq.tokens))],
                self.calibrator,
                budget,
            )
            for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def observe(self, seqs: Sequence[DraftContext], outcomes: Sequence[Outcome]) -> None:
        """Feeds both sources."""
        for seq, outcome in zip(seqs, outcomes, strict=True):
            self.calibrator.observe(outcome.tree, outcome.verdict)
            self._suffix.extend(seq, outcome.tokens)
            learn_outcome(self.table, seq, outcome)

    def stop(self, seq: DraftContext) -> None:
        """Forgets the sequence; the tables stay warm."""
        self._suffix.stop(seq)

    def state(self) -> bytes:
        """The newest part of the tables; suffixes are indexed again from the tokens."""
        return self.table.state()

    def restore(self, state: bytes) -> None:
        """Fills the tables."""
        self.table.restore(state)
