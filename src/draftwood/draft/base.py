"""What a drafter is.

A drafter guesses; the target decides. It may be wrong, slow or silent, and the text stays the same.
Third parties add one under the entry point group `draftwood.drafters`; see docs/drafters.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

from torch import Tensor

from draftwood.errors import ConfigError
from draftwood.kv import Lease
from draftwood.sampling import SamplingParams, Verdict
from draftwood.tree import TokenTree


class DraftContext(Protocol):
    """What a drafter may see of a sequence. It must not change any of it but the draft's KV."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    lease: Lease

    @property
    def finished(self) -> bool:
        """Whether it has ended; what is stopped before that will be started again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one tree.

    Attributes:
        tree: what was verified (what the drafter proposed, possibly cut down).
        verdict: the accepted path and the tokens it gave.
        tokens: the verdict's tokens that were kept (a stop rule may cut them short), and those that
            a grammar forced behind them.
        logits: [T, vocab_size], the target's logits at each node.
    """

    tree: TokenTree
    verdict: Verdict
    tokens: tuple[int, ...]
    logits: Tensor


class Drafter:
    """Base of all drafters: proposes nothing and remembers nothing.

    A subclass overrides what it needs; `propose` is the only method it must have.
    """

    name = "none"

    def prices(self, seconds: Callable[[int, float], float]) -> None:
        """Told once, by an engine that weighs costs, what a forward of the target takes.

        Args:
            seconds: of (number of rows, tokens of context); kept up to date as rounds go by.
        """

    def remember(self, max_bytes: int, answers: bool) -> None:
        """Told once, by an engine: the bytes it may take for what outlives its sequences.

        Without `answers` it is not to learn whole texts. What it remembers of sequences with one
        `params.cache_salt` must not show in what it proposes for those with another: they are
        other people's.
        """

    def round_s(self) -> float:
        """Seconds that a round of drafting is expected to take, before any has been timed.

        0, the default, says that it is not known, or that the drafter weighs its own time.
        """
        return 0.0

    def start(self, seq: DraftContext) -> None:
        """A sequence begins to decode; its prompt is known."""

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """One tree per sequence, rooted at its last token, with at most `budget` further nodes.

        Scores are the estimated probability that verification reaches a node.
        """
        return [TokenTree.root(seq.tokens[-1]) for seq in seqs]

    def observe(self, seqs: Sequence[DraftContext], outcomes: Sequence[Outcome]) -> None:
        """A round is over: the sequences' tokens are appended, their KV is committed."""

    def stop(self, seq: DraftContext) -> None:
        """A sequence has ended, in whatever way. Called once for each `start`."""

    def state(self) -> bytes:
        """What it has learned beside its sequences, for a checkpoint: small, and quickly made."""
        return b""

    def restore(self, state: bytes) -> None:
        """Takes what a drafter of the same name gave as its `state` in an earlier process."""


class NoDrafter(Drafter):
    """Plain decoding."""


def drafter_names() -> list[str]:
    """Names that `load_drafter_class` knows, third parties' included."""
    return sorted({point.name for point in entry_points(group="draftwood.drafters")})


def load_drafter_class(name: str) -> type[Drafter]:
    """The drafter registered under `name`.

    Raises:
        ConfigError: no such drafter, or its package cannot be imported.
    """
    for point in entry_points(group="draftwood.drafters"):
        if point.name == name:
            try:
                loaded: type[Drafter] = point.load()
            except ImportError as error:
                raise ConfigError(f"drafter {name!r} cannot be imported: {error}") from error
            return loaded
    raise ConfigError(f"unknown drafter {name!r}: known are {', '.join(drafter_names())}")
