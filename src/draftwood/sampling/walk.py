"""The one verifier: the target picks a token at a node, the walk follows the child that has it.

A drafter only decides which nodes exist. What is picked at a node depends on the target's logits
there, the request's parameters and the noise at (seed, position, token), so the tree's shape can
shorten a walk but never change the tokens it yields. With temperature 0 this is greedy tree
verification; above it, sample-and-match with shared Gumbel noise (Daliri, Musco, Suresh 2024,
"Coupling without communication and drafter-invariant speculative decoding").
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.sampling.params import SamplingParams
from draftwood.sampling.pick import top_noisy
from draftwood.tree import TokenTree


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found a token, and which it found likeliest there.

    Attributes:
        token: the token that was chosen.
        logprob: its log-probability under the model alone: no penalties, no temperature.
        rank: 1 for the likeliest token.
        top: (token, log-probability) of the likeliest ones, best first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities at one place, from its raw [V] logits."""
    scores = torch.log_softmax(logits.float(), dim=-1)
    own = scores[token]
    top = torch.topk(scores, min(num_top, len(scores)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprobs(token, float(own), int((scores > own).sum()) + 1, tuple(pairs))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided about one tree.

    Attributes:
        path: node indices that are right, from the root (0) down; increasing.
        tokens: what they yield: the tokens of `path[1:]` and then the bonus token.
        num_drafted: nodes in the tree, the root not counted.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    num_drafted: int

    @property
    def next_token(self) -> int:
        """The bonus token: the target's own choice after the last accepted node."""
        return self.tokens[-1]

    @property
    def num_accepted(self) -> int:
        """Draft tokens that were right; the bonus token is not counted."""
        return len(self.path) - 1


def walk(
    tree: TokenTree, pick: Callable[[int, int], int | None], ends: Collection[int] = ()
) -> Verdict:
    """Follows the target's choices down the tree until one has no node, or ends the text.

    Args:
        tree: what was verified.
        pick: `pick(node, depth)` is the token the target chooses after `node`. None says that it
            cannot be known yet, which must not be at the root: that node is not accepted then, and
            its token is the last one of the round.
        ends: tokens that end the text. Nobody is asked what comes behind one.
    """
    node, path, tokens = 0, [0], list[int]()
    while True:
        token = pick(node, len(path) - 1)
        if token is None:
            assert len(path) > 1, "the root's successor is always known"
            return Verdict(tuple(path[:-1]), tuple(tokens), len(tree) - 1)
        tokens.append(token)
        child = tree.child(node, token)
        if child is None or token in ends:
            return Verdict(tuple(path), tuple(tokens), len(tree) - 1)
        path.append(child)
        node = child


def choose(logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The target's token at one node.

    Args:
        logits: [V].
        params: of the request.
        seed: of the request's noise.
        position: of the token that is chosen, counted from the start of the prompt.
    """
    if params.greedy:
        return int(logits.argmax())
    return top_noisy(logits, params, seed, position, 1)[0][0]
