"""Picking tokens by `log p + g`: what `processors` and `noise` define, without their whole rows.

Few tokens have a chance, and a vocabulary is large: sorting it, or making noise for all of it,
takes longer than a layer of the model. So the likely tokens are looked at first, and the rest only
where they could matter. On a CPU with the kernels that is nearly always enough; the whole row is
the rule that the short cuts are tested against.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftwood.kernels import ops
from draftwood.sampling.noise import gumbel, stream_key
from draftwood.sampling.params import SamplingParams
from draftwood.sampling.processors import keep_min_p, log_probs

_FEW = 256


def top_noisy(
    logits: Tensor, params: SamplingParams, seed: int, position: int, k: int
) -> tuple[list[int], list[float]]:
    """The tokens with the highest `log p + g`, best first.

    Args:
        logits: [V].
        params: of the request, with a temperature above 0.
        seed: of its noise.
        position: of the token that is chosen, counted from the start of the prompt.
        k: how many; fewer where the parameters leave fewer.

    Returns:
        Tokens, and their sums up to one constant.
    """
    k = min(k, len(logits))
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and ops.available():
        logits = logits.contiguous()
        if params.top_k <= 0 and params.top_p >= 1 and params.min_p <= 0:
            key = stream_key(seed, position)
            tokens, keys = _listed(*ops.noisy_top(logits, params.temperature, key, k))
            if keys and math.isfinite(keys[0]):
                return tokens, keys
        few = _likely(logits, params)
        if few is not None:
            return _noisy(*few, seed, position, k)
    scores = log_probs(logits, params)
    kept = torch.nonzero(scores > float("-inf")).squeeze(-1)
    return _noisy(scores[kept], kept, seed, position, k)


def _noisy(
    scores: Tensor, tokens: Tensor, seed: int, position: int, k: int
) -> tuple[list[int], list[float]]:
    keys = scores.double() + gumbel(seed, position, tokens)
    best = torch.topk(keys, min(k, len(keys)))
    return _listed(best.values, tokens[best.indices])


def _listed(keys: Tensor, tokens: Tensor) -> tuple[list[int], list[float]]:
    pairs = zip(tokens.tolist(), keys.tolist(), strict=True)
    some = [(token, key) for token, key in pairs if key > float("-inf")]
    return [token for token, _ in some], [key for _, key in some]


def _likely(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor] | None:
    """Log-probabilities and ids of what the parameters leave, if it is among the likeliest few.

    None where it may not be: then the whole row has to be looked at.
    """
    size = min(params.top_k if 0 < params.top_k < _FEW else _FEW, len(logits))
    values, tokens = ops.top_k(logits[None], min(size + 1, len(logits)))
    values, tokens = values[0], tokens[0]
    if not math.isfinite(float(values[size - 1])):
        return None
    whole_row = size == len(logits)
    if not whole_row and values[size] == values[size - 1]:
        return None  # a tie at the border
    values, tokens = values[:size], tokens[:size]
    scaled = values / params.temperature
    if not math.isfinite(float(scaled.abs().max())):
        return None  # a tiny temperature
    complete = whole_row or 0 < params.top_k <= size
    if complete:
        scores = torch.log_softmax(scaled, dim=-1)
    else:
        scores = scaled - ops.log_sum_exp(logits, params.temperature, float(values[0]))
    if params.top_p < 1:
        probs = scores.double().exp()
        before = torch.cumsum(probs, dim=-1) - probs
        scores = scores.masked_fill(before >= params.top_p, float("-inf"))
        # Whatever lies behind a dropped token is less likely, and dropped too.
        complete = complete or bool(scores[-1] == float("-inf"))
    if params.min_p > 0:
        scores = keep_min_p(scores, params.min_p)
        complete = complete or bool(scores[-1] == float("-inf"))
    kept = scores > float("-inf")
    return (scores[kept], tokens[kept]) if complete else None
