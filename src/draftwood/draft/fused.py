"""Lookups and any other drafter in one tree: the other is asked in rounds where that pays.

`hybrid.AutoDrafter` steers a draft model forward by forward; this one takes a whole drafter, as a
draft model of another vocabulary is, and knows of it only its trees and the time they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

from draftwood.draft.base import DraftContext, Drafter, Outcome
from draftwood.draft.combine import LookupDrafter
from draftwood.draft.grow import Guess, Guesser, grow
from draftwood.tree import TokenTree

_COUNTED = 8  # nodes whose scores make up what a round is expected to yield
_PROBE_EVERY = 32  # rounds without the other before it is asked once, to see whether it is worth it


class TreeGuesser:
    """Guesses what a finished tree says. A state of it is a node."""

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree
        self._children: dict[int, list[int]] = {}
        for node in range(1, len(tree)):
            self._children.setdefault(tree.parents[node], []).append(node)

    def guesses(self, state: int) -> Iterable[Guess]:
        """The node's children, as likely as their scores say."""
        tree = self._tree
        for child in self._children.get(state, ()):
            share = tree.scores[child] / tree.scores[state] if tree.scores[state] > 0 else 0.0
            bucket = min(int(share * 10), 9)
            yield Guess(tree.tokens[child], f"{tree.sources[child]}~{bucket}", share)

    def advance(self, state: int, token: int) -> int | None:
        """The child that carries `token`."""
        return self._tree.child(state, token)


class FusedDrafter(LookupDrafter):
    """Lookups, completed by another drafter.

    Args:
        other: asked in rounds where it promises more tokens a second than lookups alone.
        clock: seconds, to weigh what the other adds against what it takes.
    """

    name = "auto"

    def __init__(self, other: Drafter, clock: Callable[[], float] = perf_counter) -> None:
        super().__init__()
        self.other = other
        self._clock = clock
        self._yield = 3.0  # tokens of a round with the other, as a moving average
        self._other_s = other.round_s()
        self._target_s = 0.0
        self._proposed_at: float | None = None
        self._asked: set[str] = set()
        self._rounds_without = 0

    def start(self, seq: DraftContext) -> None:
        """Starts both."""
        super().start(seq)
        self.other.start(seq)

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """Lookups; where the other is worth its time, both in one tree."""
        cheap = super().propose(seqs, budgets)
        self._asked = set()
        if any(budgets) and self._pays(cheap):
            begin = self._clock()
            trees = self.other.propose(seqs, budgets)
            self._other_s = _moved(self._other_s, self._clock() - begin)
            self._asked = {seq.request_id for seq in seqs}
            cheap = [
                self._fuse(seq, tree, budget)
                for seq, tree, budget in zip(seqs, trees, budgets, strict=True)
            ]
        self._rounds_without = 0 if self._asked else self._rounds_without + 1
        self._proposed_at = self._clock()
        return cheap

    def observe(self, seqs: Sequence[DraftContext], outcomes: Sequence[Outcome]) -> None:
        """Feeds both."""
        if self._proposed_at is not None:
            self._target_s = _moved(self._target_s, self._clock() - self._proposed_at)
            self._proposed_at = None
        for seq, outcome in zip(seqs, outcomes, strict=True):
            if seq.request_id in self._asked:
                self._yield += 0.1 * (1 + outcome.verdict.num_accepted - self._yield)
        super().observe(seqs, outcomes)
        self.other.observe(seqs, outcomes)

    def stop(self, seq: DraftContext) -> None:
        """Stops both."""
        super().stop(seq)
        self.other.stop(seq)

    def _pays(self, cheap: Sequence[TokenTree]) -> bool:
        """Whether a round with the other is expected to be faster, token for token."""
        if self._rounds_without >= _PROBE_EVERY:
            return True
        count = len(cheap)
        alone = count + sum(sum(sorted(tree.scores[1:], reverse=True)[:_COUNTED]) for tree in cheap)
        with_other = max(self._yield * count, alone)
        return with_other * self._target_s >= alone * (self._target_s + self._other_s)

    def _fuse(self, seq: DraftContext, tree: TokenTree, budget: int) -> TokenTree:
        guessers: list[tuple[Guesser, Any]] = [(TreeGuesser(tree), 0), *self._guessers(seq)]
        return grow(seq.tokens[-1], guessers, self.calibrator, budget)


def _moved(average: float, value: float) -> float:
    """A moving average of seconds; an outlier counts as three times the usual."""
    return average + 0.2 * (min(value, 3 * average) - average) if average else value
