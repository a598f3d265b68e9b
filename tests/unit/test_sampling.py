"""Parameters, processors against transformers' own, and the walk."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftwood.errors import ConfigError
from draftwood.sampling import SamplingParams, choose, walk
from draftwood.sampling.noise import gumbel
from draftwood.sampling.processors import log_probs
from draftwood.tree import TokenTree


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ("a", "")}, "stop"),
        ({"max_tree_nodes": -1}, "max_tree_nodes"),
    ],
)
def test_bad_parameters_are_named(values: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is .*: it must be "):
        SamplingParams(**values)


def test_unknown_parameters_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown sampling parameter 'topp'"):
        SamplingParams.from_dict({"topp": 1})
    assert SamplingParams.from_dict({"top_p": 0.5}).top_p == 0.5


def test_one_stop_string_need_not_be_a_list() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=40),
    st.floats(0.1, 3),
    st.integers(0, 12),
    st.floats(0.05, 1),
    st.floats(0, 1),
)
def test_kept_tokens_are_transformers(
    values: list[float], temperature: float, k: int, p: float, min_p: float
) -> None:
    logits = torch.tensor(values)
    params = SamplingParams(temperature=temperature, top_k=k, top_p=p, min_p=min_p)
    theirs = TemperatureLogitsWarper(temperature)(None, logits[None])  # type: ignore[arg-type]
    if k:
        theirs = TopKLogitsWarper(k)(None, theirs)  # type: ignore[arg-type]
    if p < 1:
        theirs = TopPLogitsWarper(p)(None, theirs)  # type: ignore[arg-type]
    if min_p > 0:
        theirs = MinPLogitsWarper(min_p)(None, theirs)  # type: ignore[arg-type]
    ours, theirs = log_probs(logits, params).softmax(-1), theirs[0].softmax(-1)
    # Where a threshold is met to the last bit the two may differ in that one token, or in tokens
    # of equal weight (to the last bit of a float32); nothing else.
    different = (ours > 0) != (theirs > 0)
    if different.any():
        weights = (logits / temperature).softmax(-1)[different]
        assert weights.max() - weights.min() <= 1e-6 * weights.max()
    else:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_top_p_keeps_the_token_that_crosses_the_line() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    kept = log_probs(logits, SamplingParams(temperature=1, top_p=0.6)) > -math.inf
    assert kept.tolist() == [True, True, False]


def test_choice_is_the_argmax_of_noisy_log_probabilities() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50)
    params = SamplingParams(temperature=0.7, top_k=20)
    scores = log_probs(logits, params).double()
    for seed in range(20):
        noisy = scores + gumbel(seed, 9, torch.arange(50))
        assert choose(logits, params, seed, 9) == int(noisy.argmax())
    assert choose(logits, SamplingParams(), 1, 9) == int(logits.argmax())


@pytest.mark.parametrize("temperature", [1e-45, 1e-100, 5e-324])
def test_a_tiny_temperature_is_the_greedy_choice(temperature: float) -> None:
    """Logits over it leave the range of float32."""
    logits = torch.tensor([0.5, 3.0, -2.0, 2.9])
    params = SamplingParams(temperature=temperature, top_p=0.9, top_k=2, min_p=0.1)
    assert choose(logits, params, seed=1, position=3) == 1


def test_a_token_is_chosen_where_all_are_banned() -> None:
    """Rules may leave nothing: a text must not end the engine."""
    logits = torch.full((5,), -math.inf)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature)
        assert 0 <= choose(logits, params, seed=1, position=3) < 5


def test_walk_follows_matches_and_stops_at_the_first_miss() -> None:
    tree = TokenTree((1, 2, 3, 4, 5), (-1, 0, 0, 2, 3), (1,) * 5, ("",) * 5)
    picks = {0: 3, 2: 4, 3: 9}
    depths = []

    def pick(node: int, depth: int) -> int:
        depths.append(depth)
        return picks[node]

    verdict = walk(tree, pick)
    assert verdict.path == (0, 2, 3)
    assert verdict.tokens == (3, 4, 9)
    assert (verdict.next_token, verdict.num_accepted, verdict.num_drafted) == (9, 2, 4)
    assert depths == [0, 1, 2]
