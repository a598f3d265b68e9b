"""The law of the text is the target's, exactly: noise, choice, walk and engine.

A sampled token is argmax(log p + g). Three things make its law right: g is standard Gumbel noise,
it is independent over positions, seeds and tokens, and speculation gives each seed the text that
plain sampling gives it. The first two are measured; the third is checked on every tree there is.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from draftwood.draft.synthetic import ScriptedDrafter
from draftwood.sampling import SamplingParams, choose, walk
from draftwood.sampling.noise import gumbel
from draftwood.sampling.processors import log_probs
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder
from tests.tiny import LetterTokenizer, bushy_drafter, hf_model, reference, tiny_llm
from tests.toys import ToyModel, random_law

ALPHA = 1e-3  # all seeds are fixed: a test that passes once passes always

# --- the noise -------------------------------------------------------------------------------

GOLDEN = [
    (0, 0, 0, 2.0868436769674386),
    (0, 0, 1, 0.17385007634518215),
    (1, 0, 0, -0.3097074924693075),
    (0, 1, 0, 0.8509171899612384),
    (1234567890123456789, 4095, 151_935, -0.02638207329229804),
    (2**63 - 1, 7, 3, 1.7966173350543744),
    (2**63, 7, 3, -0.47811536170707475),
    (2**64 - 1, 2**31, 2**31 - 1, 0.24524245792369379),
]


def by_hand(seed: int, position: int, token: int) -> float:
    """The noise in Python integers, after the published SplitMix64, not after the code."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix((mix(seed) + position * golden) & mask)
    bits = mix((key + (token + 1) * golden) & mask)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


@pytest.mark.parametrize(("seed", "position", "token", "value"), GOLDEN)
def test_golden_values(seed: int, position: int, token: int, value: float) -> None:
    """Another value on another device, version or machine gives another text for the same seed."""
    got = float(gumbel(seed, position, torch.tensor([token]))[0])
    assert got == pytest.approx(value, rel=1e-14)
    assert got == pytest.approx(by_hand(seed, position, token), rel=1e-14)


@pytest.mark.cuda
def test_cuda_has_the_same_noise() -> None:
    """A request that moves to another device must go on with the same text."""
    tokens = torch.arange(151_936)
    for seed, position, _, _ in GOLDEN:
        ours, theirs = gumbel(seed, position, tokens), gumbel(seed, position, tokens.cuda()).cpu()
        torch.testing.assert_close(theirs, ours, rtol=1e-14, atol=1e-14)


def test_noise_is_a_function_of_the_key_alone() -> None:
    """The shape, order, dtype and company of the token ids must not matter, nor calls before."""
    tokens = torch.randperm(5000)[:999]
    whole = gumbel(5, 6, torch.arange(5000))
    assert torch.equal(gumbel(5, 6, tokens), whole[tokens])
    assert torch.equal(gumbel(5, 6, tokens.view(27, 37)), whole[tokens].view(27, 37))
    assert torch.equal(gumbel(5, 6, tokens.int()), whole[tokens])
    assert whole.dtype == torch.float64
    assert not torch.equal(gumbel(5, 7, tokens), whole[tokens])
    assert not torch.equal(gumbel(6, 5, tokens), whole[tokens])


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_boundaries_of_the_integers(seed: int) -> None:
    """Signed overflow, a shift that drags the sign along, or log(0) would show here."""
    tokens = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**62])
    for position in (0, 1, 2**20, 2**32, 2**40):
        assert bool(gumbel(seed, position, tokens).isfinite().all())
    many = gumbel(seed, 3, torch.arange(200_000))
    assert -4 < float(many.min()) < -2
    assert 9 < float(many.max()) < 22


