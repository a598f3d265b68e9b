"""What needs no second model: repetition, past answers and recycled candidates in one tree.

All guess at every node, also below each other's guesses, and the calibrated acceptance of each
kind of evidence decides which nodes the tree gets. Nothing else has to be loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwood.draft.base import DraftContext, Drafter, Outcome
from draftwood.draft.grow import Calibrator, Guesser, grow
from draftwood.draft.memory import DraftMemory
from draftwood.draft.recycling_table import context_of, learn_outcome
from draftwood.draft.suffix import SuffixDrafter
from draftwood.tree import TokenTree


class LookupDrafter(Drafter):
    """Suffix automaton, past answers and recycling tables, merged by expected acceptance."""

    name = "lookup"

    def __init__(self) -> None:
        self.calibrator = Calibrator()
        self.memory = DraftMemory()
        self._suffix = SuffixDrafter()
        self._keeps_answers = True

    def remember(self, max_bytes: int, answers: bool) -> None:
        """Sets the budget of tables and past answers, and whether these are kept at all."""
        self.memory.limit(max_bytes)
        self._keeps_answers = answers

    def start(self, seq: DraftContext) -> None:
        """Indexes the prompt."""
        self._suffix.start(seq)

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """Grows each tree from all sources at once."""
        return [
            grow(seq.tokens[-1], self._guessers(seq), self.calibrator, budget)
            for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def _guessers(self, seq: DraftContext) -> list[tuple[Guesser, Any]]:
        """The sources, each with its place at the sequence's end."""
        memory = self.memory.of(seq.params.cache_salt)
        return [
            self._suffix.guesser(seq),
            memory.past.guesser(seq.tokens),
            (memory.table, context_of(seq.tokens)),
        ]

    def observe(self, seqs: Sequence[DraftContext], outcomes: Sequence[Outcome]) -> None:
        """Feeds the sources."""
        for seq, outcome in zip(seqs, outcomes, strict=True):
            self.calibrator.observe(outcome.tree, outcome.verdict)
            self._suffix.extend(seq, outcome.tokens)
            learn_outcome(self.memory.of(seq.params.cache_salt).table, seq, outcome)

    def stop(self, seq: DraftContext) -> None:
        """Forgets the sequence; what it was answered is remembered."""
        self._suffix.stop(seq)
        if self._keeps_answers:
            self.memory.of(seq.params.cache_salt).past.learn(seq.tokens, seq.num_prompt_tokens)
        self.memory.trim()

    def state(self) -> bytes:
        """The newest part of tables and past answers."""
        return self.memory.state()

    def restore(self, state: bytes) -> None:
        """Learns what an earlier process had remembered."""
        self.memory.restore(state)
