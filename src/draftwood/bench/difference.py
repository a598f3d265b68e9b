"""Whether two texts are the same, and if not, how close a call it was for the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.attention import Work, pack
from draftwood.kv import BlockPool, Lease
from draftwood.models.base import Model
from draftwood.sampling import SamplingParams
from draftwood.sampling.noise import gumbel
from draftwood.sampling.processors import log_probs

_CHUNK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where a text leaves that of plain decoding.

    Attributes:
        position: index in the output.
        plain_token: what plain decoding has there; None when it had ended.
        token: what the other has there; None when it had ended.
        margin: by how much the target prefers its best token there to its second best (logits; in
            sampling, log-probabilities with their noise). Near 0, rounding may decide.
        gap: by how much it prefers `plain_token` to `token`; None when one had ended.
    """

    position: int
    plain_token: int | None
    token: int | None
    margin: float
    gap: float | None


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing; None when there is none."""
    for position, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return position
    return None if len(plain) == len(other) else min(len(plain), len(other))


def explain(
    model: Model,
    pool: BlockPool,
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    params: SamplingParams,
) -> Difference | None:
    """Compares two outputs for one prompt; where they part, asks the target by how much.

    Args:
        model: the target.
        pool: with room for the text up to the difference.
        prompt_ids: of the prompt.
        plain, other: the two outputs.
        params: what both were generated with; a seed if sampled.
    """
    position = first_difference(plain, other)
    if position is None:
        return None
    tokens = [*prompt_ids, *plain[:position]]
    scores = _scores(last_logits(model, pool, tokens), len(tokens), params)
    best = torch.topk(scores, 2).values
    plain_token = plain[position] if position < len(plain) else None
    token = other[position] if position < len(other) else None
    gap = None
    if plain_token is not None and token is not None:
        gap = float(scores[plain_token] - scores[token])
    return Difference(
        position=position,
        plain_token=plain_token,
        token=token,
        margin=float(best[0] - best[1]),
        gap=gap,
    )


def last_logits(model: Model, pool: BlockPool, tokens: Sequence[int]) -> Tensor:
    """[V], the target's logits after `tokens`, computed afresh and nothing else in the batch."""
    lease = Lease(pool)
    try:
        logits = torch.empty(0)
        for start in range(0, len(tokens), _CHUNK):
            chunk = tokens[start : start + _CHUNK]
            lease.reserve(len(chunk))
            work = Work(lease, start, chunk, None, [len(chunk) - 1])
            logits = model.forward(pack([work], pool.device), pool.target)
            lease.commit(range(len(chunk)))
        return logits[0]
    finally:
        lease.close()


def _scores(logits: Tensor, position: int, params: SamplingParams) -> Tensor:
    """[V], what the verifier takes the largest of."""
    if params.greedy:
        return logits
    assert params.seed is not None
    everything = torch.arange(logits.shape[-1], device=logits.device)
    return log_probs(logits, params).double() + gumbel(params.seed, position, everything)
