"""What the engine and the draft's process say to each other: small, and plain values only.

A question names what is new of each sequence since the last one. The desk compares it with what it
has, so a question that was never answered costs nothing but its time: the next one says where the
two agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.sampling import SamplingParams
from draftwood.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Manner:
    """How a sequence's tokens are chosen, as far as it helps to guess them.

    Attributes:
        temperature, top_k, top_p, min_p: see `SamplingParams`.
        seed: of the sequence's noise.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int

    @classmethod
    def of(cls, params: SamplingParams, seed: int) -> Manner:
        """That of a request."""
        return cls(params.temperature, params.top_k, params.top_p, params.min_p, seed)

    @property
    def params(self) -> SamplingParams:
        """The same as parameters."""
        return SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )


@dataclass(frozen=True, slots=True)
class Wish:
    """A draft that is wanted.

    Attributes:
        id: of the sequence.
        start: how many of its first tokens the desk should have already.
        tokens: those from there on; the draft's root is the last of them.
        num_sure: how many of all are the sequence's own. Those behind are what verification is
            expected to yield: the draft then is for the round after.
        budget: most nodes besides the root.
        manner: how its tokens are chosen.
    """

    id: str
    start: int
    tokens: tuple[int, ...]
    num_sure: int
    budget: int
    manner: Manner


@dataclass(frozen=True, slots=True)
class Ask:
    """A question: all that one engine wants to know at one time.

    Attributes:
        wishes: one for each sequence.
        ended: sequences that will not be asked about again.
    """

    wishes: tuple[Wish, ...]
    ended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """An answer to one wish.

    Attributes:
        id: of the sequence.
        num_known: how many of its tokens the desk has now. Fewer than the wish had: the beginning
            is missing, or there was no room or no time to read it all.
        tokens, parents, scores: the nodes as in a `TokenTree`, the root first; empty if there is
            no draft.
    """

    id: str
    num_known: int
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()

    @property
    def tree(self) -> TokenTree:
        """The nodes as a tree; there must be some."""
        sources = ("", *("remote",) * (len(self.tokens) - 1))
        return TokenTree(self.tokens, self.parents, self.scores, sources)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answers to all wishes of a question, in their order."""

    drafts: tuple[Draft, ...]
