"""Drafting with a second, smaller model of the same vocabulary.

The tree grows level by level: the most promising leaves are run through the draft model in one
forward, each names its likeliest children, and a node's score is the product of calibrated
probabilities on its path (EAGLE-2, arXiv 2406.16858). The draft's KV lives in its own plane under
the same block table as the target's: after a round it keeps the accepted path, and the next round
only runs over what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftwood.attention import Work, pack
from draftwood.draft.base import DraftContext, Drafter, Outcome
from draftwood.draft.grow import Calibrator
from draftwood.errors import CapacityError
from draftwood.kv import BlockPool
from draftwood.models.base import Model
from draftwood.sampling import SamplingParams
from draftwood.sampling.noise import gumbel
from draftwood.sampling.processors import log_probs
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder

_BRANCHES = 4
_WIDTH = 4
_MAX_DEPTH = 8
_MIN_SCORE = 0.1
_CHUNK = 512


@dataclass(slots=True)
class _Growth:
    """A tree while it grows.

    Attributes:
        seq: for whom.
        base: position of the root.
        builder: all nodes so far.
        budget: most draft nodes.
        max_depth: depth below which the draft model has no positions.
        expanded: nodes with KV, in slot order; the root first.
        depths: depth of each node of `builder`.
    """

    seq: DraftContext
    base: int
    builder: TreeBuilder
    budget: int
    max_depth: int
    expanded: list[int] = field(default_factory=lambda: [0])
    depths: list[int] = field(default_factory=lambda: [0])

    def add(self, parent: int, token: int, score: float, label: str) -> None:
        """Adds a leaf."""
        if self.builder.add(parent, token, score, label) == len(self.depths):
            self.depths.append(self.depths[parent] + 1)

    def frontier(self, max_depth: int) -> list[int]:
        """The leaves worth running through the draft model next."""
        max_depth = min(max_depth, self.max_depth)
        if len(self.builder) > self.budget:
            # A leaf outside the best `budget` nodes cannot have a child inside.
            floor = sorted(self.builder.scores, reverse=True)[self.budget]
        else:
            floor = 0.0
        done = set(self.expanded)
        scores = self.builder.scores
        leaves = [
            node
            for node in range(len(self.builder))
            if node not in done
            and self.depths[node] < max_depth
            and scores[node] >= max(floor, _MIN_SCORE)
        ]
        return sorted(sorted(leaves, key=lambda node: -scores[node])[:_WIDTH])

    def expanded_tree(self, fresh: Sequence[int]) -> TokenTree:
        """The tree of the nodes with KV and those about to get it, in slot order."""
        order = [*self.expanded, *fresh]
        place = {node: i for i, node in enumerate(order)}
        place[-1] = -1
        b = self.builder
        return TokenTree(
            tuple(b.tokens[node] for node in order),
            tuple(place[b.parents[node]] for node in order),
            tuple(b.scores[node] for node in order),
            tuple(b.sources[node] for node in order),
        )

    def accepted(self, tokens: Sequence[int]) -> list[int]:
        """Places in slot order of the nodes with KV that `tokens` run through, the root first."""
        place = {node: i for i, node in enumerate(self.expanded)}
        node, path = 0, [0]
        for token in tokens:
            child = self.builder.child(node, token)
            if child is None or child not in place:
                break
            path.append(place[child])
            node = child
        return path


class ModelDrafter(Drafter):
    """A causal language model as drafter.

    Args:
        model: the draft model.
        pool: the engine's pool; its draft plane holds this model's KV.
        num_tokens: ids below it mean the same for target and draft; others are not proposed.
    """

    name = "model"

    def __init__(self, model: Model, pool: BlockPool, num_tokens: int) -> None:
        assert pool.draft is not None, "the pool needs a draft plane"
        self._model = model
        self._pool = pool
        self._plane = pool.draft
        self._num_tokens = min(num_tokens, model.spec.vocab_size)
        self._growths: dict[str, _Growth] = {}
        self._mean_accepted = 2.0
        self.calibrator = Calibrator()

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """Grows the trees of all sequences together, one forward per level."""
        self._growths = {}
        growths = []
        for seq, budget in zip(seqs, budgets, strict=True):
            base = len(seq.tokens) - 1
            room = self._model.spec.max_model_len - base
            growth = _Growth(seq, base, TreeBuilder(seq.tokens[-1]), budget, room)
            if room > 0 and self._reserve(growth):
                growths.append(growth)
        for growth, logits in zip(growths, self._catch_up(growths), strict=True):
            self._branch(growth, [0], logits)
        self._deepen(growths)
        # Only now: had a forward failed, there would be no KV to commit.
        self._growths = {growth.seq.request_id: growth for growth in growths}
        return [self._tree(seq) for seq in seqs]

    def observe(self, seqs: Sequence[DraftContext], outcomes: Sequence[Outcome]) -> None:
        """Keeps the draft's KV of the accepted path."""
        for seq, outcome in zip(seqs, outcomes, strict=True):
            self.calibrator.observe(outcome.tree, outcome.verdict)
            growth = self._growths.pop(seq.request_id, None)
            if growth is None:
                continue
            self._mean_accepted += 0.1 * (outcome.verdict.num_accepted - self._mean_accepted)
            path = growth.accepted(outcome.tokens)
            seq.lease.commit_draft(growth.base, path)

    def stop(self, seq: DraftContext) -> None:
        """Forgets the sequence."""
        self._growths.pop(seq.request_id, None)

    def _reserve(self, growth: _Growth) -> bool:
        """Room for the root and all that may be expanded; without it the sequence gets no draft."""
        missing = len(growth.seq.tokens) - growth.seq.lease.length
        try:
            growth.seq.lease.reserve(missing + _WIDTH * _MAX_DEPTH)
        except CapacityError:
            return False
        return True

    def _tree(self, seq: DraftContext) -> TokenTree:
        growth = self._growths.get(seq.request_id)
        if growth is None:
            return TokenTree.root(seq.tokens[-1])
        return growth.builder.build().best(growth.budget + 1)

    def _catch_up(self, growths: Sequence[_Growth]) -> list[Tensor]:
        """Runs the draft model over what it has not seen; logits at each root, [1, V]."""
        logits: dict[int, Tensor] = {}
        while len(logits) < len(growths):
            works, finals, left = [], [], _CHUNK
            for i, growth in enumerate(growths):
                lease, tokens = growth.seq.lease, growth.seq.tokens
                if i in logits or left == 0:
                    continue
                # The root is always run: its logits are wanted even where its KV is known.
                start = min(lease.draft_length, len(tokens) - 1)
                size = min(len(tokens) - start, left)
                left -= size
                last = start + size == len(tokens)
                rows = (size - 1,) if last else ()
                works.append(Work(lease, start, tokens[start : start + size], None, rows))
                finals += [i] if last else []
            computed = self._forward(works)
            for work in works:
                work.lease.draft_length = work.context + len(work.tokens)
            logits.update({i: computed[row : row + 1] for row, i in enumerate(finals)})
        return [logits[i] for i in range(len(growths))]

    def _deepen(self, growths: Sequence[_Growth]) -> None:
        """Expands leaves level by level while that promises something."""
        max_depth = min(_MAX_DEPTH, round(self._mean_accepted) + 2)
        for _ in range(max_depth - 1):
            fresh = [(growth, growth.frontier(max_depth)) for growth in growths]
            fresh = [(growth, nodes) for growth, nodes in fresh if nodes]
            if not fresh:
                return
            works = [self._expansion(growth, nodes) for growth, nodes in fresh]
            logits = torch.split(self._forward(works), [len(nodes) for _, nodes in fresh])
            for (growth, nodes), rows in zip(fresh, logits, strict=True):
                growth.expanded.extend(nodes)
                self._branch(growth, nodes, rows)

    def _expansion(self, growth: _Growth, nodes: Sequence[int]) -> Work:
        tree = growth.expanded_tree(nodes)
        tokens = tree.tokens[len(growth.expanded) :]
        return Work(growth.seq.lease, growth.base, tokens, tree, range(len(tokens)))

    def _forward(self, works: Sequence[Work]) -> Tensor:
        batch = pack(works, self._pool.device)
        return self._model.forward(batch, self._plane)[:, : self._num_tokens]

    def _branch(self, growth: _Growth, nodes: Sequence[int], logits: Tensor) -> None:
        """Gives each node its likeliest children."""
        seq = growth.seq
        for node, row in zip(nodes, logits, strict=True):
            position = len(seq.tokens) + growth.depths[node]
            for rank, (token, prior) in enumerate(
                likely_tokens(row, seq.params, seq.seed, position)
            ):
                label = f"model:{rank}.{int(prior * 10)}"
                probability = self.calibrator.probability(label, prior)
                score = growth.builder.scores[node] * probability
                growth.add(node, token, score, label)


def likely_tokens(
    logits: Tensor, params: SamplingParams, seed: int, position: int
) -> list[tuple[int, float]]:
    """The tokens the target is likeliest to pick if it thinks as the draft does.

    Greedy: the draft's top ones. Sampled: the top ones of `log q + g` with the very noise the
    target will use at this position.

    Returns:
        (token, prior of acceptance), best first.
    """
    if params.greedy:
        scores = torch.softmax(logits, dim=-1)
        top = torch.topk(scores, min(_BRANCHES, len(scores)))
        return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    scores = log_probs(logits, params).double()
    tokens = torch.arange(len(scores), device=scores.device)
    noisy = scores + gumbel(seed, position, tokens)
    top = torch.topk(noisy, min(_BRANCHES + 1, len(scores)))
    # How far a token leads over the others tells how safe it is under a small disagreement.
    values = top.values.tolist()
    weights = torch.softmax(top.values, dim=-1).tolist()
    return [
        (token, weight)
        for token, weight, value in zip(top.indices.tolist(), weights, values, strict=True)
        if value > float("-inf")
    ][:_BRANCHES]