def uniforms(noise: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Gumbel noise through its own distribution function: uniform, if it is Gumbel noise."""
    return torch.exp(-torch.exp(-noise)).numpy()


def draws(vary: str, count: int = 20_000) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Uniforms along one of the key's three coordinates."""
    if vary == "token":
        return uniforms(gumbel(11, 12, torch.arange(count)))
    one = torch.tensor([13])
    if vary == "position":
        return uniforms(torch.cat([gumbel(11, position, one) for position in range(count)]))
    return uniforms(torch.cat([gumbel(seed, 12, one) for seed in range(count)]))


@pytest.mark.parametrize("vary", ["token", "position", "seed"])
def test_marginals_and_serial_independence(vary: str) -> None:
    """Standard Gumbel along each coordinate, and neighbours know nothing of each other.

    Seeds 0, 1, 2, ... and consecutive positions are what users and texts use.
    """
    values = draws(vary)
    assert stats.kstest(values, "uniform").pvalue > ALPHA
    counts = np.bincount((values * 64).astype(int), minlength=64)
    assert stats.chisquare(counts).pvalue > ALPHA
    for lag in (1, 2, 16):
        cells = (values[:-lag] * 8).astype(int) * 8 + (values[lag:] * 8).astype(int)
        # Disjoint pairs, so that the counts are independent too.
        disjoint = cells[:: lag + 1] if lag == 1 else cells[::lag]
        assert stats.chisquare(np.bincount(disjoint, minlength=64)).pvalue > ALPHA
    low_bits = (values * 2**20).astype(np.int64) % 16
    assert stats.chisquare(np.bincount(low_bits, minlength=16)).pvalue > ALPHA


def test_coordinates_are_not_exchangeable() -> None:
    """Keys built by adding or xoring parts collide: (seed 1, position 2) with (2, 1), say."""
    tokens = torch.arange(4)
    seen = {
        tuple(gumbel(seed, position, tokens).tolist())
        for seed in range(64)
        for position in range(64)
    }
    assert len(seen) == 64 * 64
    grid = torch.stack([gumbel(3, position, torch.arange(500)) for position in range(200)])
    assert len(torch.unique(grid)) == grid.numel()


# --- the choice ------------------------------------------------------------------------------

LOGITS = torch.tensor([1.0, -0.5, 0.3, 2.2, -3.0, 0.9, 0.0, 1.7])
KINDS = {
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(temperature=1.0, top_k=3),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.5, min_p=0.2),
    "all": SamplingParams(temperature=1.3, top_k=6, top_p=0.95, min_p=0.05),
}


def law_by_hand(params: SamplingParams) -> list[float]:
    """The law in plain Python, from the parameters' documentation."""
    weights = [math.exp(x / params.temperature) for x in LOGITS.tolist()]
    order = sorted(range(8), key=lambda i: -weights[i])
    if params.top_k > 0:
        order = order[: params.top_k]
    total, kept, reached = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if reached < params.top_p:
            kept.append(i)
        reached += weights[i] / total
    floor = params.min_p * max(weights)
    kept = [i for i in kept if weights[i] >= floor]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(8)]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_choice_has_the_law_of_the_parameters(kind: str) -> None:
    """20,000 seeds against the exact law. A token outside it must never be drawn."""
    params, law = KINDS[kind], law_by_hand(KINDS[kind])
    num = 20_000 if kind in ("plain", "all") else 4_000
    counts = Counter(choose(LOGITS, params, seed, 5) for seed in range(num))
    assert all(law[token] > 0 for token in counts)
    support = [i for i in range(8) if law[i] > 0]
    observed = [counts[i] for i in support]
    assert stats.chisquare(observed, [num * law[i] for i in support]).pvalue > ALPHA


def test_the_processed_law_is_the_documented_one() -> None:
    """`log_probs` against plain Python, for all combinations: what is kept, and in what ratio."""
    for t, k, p, m in itertools.product(
        (0.3, 1.0, 2.0), (-1, 0, 1, 4, 8, 99), (0.2, 0.7, 0.99, 1.0), (0.0, 0.05, 0.5, 1.0)
    ):
        params = SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        got = torch.softmax(log_probs(LOGITS, params).double(), dim=-1)
        wanted = torch.tensor(law_by_hand(params), dtype=torch.float64)
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


# --- every tree there is ---------------------------------------------------------------------

TOKENS = (0, 1, 2)


