"""Drafting with a second, smaller model of the same vocabulary.

The tree grows level by level, and a node's score is the product of calibrated probabilities on its
path. The draft's KV lives in its own plane under the same block table as the target's: after a
round it keeps the accepted path, and the next round only runs over what is new.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.draft.base import DraftContext, Drafter, Outcome
from draftwood.draft.grow import Calibrator
from draftwood.draft.levels import BRANCHES, MAX_EXPANDED, Growth, LevelGrower
from draftwood.draft.pace import ForwardCost
from draftwood.draft.runner import PlaneKV
from draftwood.errors import CapacityError
from draftwood.kernels import ops
from draftwood.kv import BlockPool
from draftwood.models.base import Model
from draftwood.sampling import SamplingParams
from draftwood.sampling.noise import gumbel
from draftwood.sampling.pick import top_noisy
from draftwood.sampling.processors import log_probs
from draftwood.tree import TokenTree


class ModelDrafter(Drafter):
    """A causal language model as drafter.

    Args:
        model: the draft model.
        pool: the engine's pool; its draft plane holds this model's KV.
        num_tokens: ids below it mean the same for target and draft; others are not proposed.
        cost: what a forward of the model takes; None for unknown.
    """

    name = "model"

    def __init__(
        self, model: Model, pool: BlockPool, num_tokens: int, cost: ForwardCost | None = None
    ) -> None:
        assert pool.draft is not None, "the pool needs a draft plane"
        self._max_len = model.spec.max_model_len
        self._grower = LevelGrower(model, pool.draft, cost)
        self._num_tokens = min(num_tokens, model.spec.vocab_size)
        self._growths: dict[str, Growth] = {}
        self._mean_accepted = 2.0
        self.calibrator = Calibrator()

    def round_s(self) -> float:
        """Seconds of the forwards of a round of middling depth."""
        return self._grower.round_s(self._mean_accepted)

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """Grows the trees of all sequences together, one forward per level."""
        self._growths = {}
        growths = []
        for seq, budget in zip(seqs, budgets, strict=True):
            room = self._max_len - len(seq.tokens) + 1
            if room > 0 and _reserve(seq):
                growths.append(Growth(seq, PlaneKV(seq.lease), seq.tokens, budget, room))
        self._grower.grow(growths, self._branch, self._mean_accepted)
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
            growth.kv.keep(growth.base, growth.accepted(outcome.tokens))

    def stop(self, seq: DraftContext) -> None:
        """Forgets the sequence."""
        self._growths.pop(seq.request_id, None)

    def _tree(self, seq: DraftContext) -> TokenTree:
        growth = self._growths.get(seq.request_id)
        if growth is None:
            return TokenTree.root(seq.tokens[-1])
        return growth.builder.build().best(growth.budget + 1)

    def _branch(self, growth: Growth, nodes: Sequence[int], logits: Tensor) -> None:
        """Gives each node its likeliest children."""
        seq = growth.seq
        for node, row in zip(nodes, logits[:, : self._num_tokens], strict=True):
            position = len(seq.tokens) + growth.depths[node]
            for rank, (token, prior) in enumerate(
                likely_tokens(row, seq.params, seq.seed, position)
            ):
                label = f"model:{rank}.{int(prior * 10)}"
                probability = self.calibrator.probability(label, prior)
                score = growth.builder.scores[node] * probability
                growth.add(node, token, score, label)


def _reserve(seq: DraftContext) -> bool:
    """Room for the root and all that may be expanded; without it the sequence gets no draft."""
    missing = len(seq.tokens) - seq.lease.length
    try:
        seq.lease.reserve(missing + MAX_EXPANDED)
    except CapacityError:
        return False
    return True


def likely_tokens(
    logits: Tensor,
    params: SamplingParams,
    seed: int,
    position: int,
    tokens: Tensor | None = None,
) -> list[tuple[int, float]]:
    """The tokens the target is likeliest to pick if it thinks as the draft does.

    Greedy: the draft's top ones. Sampled: the top ones of `log q + g` with the very noise the
    target will use at this position.

    Args:
        logits: [V], the draft's.
        params, seed: of the request.
        position: of the token to be chosen.
        tokens: [V] the target's id of each column; None where they are the column's number.

    Returns:
        (column, prior of acceptance), best first.
    """
    if params.greedy:
        shares, best = top_shares(logits[None], min(BRANCHES, len(logits)))
        return list(zip(best[0].tolist(), shares[0].tolist(), strict=True))
    if tokens is None:
        columns, keys = top_noisy(logits, params, seed, position, BRANCHES + 1)
    else:
        noisy = log_probs(logits, params).double() + gumbel(seed, position, tokens)
        top = torch.topk(noisy, min(BRANCHES + 1, len(noisy)))
        kept = top.values > float("-inf")
        columns, keys = top.indices[kept].tolist(), top.values[kept].tolist()
    # How far a token leads over the others tells how safe it is under a small disagreement.
    weights = torch.softmax(torch.tensor(keys), dim=-1).tolist()
    return list(zip(columns, weights, strict=True))[:BRANCHES]


def top_shares(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest softmax probabilities of each row, and their tokens."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and ops.available():
        return ops.top_shares(logits, k)
    top = torch.topk(logits.float(), k, dim=-1)
    whole = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    return torch.exp(top.values - whole), top.indices
