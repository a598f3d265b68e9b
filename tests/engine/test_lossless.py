"""The promise: the text is a function of model, prompt, parameters and seed, and of nothing else.

Not of the drafter, the tree's size, batch mates, block sizes, chunks, what the prefix cache holds,
or whether the request was put back for want of memory. The oracle is plain decoding of each prompt
alone in a fresh engine, which tests/models/test_contract.py compares with transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.draft.base import Drafter
from draftwood.engine.observers import Round
from draftwood.engine.scheduler import Scheduler
from draftwood.sampling import SamplingParams
from draftwood.sampling.noise import gumbel
from draftwood.sampling.processors import log_probs
from draftwood.tree import TokenTree
from tests.tiny import (
    VOCAB,
    TinyLLM,
    bushy_drafter,
    distinct,
    hf_model,
    near_oracle,
    oracle,
    random_prompts,
    reference,
    tiny_llm,
)
from tests.vocabularies import letters_drafter

MODEL = hf_model("llama", calm=True)
PROMPTS = tuple(map(tuple, random_prompts((5, 40, 1, 17))))
NUM_TOKENS = 32

PARAMS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.8, seed=1),
    "hot": SamplingParams(temperature=1.5, seed=2**64 - 1),
    "top_k": SamplingParams(temperature=1.5, top_k=5, seed=3),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=4),
    "min_p": SamplingParams(temperature=1.5, min_p=0.1, seed=5),
    "all": SamplingParams(temperature=1.2, top_k=12, top_p=0.95, min_p=0.02, seed=6),
}
PARAMS = {k: p.but(max_tokens=NUM_TOKENS, ignore_eos=True) for k, p in PARAMS.items()}
DRAFTERS = (
    "none", "suffix", "recycling", "lookup", "auto", "model", "self", "hybrid", "hybrid_self",
    "scripted", "oracle", "near_oracle", "random", "bushy", "text", "tokens",
)  # fmt: skip
SIZES = (0, 1, 2, 4, 8, 33)
# Every size for the two extremes, one size for each other kind of sampling.
CASES = [(kind, size) for kind in ("greedy", "all") for size in SIZES]
CASES += [(kind, 8) for kind in PARAMS if kind not in ("greedy", "all")]


@lru_cache(maxsize=4096)
def plain(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """The text of a prompt decoded plainly, alone, in one chunk."""
    return tiny_llm(MODEL, drafter="none", max_tree_nodes=0).run([prompt], params)[0]


def build(name: str, params: Sequence[SamplingParams] | SamplingParams, **config: Any) -> TinyLLM:
    """An LLM with the drafter of that name; the knowing ones know the plain texts."""
    given_params = [params] * len(PROMPTS) if isinstance(params, SamplingParams) else params
    if name in ("model", "self", "hybrid", "hybrid_self"):
        draft = MODEL if name.endswith("self") else hf_model("llama", seed=77, calm=True)
        drafter = "auto" if name.startswith("hybrid") else "model"
        return tiny_llm(MODEL, draft=draft, drafter=drafter, **config)
    answers = {p: plain(p, one) for p, one in zip(PROMPTS, given_params, strict=True)}
    special: dict[str, Drafter] = {
        "oracle": oracle(answers),
        "near_oracle": near_oracle(answers),
        "scripted": bushy_drafter(VOCAB, seed=9),
        "text": letters_drafter("text", VOCAB),
        "tokens": letters_drafter("tokens", VOCAB),
    }
    return tiny_llm(MODEL, drafter=special.get(name, name), **config)


@pytest.mark.parametrize("kind", list(PARAMS))
def test_the_plain_texts_are_worth_comparing(kind: str) -> None:
    """Texts of one token would be equal under any fault; sampled ones must differ from greedy."""
    texts = [plain(p, PARAMS[kind]) for p in PROMPTS]
    assert all(len(text) == NUM_TOKENS for text in texts)
    assert max(map(distinct, texts)) >= 8
    if kind != "greedy":
        assert texts != [plain(p, PARAMS["greedy"]) for p in PROMPTS]
        assert texts != [plain(p, PARAMS[kind].but(seed=12345)) for p in PROMPTS]


@pytest.mark.parametrize(("kind", "size"), CASES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_same_text_with_any_drafter_and_any_tree_size(name: str, kind: str, size: int) -> None:
    """All prompts in one batch with a drafter, against each alone without."""
    params = PARAMS[kind]
    llm = build(name, params, max_tree_nodes=size, block_size=(1, 3, 16)[size % 3])
    outputs = llm.outputs(PROMPTS, params)
    assert [list(o.token_ids) for o in outputs] == [plain(p, params) for p in PROMPTS]
    if name in ("near_oracle", "oracle", "self", "hybrid_self") and size >= 8:
        assert all(o.metrics.mean_acceptance_length > 1.3 for o in outputs), "nothing accepted"


@pytest.mark.parametrize("kind", ["greedy", "all"])
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "none"])
def test_same_text_when_the_controller_sets_the_size(name: str, kind: str) -> None:
    """Adaptive sizes depend on the clock, so no two runs draw the same trees."""
    params = PARAMS[kind]
    llm = build(name, params, adaptive=True)
    for _ in range(2):
        assert llm.run(PROMPTS, params) == [plain(p, params) for p in PROMPTS]


def test_a_batch_of_different_parameters() -> None:
    """Each row is sampled by its own request's rules, whatever stands beside it."""
    mixed = [PARAMS[kind] for kind in ("greedy", "top_k", "all", "warm")]
    for name in ("bushy", "auto", "model", "hybrid", "near_oracle"):
        llm = build(name, mixed)
        assert llm.run(PROMPTS, mixed) == [
            plain(*pair) for pair in zip(PROMPTS, mixed, strict=True)
        ]


