"""From a node's logits to the distribution its token is drawn from.

The order is transformers': temperature, top-k, top-p, min-p. Every function takes and returns
log-probabilities or logits of shape [V], with dropped tokens at minus infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.sampling.params import SamplingParams

_NEG_INF = float("-inf")
_FEW = 512


def log_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The logarithm of the distribution that `params` makes of `logits`.

    Args:
        logits: [V] float, as the model gives them.
        params: with a temperature above 0.

    Returns:
        [V] float32 log-probabilities; a dropped token has minus infinity. Not renormalised after
        dropping, which changes no argmax.
    """
    scores = torch.log_softmax(logits.float() / params.temperature, dim=-1)
    if scores[0].isnan():  # then all of them are
        return _greedy(logits)
    if params.top_k > 0:
        scores = keep_top_k(scores, params.top_k)
    if params.top_p < 1:
        scores = keep_top_p(scores, params.top_p)
    if params.min_p > 0:
        scores = keep_min_p(scores, params.min_p)
    return scores


def _greedy(logits: Tensor) -> Tensor:
    """All on the likeliest token.

    It stands in where everything is banned, and where a tiny temperature or penalty has left the
    range of float32: it is the limit there.
    """
    scores = torch.full(logits.shape, _NEG_INF, device=logits.device)
    scores[torch.nan_to_num(logits.float(), nan=_NEG_INF).argmax()] = 0.0
    return scores


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Drops all but the k highest; ties with the k-th stay, as in transformers."""
    if k >= scores.shape[-1]:
        return scores
    threshold = torch.topk(scores, k).values[-1]
    return scores.masked_fill(scores < threshold, _NEG_INF)


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Keeps the fewest of the most likely tokens whose probability together reaches `p`.

    Among equals the lower id comes first.
    """
    # In float64: the sum over a large vocabulary must not decide by its rounding.
    exact = scores.double()
    whole = torch.logsumexp(exact, dim=-1)
    size = scores.shape[-1]
    for count in (_FEW, size):  # sorting a whole vocabulary takes longer than a layer of the model
        order = _best(scores, min(count, size))
        probs = torch.exp(exact[order] - whole)
        before = torch.cumsum(probs, dim=-1) - probs
        kept = order[before < p]
        # What lies behind the best few is dropped too if they hold the border and no tie with it.
        if len(kept) < len(order) and bool(scores[kept[-1]] > scores[order[-1]]):
            break
    result = torch.full_like(scores, _NEG_INF)
    result[kept] = scores[kept]
    return result


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest, in order; among equals the lower index first."""
    if count == scores.shape[-1]:
        return torch.sort(scores, descending=True, stable=True).indices
    some = torch.topk(scores, count).indices.sort().values
    return some[torch.sort(scores[some], descending=True, stable=True).indices]


def keep_min_p(scores: Tensor, min_p: float) -> Tensor:
    """Drops tokens less likely than `min_p` times the most likely one."""
    threshold = scores.max() + torch.log(torch.tensor(min_p, dtype=scores.dtype)).to(scores.device)
    return scores.masked_fill(scores < threshold, _NEG_INF)
