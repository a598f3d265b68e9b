"""Running a draft model: the one place where it is fed and its KV grows, shrinks and is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from torch import Tensor

from draftwood.attention import Work, pack
from draftwood.draft.pace import ForwardCost
from draftwood.kv import Lease, Plane
from draftwood.models.base import Model
from draftwood.tree import TokenTree

CHUNK = 512
"""Rows of a forward that reads what is known."""


class DraftKV(Protocol):
    """Where a draft model's KV of one sequence lies.

    Attributes:
        computed: how many of the sequence's first tokens have KV; setting it lower forgets the
            others.
    """

    computed: int

    @property
    def lease(self) -> Lease:
        """Its slots."""

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Keeps the nodes on `path` of the tree whose root is at `start`; drops the others."""


@dataclass(slots=True)
class PlaneKV:
    """The draft's part of a sequence's own lease."""

    lease: Lease

    @property
    def computed(self) -> int:
        """Tokens whose KV the draft model has computed."""
        return self.lease.draft_length

    @computed.setter
    def computed(self, length: int) -> None:
        self.lease.draft_length = length

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Keeps the nodes on `path`."""
        self.lease.commit_draft(start, path)


class DraftRunner:
    """Forwards of a draft model.

    Args:
        model: the draft model.
        plane: where its KV lies.
        cost: what a forward takes, corrected by those that run; None for unknown.
        clock: seconds.
    """

    def __init__(
        self,
        model: Model,
        plane: Plane,
        cost: ForwardCost | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.model = model
        self.cost = cost
        self._plane = plane
        self._clock = clock
        # On other devices a forward returns before it is done, and its time says nothing.
        self._timed = cost is not None and plane.spec.device.type == "cpu"

    def forward(self, works: Sequence[Work]) -> Tensor:
        """Runs the model; the logits of the rows that want them, in order, [rows, V]."""
        begin = self._clock()
        logits = self.model.forward(pack(works, self._plane.spec.device), self._plane)
        if self._timed and self.cost is not None:
            num_rows = sum(len(work.tokens) for work in works)
            self.cost.observe(num_rows, works[0].context, self._clock() - begin)
        return logits

    def read(self, kv: DraftKV, ids: Sequence[int], stop: int, spare: int = 0) -> None:
        """Computes the KV of `ids` up to `stop`, but for at most `spare` of them."""
        while stop - kv.computed > spare:
            start = kv.computed
            chunk = ids[start : min(start + CHUNK, stop)]
            self.forward([Work(kv.lease, start, chunk, None, ())])
            kv.computed = start + len(chunk)


def expansion(kv: DraftKV, base: int, tree: TokenTree, num_done: int) -> Work:
    """The nodes of a tree behind the first `num_done`, which have KV already, in slot order.

    Args:
        kv: of the sequence.
        base: position of the tree's root.
        tree: in slot order.
        num_done: nodes at the slots from `base` on.
    """
    tokens = tree.tokens[num_done:]
    return Work(kv.lease, base, tokens, tree, range(len(tokens)))