def all_trees(root: int) -> list[TokenTree]:
    """Every tree of depth at most 2 over three tokens: 9 ** 3 of them."""
    subsets = [s for n in range(4) for s in itertools.combinations(TOKENS, n)]
    trees = []
    for below in itertools.product([None, *subsets], repeat=3):
        builder = TreeBuilder(root)
        for token, children in enumerate(below):
            if children is not None:
                node = builder.add(0, token, 0.5)
                for child in children:
                    builder.add(node, child, 0.25)
        trees.append(builder.build())
    return trees


def sampled(law: Any, prompt: tuple[int, ...], seed: int, length: int) -> tuple[int, ...]:
    """Plain sampling, written out."""
    params, tokens = SamplingParams(temperature=1.0), prompt
    for _ in range(length):
        logits = torch.tensor(law(tokens))
        tokens = (*tokens, choose(logits, params, seed, len(tokens)))
    return tokens[len(prompt) :]


def test_on_every_tree_a_walk_is_plain_sampling() -> None:
    """729 trees: the tokens are those of plain sampling, and every right node is accepted.

    A rule that is off for one shape (a sibling that hides another, a bonus token from the wrong
    node, noise of the wrong depth) is off for some of these.
    """
    law, prompt, params = random_law(3, spread=1.0), (1, 0), SamplingParams(temperature=1.0)
    trees = all_trees(prompt[-1])
    assert len(trees) == 729
    for seed in range(12):
        text = sampled(law, prompt, seed, 3)
        for tree in trees:
            histories = [
                prompt + tuple(tree.tokens[i] for i in tree.path(node)[1:])
                for node in range(len(tree))
            ]

            def pick(node: int, depth: int, seed: int = seed, histories: Any = histories) -> int:
                logits = torch.tensor(law(histories[node]))
                return choose(logits, params, seed, len(prompt) + depth)

            verdict = walk(tree, pick)
            assert verdict.tokens == text[: len(verdict.tokens)]
            paths = {h[len(prompt) :] for h in histories}
            right = max(n for n in range(3) if text[:n] in paths)
            assert verdict.num_accepted == right
            assert verdict.num_drafted == len(tree) - 1