@pytest.mark.parametrize("name", ["auto", "model", "hybrid_self", "near_oracle", "text", "tokens"])
@pytest.mark.parametrize("kind", ["greedy", "all"])
def test_same_text_from_the_prefix_cache(name: str, kind: str) -> None:
    """Blocks that speculation left in the cache must hold the KV of the text alone.

    The second run computes only the tails; the third extends prompt plus output, so that the cached
    blocks it meets are those that decoding wrote.
    """
    params = PARAMS[kind]
    llm = build(name, params, block_size=4)
    wanted = [plain(p, params) for p in PROMPTS]
    assert llm.run(PROMPTS, params) == wanted
    again = llm.outputs(PROMPTS, params)
    assert [list(o.token_ids) for o in again] == wanted
    assert [o.metrics.num_cached_tokens for o in again] == [4, 36, 0, 16]
    if name == "near_oracle":
        return  # knows the short prompts only
    longer = [(*p, *text[:24]) for p, text in zip(PROMPTS, wanted, strict=True)]
    cached = llm.outputs(longer, params)
    assert [list(o.token_ids) for o in cached] == [plain(p, params) for p in longer]
    assert all(o.metrics.num_cached_tokens >= len(o.prompt_token_ids) - 5 for o in cached)


@pytest.mark.parametrize(
    "name",
    ["none", "bushy", "auto", "model", "self", "hybrid", "hybrid_self", "near_oracle", "text"],
)
@pytest.mark.parametrize("kind", ["greedy", "all"])
def test_same_text_when_memory_runs_out(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that was put back computes its tokens anew and goes on where it was."""
    preempted: list[str] = []
    preempt = Scheduler._preempt

    def spy(self: Scheduler, seq: Any) -> None:
        preempted.append(seq.request_id)
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "_preempt", spy)
    params = PARAMS[kind]
    # The largest request wants 72 slots of 100; all four together want 191.
    llm = build(name, params, block_size=4, num_blocks=26, max_batch_tokens=16, max_tree_nodes=8)
    assert llm.run(PROMPTS, params) == [plain(p, params) for p in PROMPTS]
    assert preempted, "the pool was large enough: the test shows nothing"


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_same_text_when_requests_queue(max_num_seqs: int) -> None:
    """Who runs together changes from round to round."""
    for kind in ("greedy", "hot"):
        llm = build("bushy", PARAMS[kind], max_num_seqs=max_num_seqs, max_batch_tokens=9)
        assert llm.run(PROMPTS, PARAMS[kind]) == [plain(p, PARAMS[kind]) for p in PROMPTS]


@pytest.mark.parametrize("kind", ["greedy", "warm", "all"])
def test_the_target_as_its_own_draft_is_always_right(kind: str) -> None:
    """With equal models and shared noise a walk ends only where the tree has no further node.

    It fails when the draft's KV is not the accepted path's, when draft and target disagree on the
    position of the noise, or when a rank other than the first holds the best guess.
    """
    ends: list[bool] = []

    class Watch:
        def on_round(self, round_: Round) -> None:
            for outcome in round_.outcomes:
                tree, last = outcome.tree, outcome.verdict.path[-1]
                ends.append(last not in tree.parents)

    llm = build("self", PARAMS[kind], max_tree_nodes=6)
    llm.engine.observers.append(Watch())
    outputs = llm.outputs(PROMPTS, PARAMS[kind])
    assert all(ends), f"{ends.count(False)} of {len(ends)} walks ended inside the tree"
    assert all(o.metrics.mean_acceptance_length > 2.5 for o in outputs)


def test_a_superset_tree_never_accepts_less() -> None:
    """An extra sibling must not shorten what is accepted: one integer cannot rewind a tree.

    The same context is verified with a chain, and with the chain among many wrong nodes.
    """
    for kind in ("greedy", "all"):
        params = PARAMS[kind]
        for prompt in PROMPTS:
            text = plain(prompt, params)
            small = TokenTree.chain([prompt[-1], *text[:3], (text[3] + 1) % VOCAB])
            big = TokenTree.chain([prompt[-1], *[(t + 1) % VOCAB for t in text[:3]]])
            for extra in range(2, 9):
                big = big.merge(TokenTree.chain([prompt[-1], text[0], (text[1] + extra) % VOCAB]))
            accepted = []
            for tree in (small, big.merge(small), small.merge(big)):
                llm = tiny_llm(MODEL, drafter="none", block_size=3)
                seq = llm.engine.add(list(prompt), params)
                accepted.append(verify_once(llm, seq, tree))
            assert accepted[0] == 3
            assert min(accepted) == 3, accepted


def verify_once(llm: TinyLLM, seq: Any, tree: TokenTree) -> int:
    """Computes a prompt but for its last token, then verifies one tree: how much is accepted."""
    from draftwood.attention import Work, pack
    from draftwood.kv import Lease
    from draftwood.sampling import choose, walk

    lease, tokens = Lease(llm.pool), seq.tokens
    lease.reserve(len(tokens) + len(tree))
    if len(tokens) > 1:
        work = Work(lease, 0, tokens[:-1], None, ())
        llm.model.forward(pack([work], llm.pool.device), llm.pool.target)
        lease.commit(range(len(tokens) - 1))
    lease.reserve(len(tree))
    work = Work(lease, lease.length, tree.tokens, tree, range(len(tree)))
    logits = llm.model.forward(pack([work], llm.pool.device), llm.pool.target)
    verdict = walk(
        tree,
        lambda node, depth: choose(logits[node], seq.params, seq.seed, len(tokens) + depth),
    )
    lease.close()
    llm.engine.abort(seq)
    return verdict.num_accepted


def test_speculation_can_be_turned_off_for_one_request() -> None:
    """One request without, its mates with: no switch of the whole engine."""
    params = [PARAMS["greedy"].but(speculation=i % 2 == 0) for i in range(len(PROMPTS))]
    llm = build("near_oracle", PARAMS["greedy"])
    outputs = llm.outputs(PROMPTS, params)
    assert [list(o.token_ids) for o in outputs] == [plain(p, PARAMS["greedy"]) for p in PROMPTS]
    assert [o.metrics.num_draft_tokens > 0 for o in outputs] == [True, False, True, False]


def test_a_request_may_cap_its_trees() -> None:
    """`max_tree_nodes` of a request bounds its own trees and nobody else's."""
    most: dict[str, int] = {}

    class Watch:
        def on_round(self, round_: Round) -> None:
            for request_id, outcome in zip(round_.request_ids, round_.outcomes, strict=True):
                size = outcome.verdict.num_drafted
                most[request_id] = max(most.get(request_id, 0), size)

    llm = build("bushy", PARAMS["greedy"], max_tree_nodes=8)
    llm.engine.observers.append(Watch())
    caps = (0, 1, 3, None)
    params = [PARAMS["greedy"].but(max_tree_nodes=cap) for cap in caps]
    llm.outputs(PROMPTS, params)
    assert list(most.values()) == [0, 1, 3, 8]


def test_a_request_may_cap_the_depth_of_its_trees() -> None:
    """And stays as wide as it was; nobody else's tree gets lower."""
    depths: dict[str, int] = {}
    sizes: dict[str, int] = {}

    class Watch:
        def on_round(self, round_: Round) -> None:
            for request_id, outcome in zip(round_.request_ids, round_.outcomes, strict=True):
                depth = max(outcome.tree.depths)
                depths[request_id] = max(depths.get(request_id, 0), depth)
                sizes[request_id] = max(sizes.get(request_id, 0), outcome.verdict.num_drafted)

    llm = build("self", PARAMS["greedy"], max_tree_nodes=8)
    llm.engine.observers.append(Watch())
    caps = (0, 1, 2, None)
    params = [PARAMS["greedy"].but(max_draft_depth=cap) for cap in caps]
    outputs = llm.outputs(PROMPTS, params)
    assert [list(o.token_ids) for o in outputs] == [plain(p, PARAMS["greedy"]) for p in PROMPTS]
    assert list(depths.values())[:3] == [0, 1, 2]
    assert list(depths.values())[3] > 2
    assert list(sizes.values())[1] > 1


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("drafter", ["none", "bushy", "auto", "model", "self"])
def test_outputs_that_share_a_prompt_are_those_of_their_seeds(
    drafter: str, block_size: int
) -> None:
    """`n` outputs write behind one prompt: the block where it ends must become each one's own.

    Also when there is too little memory for all of them at once.
    """
    params = PARAMS["warm"].but(n=4)
    prompt = PROMPTS[3]
    wanted = [plain(prompt, PARAMS["warm"].but(seed=1 + i)) for i in range(4)]
    assert len({tuple(text) for text in wanted}) == 4
    for num_blocks in (400, -(-(17 + NUM_TOKENS) // block_size) + 1):
        llm = build(drafter, params, block_size=block_size, num_blocks=num_blocks)
        for _ in range(2):
            [output] = llm.outputs([prompt], params)
            assert [list(o.token_ids) for o in (output, *output.alternatives)] == wanted
        llm.engine.prefix.clear()
        assert llm.pool.num_free == llm.pool.num_blocks


# --- random combinations ---------------------------------------------------------------------


def margin(prompt: tuple[int, ...], text: Sequence[int], params: SamplingParams) -> float:
    """By how much the last token of `text` won over the next best, in perturbed score."""
    tokens = [*prompt, *text]
    with torch.no_grad():
        module = reference("llama", calm=True)
        logits = module(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, -1]
    scores = logits.double()
    if not params.greedy:
        assert params.seed is not None
        scores = log_probs(logits, params).double()
        scores = scores + gumbel(params.seed, len(tokens) - 1, torch.arange(VOCAB))
    top = scores.topk(2).values
    return float(top[0] - top[1])


def assert_same(got: list[int], prompt: tuple[int, ...], params: SamplingParams) -> None:
    """Equal texts, or a first difference where the choice was a tie within float32's rounding."""
    wanted = plain(prompt, params)
    assert len(got) == len(wanted)
    for i, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        if ours != theirs:
            assert margin(prompt, wanted[: i + 1], params) < 1e-4, f"differs at token {i}"
            return


sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.5, 5.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 31, 32, 1000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    max_tree_nodes=st.sampled_from([None, None, 0, 3]),
    max_draft_depth=st.sampled_from([None, None, 0, 1, 2]),
    speculation=st.sampled_from([True, True, True, False]),
    ignore_eos=st.just(True),
)


@given(
    requests=st.lists(st.tuples(st.sampled_from(PROMPTS), sampling), min_size=1, max_size=5),
    name=st.sampled_from(
        ["auto", "suffix", "recycling", "random", "bushy", "model", "self", "hybrid", "hybrid_self"]
    ),
    size=st.integers(0, 12),
    block_size=st.integers(1, 9),
    chunk=st.sampled_from([1, 2, 7, 64]),
    spare=st.integers(0, 60),
    max_num_seqs=st.integers(1, 5),
)
def test_same_text_for_any_combination(
    requests: list[tuple[tuple[int, ...], SamplingParams]],
    name: str,
    size: int,
    block_size: int,
    chunk: int,
    spare: int,
    max_num_seqs: int,
) -> None:
    """Whatever the engine's settings, the batch and the parameters, and with little memory too."""
    needed = -(-(40 + 24) // block_size)
    llm = build(
        name,
        PARAMS["greedy"],
        max_tree_nodes=size,
        block_size=block_size,
        max_batch_tokens=chunk,
        max_num_seqs=max_num_seqs,
        num_blocks=needed + 1 + spare // block_size,
    )
    prompts = [prompt for prompt, _ in requests]
    for _ in range(2):
        texts = llm.run(prompts, [params for _, params in requests])
        for text, (prompt, params) in zip(texts, requests, strict=True):
            assert_same(text, prompt, params)
    llm.engine.prefix.clear()
    assert llm.pool.num_free == llm.pool.num_blocks
