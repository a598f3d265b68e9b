"""Growing a tree best-first from guessers that cost microseconds.

A guesser looks at a place in the text and names tokens that may follow, each with a label for the
kind of evidence it has. How often guesses of a kind come true is counted as they are verified, and
that share is the score: so evidence of different kinds is comparable, and a tree grows where
acceptance is likeliest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftwood.sampling import Verdict
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that may come next.

    Attributes:
        token: its id.
        label: the kind of evidence; guesses of one kind share their acceptance statistics.
        prior: the acceptance expected of that kind before any was seen.
    """

    token: int
    label: str
    prior: float


class Guesser(Protocol):
    """A source of guesses that can look ahead along its own guesses.

    `state` is whatever the guesser wants; it stands for a place in the (guessed) text.
    """

    def guesses(self, state: Any) -> Iterable[Guess]:
        """What may follow at `state`, best first."""

    def advance(self, state: Any, token: int) -> Any:
        """The state after `token`; None when nothing is known there."""


class Calibrator:
    """Acceptance per label, learned online.

    A label's estimate is the share of its guesses that came true among those whose parent was
    accepted, starting from the prior and forgetting slowly so that it can follow the text.
    """

    _PRIOR_WEIGHT = 4.0
    _DECAY = 0.99

    def __init__(self) -> None:
        self._counts: dict[str, list[float]] = {}

    def probability(self, label: str, prior: float) -> float:
        """The estimated acceptance of a guess with this label."""
        hits, trials = self._counts.get(label, (0.0, 0.0))
        return (hits + prior * self._PRIOR_WEIGHT) / (trials + self._PRIOR_WEIGHT)

    def observe(self, tree: TokenTree, verdict: Verdict) -> None:
        """Counts every node whose parent was accepted as a hit or a miss."""
        accepted = set(verdict.path)
        for node in range(1, len(tree)):
            if tree.parents[node] in accepted:
                count = self._counts.setdefault(tree.sources[node], [0.0, 0.0])
                count[0] = count[0] * self._DECAY + (node in accepted)
                count[1] = count[1] * self._DECAY + 1.0

    def view(self) -> dict[str, tuple[float, float]]:
        """Label to (acceptance, weight of evidence), for display."""
        return {
            label: (hits / trials, trials) for label, (hits, trials) in sorted(self._counts.items())
        }


def grow(
    root: int,
    guessers: Sequence[tuple[Guesser, Any]],
    calibrator: Calibrator,
    budget: int,
    min_score: float = 0.02,
) -> TokenTree:
    """The `budget` likeliest nodes below `root`.

    Args:
        root: the last committed token.
        guessers: each with its state at the root.
        calibrator: turns labels into probabilities.
        budget: most nodes, the root not counted.
        min_score: nodes less likely than this are not worth verifying.
    """
    builder = TreeBuilder(root)
    order = 0
    # Heap of (-score, order, parent, guess, the guessers' states at the parent).
    heap: list[tuple[float, int, int, Guess, list[Any]]] = []
    node, states = 0, [state for _, state in guessers]
    while len(builder) <= budget:
        for guess, probability in _best_guesses(guessers, states, calibrator):
            score = builder.scores[node] * probability
            if score >= min_score:
                order += 1
                heapq.heappush(heap, (-score, order, node, guess, states))
        if not heap:
            break
        negative, _, parent, guess, parent_states = heapq.heappop(heap)
        node = builder.add(parent, guess.token, -negative, guess.label)
        states = [
            None if state is None else guesser.advance(state, guess.token)
            for (guesser, _), state in zip(guessers, parent_states, strict=True)
        ]
    return builder.build()


def _best_guesses(
    guessers: Sequence[tuple[Guesser, Any]], states: Sequence[Any], calibrator: Calibrator
) -> Iterable[tuple[Guess, float]]:
    """Each token once, with its best evidence; together at most certainty."""
    best: dict[int, tuple[float, Guess]] = {}
    for (guesser, _), state in zip(guessers, states, strict=True):
        if state is None:
            continue
        for guess in guesser.guesses(state):
            probability = calibrator.probability(guess.label, guess.prior)
            known = best.get(guess.token)
            if known is None or probability > known[0]:
                best[guess.token] = (probability, guess)
    left = 1.0
    for probability, guess in sorted(best.values(), key=lambda pair: -pair[0]):
        yield guess, min(probability, left)
        left = max(left - probability, 0.0)
