"""Guessing from the text itself: what followed the last time the same words stood here.

A suffix automaton holds every substring of the prompt and the output, and is extended in amortised
constant time per token (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a
text"). Each state counts which tokens followed it, so one lookup gives branches with their
frequencies for the longest repeated suffix; shorter suffixes, reached by the automaton's links,
give further branches. Drafting with it follows SuffixDecoding (Oliaro et al. 2024, arXiv
2411.04975).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draftwood.draft.base import DraftContext, Drafter, Outcome
from draftwood.draft.grow import Calibrator, Guess, grow
from draftwood.tree import TokenTree

_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_MAX_CHAIN = 32
_MAX_BRANCHES = 3


class SuffixAutomaton:
    """All substrings of a growing token sequence, with counts of what followed each."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._follow: list[dict[int, int]] = [{}]
        self._last = 0

    def __len__(self) -> int:
        """Number of states, at most twice the number of tokens."""
        return len(self._next)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        self._count(token)
        current = self._new_state(self._length[self._last] + 1)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = current
            state = self._link[state]
        if state < 0:
            self._link[current] = 0
        else:
            self._link[current] = self._suffix_state(state, token)
        self._last = current

    def _count(self, token: int) -> None:
        """`token` followed every suffix of the text so far; the latest comes last in its dict."""
        state = self._link[self._last] if self._last else -1
        for _ in range(_MAX_CHAIN):
            if state <= 0:
                return
            follow = self._follow[state] or self._only_follower(state)
            follow[token] = follow.pop(token, 0) + 1
            self._follow[state] = follow
            state = self._link[state]

    def _suffix_state(self, state: int, token: int) -> int:
        """The state of the longest suffix that was there before; split off where need be."""
        target = self._next[state][token]
        if self._length[target] == self._length[state] + 1:
            return target
        clone = self._new_state(self._length[state] + 1)
        self._next[clone] = dict(self._next[target])
        self._follow[clone] = dict(self._follow[target]) or self._only_follower(target)
        self._link[clone] = self._link[target]
        self._link[target] = clone
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _only_follower(self, state: int) -> dict[int, int]:
        """What followed a state that had occurred once: its counts begin when it is split."""
        return dict.fromkeys(self._next[state], 1)

    def _new_state(self, length: int) -> int:
        self._next.append({})
        self._link.append(-1)
        self._length.append(length)
        self._follow.append({})
        return len(self._next) - 1

    def match(self) -> tuple[int, int]:
        """(state, length) of the longest suffix that occurs earlier too; length 0 for none."""
        state = self._link[self._last]
        return (state, self._length[state]) if state > 0 else (0, 0)

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Reads `token` at a match: follows links to shorter suffixes until one continues so."""
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if state <= 0 and token not in self._next[0]:
            return 0, 0
        return self._next[state][token], length + 1

    def shorter(self, state: int) -> tuple[int, int]:
        """The next shorter suffix with a wider context, as (state, length)."""
        link = self._link[state]
        return (link, self._length[link]) if link > 0 else (0, 0)

    def followers(self, state: int) -> list[tuple[int, int]]:
        """(token, count) of what followed, most frequent first, then most recent."""
        follow = self._follow[state] or self._only_follower(state)
        recent_first = list(follow.items())[::-1]
        return sorted(recent_first, key=lambda item: -item[1])


@dataclass(frozen=True, slots=True)
class _Place:
    state: int
    length: int


class SuffixGuesser:
    """Guesses from one automaton. A state of it is a match: (automaton state, length)."""

    def __init__(self, automaton: SuffixAutomaton, name: str = "suffix") -> None:
        self._automaton = automaton
        self._name = name

    def start(self) -> _Place | None:
        """The match at the end of the text; None when the last token never occurred before."""
        return self.place(*self._automaton.match())

    def place(self, state: int, length: int) -> _Place | None:
        """A match of the automaton as a place to guess at; None for no match."""
        return _Place(state, length) if length else None

    def guesses(self, place: _Place) -> Iterable[Guess]:
        """Followers of the match, and of the next shorter one for tokens not named yet."""
        named: set[int] = set()
        state, length = place.state, place.length
        for _ in range(2):
            if length == 0:
                return
            followers = self._automaton.followers(state)
            total = sum(count for _, count in followers)
            for rank, (token, count) in enumerate(followers[:_MAX_BRANCHES]):
                if token not in named:
                    named.add(token)
                    yield self._guess(token, length, rank, count / total)
            state, length = self._automaton.shorter(state)

    def advance(self, place: _Place, token: int) -> _Place | None:
        """Reads one more token."""
        state, length = self._automaton.step(place.state, place.length, token)
        return _Place(state, length) if length else None

    def _guess(self, token: int, length: int, rank: int, share: float) -> Guess:
        bucket = max(known for known in _LENGTHS if known <= length)
        kind = "sole" if share == 1 else "most" if share > 0.5 else "some"
        prior = min(0.9, 0.25 + 0.08 * bucket) * share
        return Guess(token, f"{self._name}:{bucket}.{kind}{rank or ''}", prior)


class SuffixDrafter(Drafter):
    """Drafts from repetition in the sequence's own prompt and output."""

    name = "suffix"

    def __init__(self) -> None:
        self._automata: dict[str, SuffixAutomaton] = {}
        self.calibrator = Calibrator()

    def start(self, seq: DraftContext) -> None:
        """Indexes the prompt."""
        automaton = self._automata[seq.request_id] = SuffixAutomaton()
        automaton.extend(seq.tokens)

    def guesser(self, seq: DraftContext) -> tuple[SuffixGuesser, _Place | None]:
        """A guesser for the sequence, with its state at the sequence's end."""
        guesser = SuffixGuesser(self._automata[seq.request_id])
        return guesser, guesser.start()

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """Grows each tree from the longest repeated suffix."""
        return [
            grow(seq.tokens[-1], [self.guesser(seq)], self.calibrator, budget)
            for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def observe(self, seqs: Sequence[DraftContext], outcomes: Sequence[Outcome]) -> None:
        """Indexes the new tokens and learns which kinds of match come true."""
        for seq, outcome in zip(seqs, outcomes, strict=True):
            self.calibrator.observe(outcome.tree, outcome.verdict)
            self.extend(seq, outcome.tokens)

    def extend(self, seq: DraftContext, tokens: Sequence[int]) -> None:
        """Indexes what the sequence went on with."""
        self._automata[seq.request_id].extend(tokens)

    def stop(self, seq: DraftContext) -> None:
        """Forgets the sequence."""
        self._automata.pop(seq.request_id, None)
