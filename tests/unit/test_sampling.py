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


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"top_k": 2.5}, "top_k is 2.5: it must be an integer"),
        ({"max_tokens": "7"}, "max_tokens is '7': it must be an integer"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"n": None}, "n is None: it must be an integer"),
        ({"temperature": "hot"}, "temperature is 'hot': it must be a number"),
        ({"top_p": None}, "top_p is None: it must be a number"),
        ({"ignore_eos": "false"}, "ignore_eos is 'false': it must be True or False"),
        ({"cache_salt": 7}, "cache_salt is 7: it must be a string"),
        ({"stop": ["a", 3]}, "stop is .*non-empty strings"),
        ({"stop": 3}, "stop is 3: it must be a sequence"),
        ({"bad_words": ["a", ""]}, "bad_words is .*non-empty strings"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids is .*token ids"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5: it must be a sequence"),
        ({"logits_processors": ["a"]}, "logits_processors is .*functions"),
        ({"logit_bias": [1]}, "logit_bias is .*mapping"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias is 'a': it must be keyed by token ids"),
        ({"logit_bias": {1: "a"}}, "logit_bias is 'a': it must be made of numbers"),
        ({"logit_bias": {1: math.nan}}, "logit_bias is nan"),
        ({"max_draft_depth": -1}, "max_draft_depth is -1: it must be at least 0"),
    ],
)
def test_wrong_types_are_refused_at_once(values: dict[str, Any], words: str) -> None:
    """Later they would stop a round, and with it the requests of others."""
    with pytest.raises(ConfigError, match=words):
        SamplingParams(**values)


def test_one_word_is_one_word_and_json_has_token_ids_as_strings() -> None:
    """`bad_words="foo"` once banned three letters; JSON cannot write integer keys."""
    params = SamplingParams(bad_words="foo", stop="bar", logit_bias={"5": 1, 6: -math.inf})  # type: ignore[arg-type, dict-item]
    assert (params.bad_words, params.stop) == (("foo",), ("bar",))
    assert params.logit_bias == {5: 1, 6: -math.inf}
    assert params.but(seed=1).but(seed=None) == params
    assert params.but(max_tokens=None).max_tokens is None
