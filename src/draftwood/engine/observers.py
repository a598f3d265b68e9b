"""Who watches the rounds: statistics, dashboards, a page that shows the tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from draftwood.draft.base import Outcome


@dataclass(frozen=True, slots=True)
class Round:
    """One round as it happened.

    Attributes:
        request_ids: the sequences that decoded, in the order of `outcomes`.
        outcomes: their trees and verdicts.
        num_rows: rows of the target's forward, prompt chunks included.
        num_prefill_rows: rows among them that computed prompts.
        draft_s, target_s, verify_s, commit_s: seconds spent proposing and learning, in the
            target's forward, walking the trees, and appending tokens and moving KV.
    """

    request_ids: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    num_rows: int
    num_prefill_rows: int
    draft_s: float
    target_s: float
    verify_s: float
    commit_s: float


class Observer(Protocol):
    """Is told about every round, after it."""

    def on_round(self, round_: Round) -> None:
        """A round is over. Runs on the engine's thread: be quick."""


@dataclass(slots=True)
class RoundTimer:
    """Adds up where the time of decoding rounds goes."""

    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    num_rounds: int = 0
    rows: dict[int, int] = field(default_factory=dict)

    def on_round(self, round_: Round) -> None:
        """Adds a round; those that also computed prompts are left out."""
        if round_.num_prefill_rows:
            return
        self.draft_s += round_.draft_s
        self.target_s += round_.target_s
        self.verify_s += round_.verify_s
        self.commit_s += round_.commit_s
        self.num_rounds += 1
        self.rows[round_.num_rows] = self.rows.get(round_.num_rows, 0) + 1

    def shares(self) -> dict[str, float]:
        """Share of each part in the time of all rounds; empty before the first."""
        parts = {
            "draft": self.draft_s,
            "target": self.target_s,
            "verify": self.verify_s,
            "commit": self.commit_s,
        }
        total = sum(parts.values())
        return {name: part / total for name, part in parts.items()} if total else {}
