"""What one packed forward is asked to compute.

Rows of several sequences lie one behind the other without padding. A segment is one sequence's
share: a chunk of its prompt, or its token tree. A chunk of prompt is a chain, so both are the same
thing: T new nodes that each see the whole context and their own ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftwood.kernels.ops import Layout
from draftwood.kv import Lease, Slots
from draftwood.tree import TokenTree


@dataclass(frozen=True)
class Segment:
    """One sequence's rows in a packed batch.

    Attributes:
        start, stop: its rows, T of them.
        context: tokens before the root, all of whose KV is computed and seen by every row.
        slots: where the context and then the P nodes of the tree lie; the last T are written by
            this forward. P > T when a tree is grown level by level and its upper part has KV.
        depths: [P] depth of each node; its position is `context + depth`.
        ancestors: [T, P] booleans, None for a chain.
    """

    start: int
    stop: int
    context: int
    slots: Slots
    depths: Tensor
    ancestors: Tensor | None
    _biases: dict[int | None, tuple[int, Tensor | None, Tensor | None]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def num_rows(self) -> int:
        """T, the number of new nodes."""
        return self.stop - self.start

    @property
    def num_nodes(self) -> int:
        """P, the number of nodes behind the context."""
        return int(self.depths.shape[0])

    def bias(self, window: int | None) -> tuple[int, Tensor | None, Tensor | None]:
        """What a layer with a sliding `window` (None: all is seen) must hide.

        Returns:
            `first`: positions before it are seen by no row, so they need not be read.
            `head`: [T, m] additive bias for positions `first .. first + m`, or None.
            `tail`: [T, P] additive bias for the nodes behind the context, or None. What lies
            between the two is seen by every row: no mask of the context's length is ever built.
        """
        if window not in self._biases:
            self._biases[window] = self._make_bias(window)
        return self._biases[window]

    def _make_bias(self, window: int | None) -> tuple[int, Tensor | None, Tensor | None]:
        seen = self._seen()
        if window is None:
            return 0, None, _additive(seen)
        row_depths = self.depths[self.num_nodes - self.num_rows :]
        first = max(0, self.context - window + 1)
        far = row_depths[:, None] - self.depths[None, :] >= window
        tail = None if seen is None else _additive(seen & ~far)
        # Row i sees positions above context + depth - window.
        lowest = self.context + row_depths - window + 1
        width = min(max(int(lowest.max()) - first, 0), self.context - first)
        if width == 0:
            return first, None, tail
        columns = torch.arange(first, first + width, device=self.depths.device)
        return first, _additive(columns[None, :] >= lowest[:, None]), tail

    def _seen(self) -> Tensor | None:
        if self.ancestors is not None:
            return self.ancestors
        if self.num_rows == 1:
            return None
        shape = (self.num_rows, self.num_nodes)
        ones = torch.ones(shape, dtype=torch.bool, device=self.depths.device)
        return ones.tril(self.num_nodes - self.num_rows)


def _additive(seen: Tensor | None) -> Tensor | None:
    if seen is None or bool(seen.all()):
        return None
    zeros = torch.zeros(seen.shape, dtype=torch.float32, device=seen.device)
    return zeros.masked_fill(~seen, float("-inf"))


@dataclass(frozen=True, slots=True)
class Batch:
    """A packed forward: N rows of one or more sequences.

    Attributes:
        token_ids: [N] int64.
        positions: [N] int64, counted from the start of each sequence.
        segments: the sequences' shares, in row order.
        logit_rows: rows whose logits are wanted, ascending.
        layout: the segments as the CPU kernels want them, once somebody has asked for it.
    """

    token_ids: Tensor
    positions: Tensor
    segments: tuple[Segment, ...]
    logit_rows: Tensor
    layout: Layout | None = field(default=None, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        """N, the number of rows."""
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, slots=True)
class Work:
    """What to compute for one sequence: a chunk of known tokens or a tree.

    Attributes:
        lease: its KV, with room for the new rows.
        context: tokens whose KV is computed.
        tokens: [T] new token ids.
        tree: the tree whose last T nodes they are, None for a chain of them alone. Its nodes
            before those have KV already, at the slots behind the context.
        logit_rows: which of the T rows want logits.
    """

    lease: Lease
    context: int
    tokens: Sequence[int]
    tree: TokenTree | None
    logit_rows: Sequence[int]

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node behind the context."""
        return self.tree.depths if self.tree else tuple(range(len(self.tokens)))


def pack(works: Sequence[Work], device: torch.device) -> Batch:
    """Packs the work of several sequences into one batch."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    rows: list[int] = []
    for work in works:
        start = len(ids)
        ids.extend(work.tokens)
        positions.extend(work.context + depth for depth in work.depths[-len(work.tokens) :])
        rows.extend(start + row for row in work.logit_rows)
        segments.append(_segment(work, start, device))
    return Batch(
        torch.tensor(ids, device=device),
        torch.tensor(positions, device=device),
        tuple(segments),
        torch.tensor(rows, dtype=torch.int64, device=device),
    )


def _segment(work: Work, start: int, device: torch.device) -> Segment:
    num_rows, num_nodes = len(work.tokens), len(work.depths)
    ancestors = None
    if work.tree is not None and not work.tree.is_chain:
        ancestors = torch.from_numpy(work.tree.mask(num_nodes - num_rows)).to(device)
    return Segment(
        start,
        start + num_rows,
        work.context,
        work.lease.slots(0, work.context + num_nodes),
        torch.tensor(work.depths, device=device),
        ancestors,
    )