def test_the_joint_law_is_exact_by_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise from a finite set, all of it enumerated: the law of three tokens, as fractions.

    With N noise vectors for a position there are N ** 3 seeds, and the law of the text must be the
    product of the targets' laws under the N vectors, for every drafter, adversarial ones included:
    one that knows the noise and drafts what will be chosen, or everything else. It fails if noise
    is used twice, or if a draft has any influence. Runs through the whole engine.
    """
    rng = np.random.default_rng(0)
    vectors = rng.gumbel(size=(6, 3))
    prompt = (1, 0, 2)

    def finite(seed: int, position: int, tokens: Tensor) -> Tensor:
        digit = seed // 6 ** (position - len(prompt)) % 6
        return torch.from_numpy(vectors[digit])[tokens]

    pick = import_module("draftwood.sampling.pick")
    monkeypatch.setattr(pick, "gumbel", finite)
    monkeypatch.setattr(pick.ops, "available", lambda: False)  # the kernels make noise of their own
    toy_law = random_law(3, seed=4, spread=1.0)

    def next_law(history: tuple[int, ...]) -> dict[int, Fraction]:
        scores = torch.log_softmax(torch.tensor(toy_law(history)), dim=-1).double().numpy()
        picks = Counter(int((scores + vector).argmax()) for vector in vectors)
        return {token: Fraction(count, 6) for token, count in picks.items()}

    exact: dict[tuple[int, ...], Fraction] = {(): Fraction(1)}
    for _ in range(3):
        exact = {
            (*text, token): share * part
            for text, share in exact.items()
            for token, part in next_law(prompt + text).items()
        }
    assert len(exact) >= 12, "the law is too narrow to prove anything"
    params = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
    model = ToyModel(toy_law, 3)

    def answer(seq: Any) -> list[int]:
        return sampled_with(finite, toy_law, seq)

    def knowing(seq: Any, budget: int) -> TokenTree:
        return TokenTree.chain([seq.tokens[-1], *answer(seq)])

    def contrary(seq: Any, budget: int) -> TokenTree:
        builder, right = TreeBuilder(seq.tokens[-1]), answer(seq)
        for token in TOKENS:
            if token != right[0]:
                node = builder.add(0, token, 0.9)
                for child in TOKENS:
                    builder.add(node, child, 0.8)
        return builder.build()

    def misleading(seq: Any, budget: int) -> TokenTree:
        right = answer(seq)
        chain = [right[0], (right[1] + 1) % 3, right[2]]
        return TokenTree.chain([seq.tokens[-1], *chain])

    drafters = {
        "knowing": ScriptedDrafter(knowing),
        "contrary": ScriptedDrafter(contrary),
        "misleading": ScriptedDrafter(misleading),
        "bushy": bushy_drafter(3),
    }
    everyone: dict[str, Any] = {"none": "none", **drafters}
    for name, drafter in everyone.items():
        llm = tiny_llm(model, drafter=drafter, tokenizer=LetterTokenizer(3), max_num_seqs=64)
        every = [params.but(seed=seed) for seed in range(6**3)]
        counts = Counter(tuple(ids) for ids in llm.run([prompt] * len(every), every))
        law = {text: Fraction(count, 6**3) for text, count in counts.items()}
        assert law == exact, name


def sampled_with(noise: Any, law: Any, seq: Any) -> list[int]:
    """The next three tokens of a sequence under given noise."""
    tokens = tuple(seq.tokens)
    for _ in range(3):
        scores = torch.log_softmax(torch.tensor(law(tokens)), dim=-1).double()
        noisy = scores + noise(seq.seed, len(tokens), torch.arange(3))
        tokens = (*tokens, int(noisy.argmax()))
    return list(tokens[-3:])


def exact_pairs(prompt: Sequence[int], params: SamplingParams) -> dict[tuple[int, int], float]:
    """The law of two tokens by transformers' own forward."""
    module = reference("llama", vocab_size=4, calm=True)

    def law(tokens: Sequence[int]) -> list[float]:
        with torch.no_grad():
            logits = module(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
        return torch.softmax(log_probs(logits, params).double(), dim=-1).tolist()

    first = law(prompt)
    return {
        (a, b): p * q for a, p in enumerate(first) for b, q in enumerate(law([*prompt, a]))
    }  # fmt: skip


@pytest.mark.parametrize("drafter", ["none", "bushy", "auto", "model"])
def test_the_law_of_a_tiny_model(drafter: str) -> None:
    """Chi-square of the next two tokens, through engine and attention, against transformers."""
    prompt = [1, 0, 3, 3, 2]
    params = SamplingParams(temperature=1.7, top_p=0.98, max_tokens=2, ignore_eos=True)
    law = exact_pairs(prompt, params)
    model = hf_model("llama", vocab_size=4, calm=True)
    draft = hf_model("llama", vocab_size=4, calm=True, seed=5) if drafter == "model" else None
    llm = tiny_llm(
        model, draft=draft, drafter=drafter, tokenizer=LetterTokenizer(4), max_num_seqs=128,
        max_batch_tokens=2048, max_tree_nodes=4,
    )  # fmt: skip
    num = 2_000
    texts = llm.run([prompt] * num, [params.but(seed=seed) for seed in range(num)])
    counts = Counter((a, b) for a, b in texts)
    support = [pair for pair, p in law.items() if p > 0]
    assert set(counts) <= set(support)
    assert len(support) >= 6
    common = [pair for pair in support if num * law[pair] >= 5]
    observed = [*(counts[pair] for pair in common), num - sum(counts[pair] for pair in common)]
    expected = [*(num * law[pair] for pair in common)]
    expected.append(num - sum(expected))
    if expected[-1] < 1e-6 * num:
        observed, expected = observed[:-1], expected[:-1]
    scale = sum(observed) / sum(expected)
    assert stats.chisquare(observed, [e * scale for e in expected]).pvalue > ALPHA
