"""Beams of a request as one token tree in the engine's round.

The beams share what they agree on. So the request's tokens are its prompt and what all beams have
in common, its root is the last of these, and everything behind is a tree whose leaves are the
beams. Only the leaves are new: the nodes above them were computed in the rounds before and wait
behind the context, uncommitted. One forward with one row per beam computes them all. Then the
search says which beams go on, the nodes that none of them needs are dropped, and what has become
common to all is committed. Nothing is copied but to close gaps.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwood.attention import Work
from draftwood.sampling.beam import BeamSearch, Hypothesis
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder

if TYPE_CHECKING:
    from draftwood.engine.sequence import Sequence


@dataclass(slots=True)
class Beams:
    """The live beams of one request.

    The leaves are the last nodes of the tree: they are the newest, and all have the same depth.

    Attributes:
        search: who decides.
        tree: from the last token that all beams share.
        places: the node of each beam. At the start all are the root.
        num_computed: how many of the first nodes have KV, at the slots behind the context.
    """

    search: BeamSearch
    tree: TokenTree
    places: list[int] = field(default_factory=list)
    num_computed: int = 0

    def __post_init__(self) -> None:
        self.places = self.places or [0] * len(self.search.beams)

    @property
    def num_leaves(self) -> int:
        """Rows whose logits a round of the search needs."""
        return len(set(self.places))

    @property
    def num_missing(self) -> int:
        """Nodes without KV."""
        return len(self.tree) - self.num_computed

    def num_rows(self, num_before: int, room: int) -> int:
        """Rows to compute next; the leaves only all at once.

        Args:
            num_before: tokens in front of the root that have no KV yet.
            room: most rows.
        """
        if num_before > 0 and len(self.tree) > 1:
            return min(num_before, room)  # a chunk is a chain: it ends before the tree begins
        total = num_before + self.num_missing
        return total if total <= room else min(total - self.num_leaves, room)

    def work(self, seq: Sequence, num_rows: int) -> Work:
        """Those rows: a chunk of known tokens (perhaps up to the root), or nodes of the tree."""
        start, num_before = seq.lease.length, seq.num_missing - self.num_missing
        complete = num_rows == seq.num_missing
        wanted = range(num_rows - self.num_leaves, num_rows) if complete else ()
        if num_before > 0:
            return Work(seq.lease, start, seq.tokens[start : start + num_rows], None, wanted)
        tree = self.tree.keep(range(self.num_computed + num_rows))
        return Work(seq.lease, start, tree.tokens[self.num_computed :], tree, wanted)

    def forget(self) -> None:
        """The KV is gone: all nodes have to be computed again."""
        self.num_computed = 0

    def grow(self, parents: Seq[int]) -> tuple[list[int], list[int]]:
        """Makes the tree of the search's new beams out of the old one.

        Args:
            parents: the old beam that each new one continues.

        Returns:
            The nodes that the new beams need, increasing, and those of them that all share; the
            last of these is the new root.
        """
        old, ends = self.tree, [self.places[parent] for parent in parents]
        paths = [old.path(end) for end in sorted(set(ends))]
        steps = takewhile(lambda step: len(set(step)) == 1, zip(*paths, strict=False))
        shared = [step[0] for step in steps]
        needed = sorted(set().union(*paths))
        builder = TreeBuilder(old.tokens[shared[-1]])
        place = {shared[-1]: 0}
        for node in needed[len(shared) :]:
            place[node] = builder.add(place[old.parents[node]], old.tokens[node], 1.0, "beam")
        self.num_computed = len(builder)
        self.places = [
            builder.add(place[end], text[-1], 1.0, "beam")
            for end, text in zip(ends, self.search.beams, strict=True)
        ]
        self.tree = builder.build()
        return needed, shared

    def path(self, tokens: Seq[int]) -> list[int]:
        """The nodes that carry `tokens`, from the root on; it carries the first."""
        path = [0]
        for token in tokens[1:]:
            child = self.tree.child(path[-1], token)
            if child is None:
                break
            path.append(child)
        return path


def advance(seq: Sequence, work: Work, logits: Tensor) -> None:
    """What a forward means for a request with beams: KV is kept, the beams grow, the search ends.

    Args:
        seq: the request. When its search has ended it is finished, with the best texts.
        work: what was computed for it.
        logits: of the leaves, [L, V]; [0, V] when only known tokens were computed.
    """
    beams = seq.beams
    assert beams is not None
    num_rows, num_before = len(work.tokens), seq.num_missing - beams.num_missing
    if len(logits) == 0:
        if num_before > 0:
            seq.lease.commit(range(num_rows))
        else:
            beams.num_computed += num_rows
        return
    if seq.metrics.first_token_s is None:
        seq.metrics.first_token_s = perf_counter()
    if num_before == 0:
        seq.metrics.count_round(0)
    parents = beams.search.advance(_scores(seq, beams, logits))
    if beams.search.done:
        _end(seq, beams, num_before)
        return
    old = beams.tree
    needed, shared = beams.grow(parents)
    kept = [*range(num_before), *(num_before + node for node in needed)]
    seq.lease.commit(kept, tail=beams.num_computed)
    seq.tokens.extend(old.tokens[node] for node in shared[1:])


def _scores(seq: Sequence, beams: Beams, logits: Tensor) -> Tensor:
    """[k, V] log-probabilities under the request's rules, each for its own beam's text."""
    first = len(beams.tree) - beams.num_leaves
    rows = torch.tensor([place - first for place in beams.places], device=logits.device)
    scores = torch.log_softmax(logits.float(), dim=-1)[rows]
    if not seq.rules:
        return scores
    prompt = seq.tokens[: seq.num_prompt_tokens]
    ruled = [
        seq.rules.apply(row, [*prompt, *text], seq.num_prompt_tokens)
        for row, text in zip(scores, beams.search.beams, strict=True)
    ]
    return torch.stack(ruled)


def _end(seq: Sequence, beams: Beams, num_before: int) -> None:
    """Keeps what KV there is of the best text, and finishes the request."""
    found = beams.search.hypotheses() or [Hypothesis((), 0.0)]
    tokens = [*seq.tokens[: seq.num_prompt_tokens], *found[0].tokens]
    root = len(seq.tokens) - 1
    pairs = zip(seq.tokens, tokens, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    path = beams.path(tokens[root:]) if same > root else []
    seq.lease.commit([*range(num_before), *(num_before + node for node in path)])
    seq.lease.truncate(min(same, root) + len(path))
    seq.settle(found)
