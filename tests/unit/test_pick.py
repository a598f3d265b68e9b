"""Short cuts to the tokens of highest `log p + g` find what the whole row gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftwood.kernels import ops
from draftwood.sampling import SamplingParams, choose
from draftwood.sampling.noise import gumbel, stream_key
from draftwood.sampling.pick import top_noisy
from draftwood.sampling.processors import log_probs


def whole_row(
    logits: Tensor, params: SamplingParams, seed: int, position: int, k: int
) -> list[int]:
    """The definition."""
    keys = log_probs(logits, params).double()
    keys = keys + gumbel(seed, position, torch.arange(len(logits)))
    best = torch.topk(keys, min(k, len(keys)))
    return [
        t for t, v in zip(best.indices.tolist(), best.values.tolist(), strict=True) if v > -1e300
    ]


def row(size: int, spread: float, seed: int, banned: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator) * spread
    logits[torch.rand(size, generator=generator) < banned] = float("-inf")
    logits[seed % size] = 0.0  # at least one is left
    return logits


@given(
    size=st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 1000, 5003]),
    spread=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    banned=st.sampled_from([0.0, 0.5, 0.999]),
    temperature=st.sampled_from([1e-3, 0.3, 1.0, 2.0, 50.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 64, 255, 256, 400]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.1, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    k=st.sampled_from([1, 5, 20]),
)
def test_any_row_and_any_parameters(
    size: int,
    spread: float,
    banned: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    k: int,
) -> None:
    assert ops.available()
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    logits = row(size, spread, seed % 1009, banned)
    wanted = whole_row(logits, params, seed, size, k)
    tokens, keys = top_noisy(logits, params, seed, size, k)
    assert keys == sorted(keys, reverse=True)
    if tokens != wanted:  # only where two sums differ by the rounding of a float32
        sums = log_probs(logits, params).double() + gumbel(seed, size, torch.arange(size))
        same = min(len(tokens), len(wanted))
        torch.testing.assert_close(sums[tokens[:same]], sums[wanted[:same]], atol=1e-4, rtol=1e-5)
        assert abs(len(tokens) - len(wanted)) <= 1


def test_the_noise_is_the_noise() -> None:
    """Flat logits leave nothing but the noise: the kernel's stream is Python's, bit for bit."""
    for position in range(50):
        logits = torch.zeros(3000)
        keys, tokens = ops.noisy_top(logits, 1.0, stream_key(2**63 + 5, position), 8)
        noise = gumbel(2**63 + 5, position, torch.arange(3000))
        best = torch.topk(noise, 8)
        assert tokens.tolist() == best.indices.tolist()
        torch.testing.assert_close(keys, best.values, atol=0, rtol=1e-14)


def test_a_rare_noise_is_not_missed() -> None:
    """A token 12 nats below the best wins once in 160,000 times. The short cut must see it then."""
    size, wins = 40_000, 0
    logits = torch.full((size,), -12.0)
    logits[17] = 0.0
    params = SamplingParams(temperature=1.0, seed=0)
    for position in range(40):
        token = choose(logits, params, 3, position)
        assert token == whole_row(logits, params, 3, position, 1)[0]
        wins += token != 17
    assert 1 <= wins <= 25  # 40 e^-12 40,000 / (1 + e^-12 40,000) = 7.9 on the average


def test_ties_go_to_the_lower_token() -> None:
    logits = torch.zeros(600)
    logits[100:400] = 1.0
    for params in (
        SamplingParams(temperature=1.0, top_p=0.2, seed=1),
        SamplingParams(temperature=1.0, top_k=10, seed=1),
        SamplingParams(temperature=1.0, min_p=0.9, seed=1),
    ):
        for position in range(20):
            wanted = whole_row(logits, params, 1, position, 3)
            assert top_noisy(logits, params, 1, position, 3)[0] == wanted


def test_no_kernels_no_short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.8, seed=1)
    logits = row(3000, 3.0, 5)
    short = [choose(logits, params, 1, position) for position in range(30)]
    monkeypatch.setattr(ops, "available", lambda: False)
    assert [choose(logits, params, 1, position) for position in range(30)] == short


def test_where_float32_ends_the_likeliest_token_is_chosen() -> None:
    """A temperature of 1e-45 makes every quotient infinite; nothing was chosen then."""
    logits = row(500, 3.0, 8)
    for extra in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.2}):
        params = SamplingParams(temperature=1e-45, seed=1, **extra)
        assert choose(logits, params, 1, 7) == int(logits.argmax())
    banned = torch.full((500,), float("-inf"))
    assert choose(banned, SamplingParams(temperature=1.0, seed=1), 1, 7) in range(500)
