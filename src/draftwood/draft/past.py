"""What was answered before: a suffix automaton over past answers (SuffixDecoding, Oliaro 2024).

Requests of one kind are often answered alike. A place in the store is the longest end of the text
that stands in some past answer; what followed there is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from draftwood.draft.grow import Guess
from draftwood.draft.suffix import SuffixAutomaton, SuffixGuesser

_END = -1  # stands behind every answer; no text holds it, so no match reaches across
_LEAST_MATCH = 3  # tokens; shorter ends are everywhere, and recycled candidates know them
_MOST_MATCH = 24
_LEAD = 8  # tokens of the prompt kept with an answer: its beginning is found by them
_STATE_BYTES = 480  # of an automaton: two lists' slots, two dicts, their numbers


class PastAnswers:
    """Past answers, the latest within a budget.

    There are two automata: one that grows, and the one that grew before. When the first has half
    of the budget it becomes the second, and what was in that is forgotten.

    Args:
        max_bytes: the budget.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_states = max(max_bytes // (2 * _STATE_BYTES), 2)
        self._new, self._old = SuffixAutomaton(), SuffixAutomaton()
        self._answers: list[tuple[int, ...]] = []
        self._before: list[tuple[int, ...]] = []

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return _STATE_BYTES * (len(self._new) + len(self._old))

    def learn(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Remembers the answer of a sequence, the end of it if it is very long."""
        start = max(num_prompt_tokens - _LEAD, 0)
        answer = tuple(tokens[start:])[-(self._max_states // 2) :]
        if len(tokens) - num_prompt_tokens < _LEAST_MATCH:
            return
        # An automaton has at most two states a token.
        if len(self._new) + 2 * (len(answer) + 1) > self._max_states:
            self._old, self._before = self._new, self._answers
            self._new, self._answers = SuffixAutomaton(), []
        self._new.extend((*answer, _END))
        self._answers.append(answer)

    def latest(self, max_tokens: int) -> list[tuple[int, ...]]:
        """The latest answers of so many tokens in all, oldest first, for `restore`."""
        chosen: list[tuple[int, ...]] = []
        for answer in (*self._answers[::-1], *self._before[::-1]):
            max_tokens -= len(answer)
            if max_tokens < 0:
                break
            chosen.append(answer)
        return chosen[::-1]

    def restore(self, answers: Iterable[Sequence[int]]) -> None:
        """Learns what `latest` gave."""
        for answer in answers:
            self.learn(answer, 0)

    def guesser(self, tokens: Sequence[int]) -> tuple[SuffixGuesser, Any]:
        """A guesser with its place at the end of a text; None as the place where it knows none."""
        end = tokens[-_MOST_MATCH:]
        matches = [(automaton, _match(automaton, end)) for automaton in (self._new, self._old)]
        automaton, (state, length) = max(matches, key=lambda match: match[1][1])
        guesser = _PastGuesser(automaton, "past")
        return guesser, guesser.place(state, length) if length >= _LEAST_MATCH else None


class _PastGuesser(SuffixGuesser):
    """Knows where answers end."""

    def guesses(self, place: Any) -> Iterable[Guess]:
        """What followed there, besides the end."""
        return (guess for guess in super().guesses(place) if guess.token != _END)


def _match(automaton: SuffixAutomaton, tokens: Sequence[int]) -> tuple[int, int]:
    """(state, length) of the longest end of `tokens` that stands in the automaton's text."""
    if len(automaton) == 1:
        return 0, 0
    state = length = 0
    for token in tokens:
        state, length = automaton.step(state, length, token)
    return state, length
