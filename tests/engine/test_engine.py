"""The engine as a whole: memory, aborts, preemption, fairness, bad drafters, reuse, limits.

After everything the pool must be back at its start: what is not given back is lost for as long as
the process lives.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from draftwood.attention import Batch
from draftwood.config import EngineConfig
from draftwood.draft.base import Drafter
from draftwood.draft.synthetic import ScriptedDrafter
from draftwood.engine.observers import Round
from draftwood.engine.scheduler import Scheduler
from draftwood.engine.sequence import Sequence
from draftwood.errors import CapacityError, ConfigError, DraftwoodError, PromptError
from draftwood.kv import BlockPool, KVSpec, Plane
from draftwood.models.base import ModelSpec
from draftwood.models.hf import HFModel
from draftwood.sampling import SamplingParams
from draftwood.tree import TokenTree
from tests.tiny import (
    MAX_LEN,
    VOCAB,
    CountingModel,
    TinyLLM,
    bushy_drafter,
    hf_model,
    make_module,
    near_oracle,
    random_prompts,
    run_until,
    tiny_llm,
)
from tests.toys import ToyModel, random_law

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
LAW = random_law(8, seed=1)
TOY = ToyModel(LAW, 8)
ROUNDS = 10_000


def toy_llm(**arguments: Any) -> TinyLLM:
    """An LLM over a toy model of 8 tokens, with a drafter that is often right."""
    return tiny_llm(
        TOY, vocab_size=8, **{"drafter": bushy_drafter(8), "block_size": 4, **arguments}
    )


def toy_texts(prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """The plain texts."""
    return [tiny_llm(TOY, drafter="none", vocab_size=8).run([p], params)[0] for p in prompts]


def toy_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts for the toy model."""
    return random_prompts(lengths, vocab_size=8, seed=seed)


def assert_all_free(llm: TinyLLM) -> None:
    """Nothing runs, nothing is started, and every block is free once the cache is given up."""
    assert not llm.engine.has_work
    assert not llm.engine.drafter._started
    llm.engine.prefix.clear()
    llm.pool.check()
    assert llm.pool.num_free == llm.pool.num_blocks


# --- aborts ----------------------------------------------------------------------------------


def with_model_drafter(**arguments: Any) -> TinyLLM:
    """A tiny llama with a draft model: two planes to give back."""
    draft = hf_model("llama", seed=40)
    return tiny_llm("llama", draft=draft, **{"block_size": 4, "max_batch_tokens": 8, **arguments})


@pytest.mark.parametrize("make", [toy_llm, with_model_drafter])
@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 4, 5, 8])
def test_an_abort_in_any_phase_frees_the_memory(make: Callable[..., TinyLLM], rounds: int) -> None:
    """Waiting, in the middle of its prompt, at its end, while it decodes: all is given back.

    What was generated stays readable, and the requests beside it go on.
    """
    llm = make(max_batch_tokens=8, max_num_seqs=2)
    prompts = toy_prompts(20, 5, 9)
    seqs = [llm.engine.add(prompt, GREEDY) for prompt in prompts]
    for _ in range(rounds):
        llm.engine.step()
    for victim in (seqs[0], seqs[2]):
        generated = victim.output_ids
        llm.engine.abort(victim)
        llm.engine.abort(victim)
        assert victim.finish_reason in ("abort", "length")
        assert victim.output_ids == generated
        assert victim.lease.block_table == ()
    run_until(llm, seqs)
    assert seqs[1].finish_reason == "length"
    assert len(seqs[1].output_ids) == 12
    assert_all_free(llm)


def test_a_closed_stream_ends_its_request() -> None:
    """A client that disconnects must not leave a request decoding."""
    llm = toy_llm()
    [prompt] = toy_prompts(9)
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_all_free(llm)
    unread = llm.stream(prompt, GREEDY)
    del unread
    assert_all_free(llm)


def test_an_observer_may_abort() -> None:
    """A dashboard's stop button is pressed inside a round: the sequence must not end twice."""
    llm = toy_llm()
    seqs = [llm.engine.add(prompt, GREEDY) for prompt in toy_prompts(9, 5)]

    class Stop:
        def on_round(self, round_: Round) -> None:
            if len(seqs[0].output_ids) >= 3:
                llm.engine.abort(seqs[0])

    llm.engine.observers.append(Stop())
    run_until(llm, seqs)
    assert [seq.finish_reason for seq in seqs] == ["abort", "length"]
    assert_all_free(llm)


class Failing:
    """A model that raises on its n-th forward and works otherwise."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.countdown = 0

    @property
    def spec(self) -> ModelSpec:
        """The inner model's facts."""
        spec: ModelSpec = self.inner.spec
        return spec

    def forward(self, batch: Batch, plane: Plane) -> Tensor:
        """Counts down to the failure."""
        self.countdown -= 1
        if self.countdown == 0:
            raise RuntimeError("the device is gone")
        logits: Tensor = self.inner.forward(batch, plane)
        return logits


@pytest.mark.parametrize("countdown", [1, 2, 3, 5])
def test_a_forward_that_fails_loses_its_requests_and_nothing_else(countdown: int) -> None:
    """Out of memory in a round: `generate` raises, the books balance, the next call works."""
    model = Failing(TOY)
    llm = tiny_llm(model, drafter=bushy_drafter(8), vocab_size=8, block_size=4)
    prompts = toy_prompts(20, 5, 9)
    model.countdown = countdown
    with pytest.raises(RuntimeError, match="device is gone"):
        llm.run(prompts, GREEDY)
    assert_all_free(llm)
    assert llm.run(prompts, GREEDY) == toy_texts(prompts)


def test_one_wrong_prompt_queues_nothing() -> None:
    """A list of prompts of which one is refused must not leave the others in the queue."""
    llm = toy_llm()
    with pytest.raises(PromptError, match="token id 8 does not exist"):
        llm.run([[1, 2], [1, 8]], GREEDY)
    with pytest.raises(PromptError, match="empty"):
        llm.run([[1, 2], []], GREEDY)
    assert_all_free(llm)


@pytest.mark.parametrize("kind", ["toy", "model"])
@pytest.mark.parametrize("seed", range(4))
def test_many_random_requests_with_aborts(kind: str, seed: int) -> None:
    """A leak of a block now and then, in either plane, or a book that does not balance.

    The texts of those that were not aborted are the plain ones.
    """
    rng = random.Random(seed)
    make = toy_llm if kind == "toy" else with_model_drafter
    llm = make(num_blocks=30, max_num_seqs=4, max_batch_tokens=16, max_tree_nodes=6)
    live: list[Sequence] = []
    done: list[Sequence] = []
    prompts = toy_prompts(*(rng.randrange(1, 60) for _ in range(12)), seed=seed)
    for _ in range(25 if kind == "toy" else 12):
        for _ in range(rng.randrange(3)):
            params = GREEDY.but(
                max_tokens=rng.randrange(1, 30), temperature=rng.choice((0.0, 1.0)), seed=seed
            )
            live.append(llm.engine.add(rng.choice(prompts), params))
        for _ in range(rng.randrange(6)):
            llm.engine.step()
            llm.pool.check()
        if live and rng.random() < 0.5:
            victim = live.pop(rng.randrange(len(live)))
            llm.engine.abort(victim)
        done += [seq for seq in live if seq.finished]
        live = [seq for seq in live if not seq.finished]
    run_until(llm, live)
    assert_all_free(llm)
    done += live
    assert len(done) > 5
    for seq in done[:20]:
        prompt = seq.tokens[: seq.num_prompt_tokens]
        model = TOY if kind == "toy" else "llama"
        plain = tiny_llm(model, drafter="none", vocab_size=8 if kind == "toy" else VOCAB)
        assert plain.run([prompt], seq.params)[0] == seq.output_ids


# --- capacity --------------------------------------------------------------------------------


def spy_on_preemption(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of requests that are put back from now on."""
    ids: list[str] = []
    preempt = Scheduler._preempt

    def spy(self: Scheduler, seq: Sequence) -> None:
        ids.append(seq.request_id)
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "_preempt", spy)
    return ids


def test_preemption_resumes_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The youngest is put back, the oldest never; each text is whole and none is made twice."""
    preempted = spy_on_preemption(monkeypatch)
    llm = toy_llm(num_blocks=16, max_tree_nodes=4)
    prompts = toy_prompts(16, 17, 18, 19)
    params = GREEDY.but(max_tokens=30)
    seqs = [llm.engine.add(prompt, params) for prompt in prompts]
    most = [0] * 4
    for _ in range(ROUNDS):
        if all(seq.finished for seq in seqs):
            break
        llm.engine.step()
        lengths = [len(seq.output_ids) for seq in seqs]
        assert all(new >= old for new, old in zip(lengths, most, strict=True))
        most = lengths
    assert preempted
    assert seqs[0].request_id not in preempted
    assert [seq.output_ids for seq in seqs] == toy_texts(prompts, params)
    assert_all_free(llm)


def test_a_wide_tree_costs_nobody_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess must not push out what is computed: the tree gives way, not a request.

    Plainly decoded, these requests fit the pool to its last block.
    """
    preempted = spy_on_preemption(monkeypatch)

    def wide(seq: Any, budget: int) -> TokenTree:
        tokens = list(range(8))
        return TokenTree(
            (seq.tokens[-1], *tokens), (-1,) + (0,) * 8, (1.0,) + (0.9,) * 8, ("",) * 9
        )

    prompts, params = toy_prompts(8, 8), GREEDY.but(max_tokens=8)
    for drafter in ("none", ScriptedDrafter(wide)):
        llm = tiny_llm(TOY, drafter=drafter, vocab_size=8, block_size=4, num_blocks=9)
        assert llm.run(prompts, params) == toy_texts(prompts, params)
        assert not preempted


def test_requests_that_can_never_fit_are_refused_at_the_door() -> None:
    """Instead of waiting for ever, or failing in the middle of a text."""
    llm = toy_llm(num_blocks=5)  # 20 slots, of which a block stays spare
    assert llm.engine.max_length == 16
    with pytest.raises(PromptError, match=r"16 tokens.*context holds 16"):
        llm.engine.add([1] * 16, GREEDY)
    with pytest.raises(ConfigError, match="room for 6"):
        llm.engine.add([1] * 10, GREEDY.but(max_tokens=7))
    [output] = llm.outputs([[1] * 10], GREEDY.but(max_tokens=None))
    assert len(output.token_ids) == 6
    assert output.finish_reason == "length"
    assert_all_free(llm)


def test_a_full_pool_and_an_absurd_one_say_so() -> None:
    """`CapacityError`, one line, what to do."""
    spec = TOY.spec.kv
    pool = BlockPool(spec, num_blocks=2, block_size=4)
    pool.take(), pool.take()
    with pytest.raises(CapacityError, match="raise kv_memory or send fewer"):
        pool.take()
    huge = KVSpec(1000, 1000, 1000, 1000, spec.dtype, spec.device)
    with pytest.raises(CapacityError, match="GiB of KV: lower kv_memory"):
        BlockPool(huge, num_blocks=1 << 20)


def test_settings_out_of_range_are_refused() -> None:
    """Each limit by its name."""
    for name in ("max_num_seqs", "max_batch_tokens", "block_size", "kv_memory"):
        zero: dict[str, Any] = {name: 0}
        with pytest.raises(ConfigError, match=f"{name} is 0"):
            EngineConfig(**zero)
    with pytest.raises(ConfigError, match="max_tree_nodes is -1"):
        EngineConfig(max_tree_nodes=-1)


# --- who gets the rows -----------------------------------------------------------------------


class Rows:
    """An observer that keeps every round."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []

    def on_round(self, round_: Round) -> None:
        """Keeps it."""
        self.rounds.append(round_)


def test_decoding_does_not_starve_behind_a_long_prompt() -> None:
    """A request that decodes gets a token every round while a long prompt is computed in chunks."""
    llm = toy_llm(max_batch_tokens=6)
    first = llm.engine.add(toy_prompts(4)[0], GREEDY.but(max_tokens=12))
    llm.engine.step()
    late = llm.engine.add(toy_prompts(100)[0], GREEDY)
    while not first.finished:
        before = len(first.output_ids)
        llm.engine.step()
        assert len(first.output_ids) > before
        assert not late.output_ids or late.num_missing <= 1
    run_until(llm, [late])
    assert_all_free(llm)


@pytest.mark.parametrize("limit", [1, 2, 7, 33])
def test_no_forward_has_more_rows_than_the_limit(limit: int) -> None:
    """`max_batch_tokens` bounds prompts, roots and trees together."""
    model = CountingModel(TOY)
    llm = tiny_llm(
        model, drafter=bushy_drafter(8), vocab_size=8, max_batch_tokens=limit, max_tree_nodes=12
    )
    prompts = toy_prompts(30, 5, 1, 17, 9)
    assert llm.run(prompts, GREEDY) == toy_texts(prompts)
    assert max(model.rows) <= limit


def test_prompts_are_computed_once_whatever_the_chunks() -> None:
    """Rows of prefill: each prompt token once, for any chunk size, with mates or without."""
    for chunk in (1, 5, 64):
        llm, rows = toy_llm(max_batch_tokens=chunk, drafter="none"), Rows()
        llm.engine.observers.append(rows)
        prompts = toy_prompts(30, 5, 17)
        llm.run(prompts, GREEDY)
        total = sum(round_.num_rows for round_ in rows.rounds)
        assert total == 30 + 5 + 17 + 3 * (GREEDY.max_tokens or 0) - 3


def test_a_live_request_id_cannot_be_taken_again() -> None:
    """Two live requests of one id got each other's trees; a finished one's id may come back."""
    llm = toy_llm()
    prompts = toy_prompts(9, 5)
    first = llm.engine.add(prompts[0], GREEDY, "mine")
    with pytest.raises(ConfigError, match="mine"):
        llm.engine.add(prompts[1], GREEDY, "mine")
    run_until(llm, [first])
    second = llm.engine.add(prompts[1], GREEDY, "mine")
    run_until(llm, [second])
    assert [first.output_ids, second.output_ids] == toy_texts(prompts)
    assert_all_free(llm)


# --- drafters that misbehave -----------------------------------------------------------------


def tree_of(
    seq: Any,
    tokens: tuple[Any, ...] = (1, 2, 3),
    parents: tuple[int, ...] = (-1, 0, 1, 1),
    scores: tuple[Any, ...] = (1.0, 0.9, 0.8, 0.7),
    sources: tuple[str, ...] = ("", "x", "x", "x"),
    root: int | None = None,
) -> TokenTree:
    """A tree of the right shape, but for what is given."""
    token = seq.tokens[-1] if root is None else root
    return TokenTree((token, *tokens), parents, scores, sources)


def changes_the_context(seq: Any) -> TokenTree:
    raise LookupError("gone")


GARBAGE: dict[str, Callable[[Any], Any]] = {
    "raises": changes_the_context,
    "nothing": lambda seq: None,
    "not a tree": lambda seq: [1, 2, 3],
    "empty": lambda seq: TokenTree((), (), (), ()),
    "wrong root": lambda seq: tree_of(seq, root=(seq.tokens[-1] + 1) % 8),
    "token too large": lambda seq: tree_of(seq, tokens=(1, 8, 3)),
    "token negative": lambda seq: tree_of(seq, tokens=(-1, 2, 3)),
    "token a fraction": lambda seq: tree_of(seq, tokens=(1.5, 2, 3)),
    "token a string": lambda seq: tree_of(seq, tokens=("a", 2, 3)),
    "twins": lambda seq: tree_of(seq, tokens=(1, 2, 2)),
    "child before parent": lambda seq: tree_of(seq, parents=(-1, 2, 0, 1)),
    "own parent": lambda seq: tree_of(seq, parents=(-1, 1, 1, 1)),
    "two roots": lambda seq: tree_of(seq, parents=(-1, -1, 1, 1)),
    "root with a parent": lambda seq: tree_of(seq, parents=(0, 0, 1, 1)),
    "short parents": lambda seq: tree_of(seq, parents=(-1, 0)),
    "short scores": lambda seq: tree_of(seq, scores=(1.0, 0.9)),
    "short sources": lambda seq: tree_of(seq, sources=("",)),
    "no scores": lambda seq: tree_of(seq, scores=(None,) * 4),
    "nan scores": lambda seq: tree_of(seq, scores=(1.0, math.nan, 0.9, math.nan)),
    "infinite scores": lambda seq: tree_of(seq, scores=(1.0, math.inf, math.inf, -math.inf)),
    "scores that grow": lambda seq: tree_of(seq, scores=(0.1, 0.2, 0.9, 0.8)),
    "negative scores": lambda seq: tree_of(seq, scores=(-1.0, -2.0, -3.0, -4.0)),
}


@pytest.mark.parametrize("config", ["whole", "adaptive", "small", "crowded"])
@pytest.mark.parametrize("kind", list(GARBAGE))
def test_garbage_from_a_drafter_is_harmless(
    kind: str, config: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Other people's code: it costs speed, never the text, the engine or the log.

    Each way of cutting a tree to size meets the garbage: not at all, by cost, by nodes, by rows.
    """
    settings: dict[str, dict[str, Any]] = {
        "whole": {},
        "adaptive": {"adaptive": True},
        "small": {"max_tree_nodes": 2},
        "crowded": {"max_batch_tokens": 4},
    }
    drafter = ScriptedDrafter(lambda seq, budget: GARBAGE[kind](seq))
    llm = toy_llm(drafter=drafter, **settings[config])
    prompts = toy_prompts(9, 5)
    with caplog.at_level(logging.WARNING, "draftwood"):
        assert llm.run(prompts, GREEDY) == toy_texts(prompts)
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) <= 1, "a broken drafter is named once, not in every round"
    if kind not in ("infinite scores", "scores that grow", "negative scores", "nan scores"):
        assert len(warnings) == 1
        assert "scripted" in warnings[0].getMessage()
    assert_all_free(llm)


def test_too_many_nodes_are_cut_to_the_budget() -> None:
    """A drafter that ignores its budget must not make a forward of thousands of rows."""

    def huge(seq: Any, budget: int) -> TokenTree:
        tree = TokenTree.root(seq.tokens[-1])
        for token in range(8):
            tree = tree.merge(TokenTree.chain([seq.tokens[-1], token, *range(8), *range(8)]))
        return tree

    model = CountingModel(TOY)
    llm = tiny_llm(model, drafter=ScriptedDrafter(huge), vocab_size=8, max_tree_nodes=5)
    prompts = toy_prompts(9, 5)
    assert llm.run(prompts, GREEDY) == toy_texts(prompts)
    assert max(model.rows) <= 14
    assert llm.engine.drafter.num_failures == 0


class Unreliable(Drafter):
    """Raises in the method that is named, always or now and then."""

    name = "unreliable"

    def __init__(self, method: str, chance: float) -> None:
        self._rng = random.Random(1)
        self._method, self._chance = method, chance
        self._good = bushy_drafter(8)
        self.live: set[str] = set()

    def _maybe(self, method: str) -> None:
        if method == self._method and self._rng.random() < self._chance:
            raise OSError(f"{method} failed")

    def start(self, seq: Any) -> None:
        """Notes the sequence, or raises."""
        self._maybe("start")
        assert seq.request_id not in self.live, "started twice"
        self.live.add(seq.request_id)

    def propose(self, seqs: Any, budgets: Any) -> list[TokenTree]:
        """Good trees, or too few of them, or an error."""
        assert {seq.request_id for seq in seqs} <= self.live, "asked for one that never started"
        self._maybe("propose")
        trees = self._good.propose(seqs, budgets)
        return trees[1:] if self._method == "count" else trees

    def observe(self, seqs: Any, outcomes: Any) -> None:
        """Nothing, or an error."""
        assert {seq.request_id for seq in seqs} <= self.live
        self._maybe("observe")

    def stop(self, seq: Any) -> None:
        """Forgets the sequence, or raises."""
        self.live.discard(seq.request_id)
        self._maybe("stop")


@pytest.mark.parametrize("method", ["start", "propose", "count", "observe", "stop"])
@pytest.mark.parametrize("chance", [1.0, 0.4])
def test_a_drafter_that_raises_anywhere_is_harmless(
    method: str, chance: float, caplog: pytest.LogCaptureFixture
) -> None:
    """And is named once. With a tiny pool, so that sequences stop and start again."""
    drafter = Unreliable(method, chance)
    llm = toy_llm(drafter=drafter, num_blocks=14, max_num_seqs=3)
    prompts = toy_prompts(9, 5, 20, 1)
    with caplog.at_level(logging.WARNING, "draftwood"):
        for _ in range(3):
            assert llm.run(prompts, GREEDY) == toy_texts(prompts)
    assert len(caplog.records) == 1
    assert llm.engine.drafter.num_failures > 1
    assert not drafter.live
    assert_all_free(llm)


def test_a_draft_model_that_fails_now_and_then_is_harmless() -> None:
    """A failed draft forward must not leave KV that was never computed as if it were there.

    Debug mode holds NaN there, which would show as a drafter that is never right again.
    """
    target = hf_model("llama", calm=True)
    draft = Failing(target)
    llm = tiny_llm(target, draft=draft, block_size=4, max_tree_nodes=6)
    prompts = random_prompts((20, 9, 33))
    params = GREEDY.but(max_tokens=24)
    plain = tiny_llm(target, drafter="none").run(prompts, params)
    for countdown in (1, 2, 3, 4, 7):
        draft.countdown = countdown
        assert llm.run(prompts, params) == plain
    assert llm.engine.drafter.num_failures == 5
    healthy = llm.outputs(prompts, params)
    assert [list(o.token_ids) for o in healthy] == plain
    assert all(o.metrics.mean_acceptance_length > 2 for o in healthy)
    assert llm.engine.drafter.num_failures == 5
    assert_all_free(llm)


# --- reuse -----------------------------------------------------------------------------------


def test_an_identical_request_computes_only_its_tail() -> None:
    """The second and third time a prompt comes, a block at most is computed again."""
    target = CountingModel(hf_model("llama"))
    llm = tiny_llm(target, drafter="none", block_size=4)
    [prompt] = random_prompts([82])
    rows = []
    for _ in range(3):
        target.clear()
        [output] = llm.outputs([prompt], GREEDY.but(max_tokens=2))
        rows.append((target.num_rows, output.metrics.num_cached_tokens))
    assert rows == [(83, 0), (3, 80), (3, 80)]


def test_the_draft_model_reads_a_prompt_once() -> None:
    """Over a whole answer: the prompt once, then what is new; the second request: its tail."""
    draft = CountingModel(hf_model("llama", calm=True))
    llm = tiny_llm(hf_model("llama", calm=True), draft=draft, block_size=4, max_tree_nodes=6)
    [prompt] = random_prompts([100])
    params = GREEDY.but(max_tokens=30)
    counted = []
    for _ in range(2):
        draft.clear()
        [output] = llm.outputs([prompt], params)
        # Its largest forward is the one that catches up.
        counted.append(max(draft.rows))
        rounds = output.metrics.num_rounds
        assert sum(draft.rows) <= counted[-1] + rounds * (2 + 8 * 4)
    assert counted[0] == 101
    assert counted[1] <= 6, "the prompt was read again"
    assert_all_free(llm)


@pytest.mark.parametrize("drafter", ["none", "bushy", "auto", "near_oracle", "model"])
def test_the_hit_rate_does_not_depend_on_speculation(drafter: str) -> None:
    """A conversation of three turns: each finds everything before it, but for a block's rest."""
    texts: list[list[int]] = []
    prompt = random_prompts([21])[0]
    plain = tiny_llm("llama", drafter="none")
    turns, wanted = [prompt], []
    for turn in range(3):
        wanted.append(plain.run([turns[-1]], GREEDY)[0])
        turns.append([*turns[-1], *wanted[-1], 7 + turn, 3])
    answers = {tuple(t): text for t, text in zip(turns, wanted, strict=False)}
    llm = tiny_llm(
        "llama",
        draft=hf_model("llama", seed=40) if drafter == "model" else None,
        drafter=near_oracle(answers) if drafter == "near_oracle" else drafter,
        block_size=4,
    )
    cached = []
    for turn in turns[:3]:
        [output] = llm.outputs([turn], GREEDY)
        texts.append(list(output.token_ids))
        cached.append(output.metrics.num_cached_tokens)
    assert texts == wanted
    # 21 + 12 tokens, the last of which was never computed: 8 blocks; and so on.
    assert cached == [0, 32, 44]


def test_requests_with_a_common_prefix_share_its_blocks() -> None:
    """Eight requests over one long prompt must not take eight times its memory."""
    llm = toy_llm(num_blocks=60, max_num_seqs=8, max_tree_nodes=4)
    [common] = toy_prompts(80)
    llm.run([common], GREEDY.but(max_tokens=1))
    prompts = [[*common, token] for token in range(8)]
    seqs = [llm.engine.add(prompt, GREEDY) for prompt in prompts]
    llm.engine.step()
    assert all(seq.lease.length >= 80 for seq in seqs)
    assert llm.pool.num_free > 0
    run_until(llm, seqs)
    assert [seq.output_ids for seq in seqs] == toy_texts(prompts)
    assert_all_free(llm)


def test_another_models_cache_is_not_used() -> None:
    """Two engines on one pool: KV of the same tokens under another model is another KV."""
    llm = toy_llm()
    [prompt] = toy_prompts(20)
    llm.run([prompt], GREEDY)
    other = ToyModel(random_law(8, seed=2), 8, name="another")
    llm.model = other
    engine = llm.make_engine(bushy_drafter(8))
    llm.engine = engine
    [output] = llm.outputs([prompt], GREEDY)
    assert output.metrics.num_cached_tokens == 0
    assert (
        list(output.token_ids)
        == tiny_llm(other, drafter="none", vocab_size=8).run([prompt], GREEDY)[0]
    )


def test_a_hash_collision_costs_a_computation_and_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block under one of two keys: tokens are compared on a hit, not only hashes."""

    class Weak:
        def __init__(self, data: bytes, digest_size: int) -> None:
            self._sum = sum(data) % 2

        def digest(self) -> bytes:
            """One of two."""
            return b"ab"[self._sum : self._sum + 1]

    monkeypatch.setattr("draftwood.kv.chain.blake2b", Weak)
    llm = toy_llm(block_size=2)
    for seed in range(6):
        prompts = toy_prompts(9, 14, 5, seed=seed)
        for _ in range(2):
            assert llm.run(prompts, GREEDY) == toy_texts(prompts)
    assert_all_free(llm)


# --- the end of the context ------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["gpt2", "opt", "llama"])
@pytest.mark.parametrize("drafter", ["none", "bushy", "auto", "model"])
def test_positions_never_leave_the_context(arch: str, drafter: str) -> None:
    """Learned positions end where the context does: a node behind it reads out of bounds.

    To the very last token, in the target and in the draft model, without a failure of the drafter.
    """
    target = CountingModel(hf_model(arch))
    draft = CountingModel(hf_model(arch, seed=40)) if drafter == "model" else None
    llm = tiny_llm(target, draft=draft, drafter=drafter, max_tree_nodes=12)
    prompts = random_prompts((MAX_LEN - 10, MAX_LEN - 1, MAX_LEN - 40))
    outputs = llm.outputs(prompts, GREEDY.but(max_tokens=None))
    assert [len(o.token_ids) for o in outputs] == [10, 1, 40]
    assert max(map(max, target.positions)) <= MAX_LEN - 2
    if draft is not None:
        assert max(map(max, draft.positions)) <= MAX_LEN - 1
        assert len(draft.rows) > 0
    assert llm.engine.drafter.num_failures == 0
    plain = tiny_llm(arch, drafter="none").run(prompts, GREEDY.but(max_tokens=None))
    assert [list(o.token_ids) for o in outputs] == plain
    with pytest.raises(DraftwoodError):
        llm.engine.add([1] * MAX_LEN, GREEDY.but(max_tokens=None))
    assert_all_free(llm)


def test_a_draft_model_with_a_shorter_context_falls_silent() -> None:
    """Beyond its own positions it has nothing to say: no error, no warning, and nothing queued."""
    draft = CountingModel(HFModel(make_module("gpt2", n_positions=64)))
    llm = tiny_llm("llama", draft=draft, max_tree_nodes=8)
    prompts = random_prompts((40, 60, 70))
    params = GREEDY.but(max_tokens=40)
    plain = tiny_llm("llama", drafter="none").run(prompts, params)
    for _ in range(2):
        outputs = llm.outputs(prompts, params)
        assert [list(o.token_ids) for o in outputs] == plain
    assert llm.engine.drafter.num_failures == 0
    assert max(map(max, draft.positions)) <= 63
    drafted = [o.metrics.num_draft_tokens for o in outputs]
    assert drafted[0] > 0
    assert drafted[2] == 0
    assert_all_free(llm)


# --- random histories ------------------------------------------------------------------------

commands = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 20)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


# Once, a sequence that was put back in the very round that planned for it took a block along.
PUT_BACK = [
    *[("add", 36, 20), ("add", 6, 14), ("step", 1, 0), ("clear", 0, 0), ("add", 9, 5)],
    *[("step", 3, 0), ("clear", 0, 0), ("step", 10, 0), ("abort", 0, 0), ("abort", 1, 0)],
]


@example(commands=PUT_BACK, block_size=5, num_seqs=4, chunk=18, nodes=5)
@given(
    commands=commands,
    block_size=st.integers(1, 7),
    num_seqs=st.integers(1, 4),
    chunk=st.integers(1, 20),
    nodes=st.integers(0, 10),
)
def test_any_history_leaves_the_pool_as_it_was(
    commands: list[tuple[str, int, int]], block_size: int, num_seqs: int, chunk: int, nodes: int
) -> None:
    """Adds, rounds, aborts and cache clearings in any order, in a pool that is always too small."""
    llm = toy_llm(
        block_size=block_size,
        num_blocks=-(-60 // block_size) + 2,
        max_num_seqs=num_seqs,
        max_batch_tokens=chunk,
        max_tree_nodes=nodes,
    )
    seqs: list[Sequence] = []
    for name, number, length in commands:
        if name == "add":
            params = GREEDY.but(max_tokens=length)
            seqs.append(llm.engine.add(toy_prompts(number, seed=number % 3)[0], params))
        elif name == "abort" and seqs:
            llm.engine.abort(seqs[number % len(seqs)])
        elif name == "clear":
            llm.engine.prefix.clear()
        for _ in range(number if name == "step" else 0):
            llm.engine.step()
        llm.pool.check()
    run_until(llm, seqs)
    for seq in seqs:
        if seq.finish_reason == "length":
            assert seq.output_ids == list(_toy_text(tuple(seq.tokens), seq.num_prompt_tokens))
    assert_all_free(llm)


def _toy_text(tokens: tuple[int, ...], num_prompt: int) -> tuple[int, ...]:
    """Greedy continuation of a prompt to the same length, written out."""
    text = tokens[:num_prompt]
    while len(text) < len(tokens):
        logits = LAW(text)
        text = (*text, max(range(8), key=lambda i: logits[i]))
    return text[num_prompt:]


def test_a_pool_held_by_another_engine_is_an_error_and_not_a_hang() -> None:
    """The only running sequence once gave way to itself for ever: no token and no error."""
    llm = toy_llm()
    held = [llm.pool.take() for _ in range(llm.pool.num_free)]
    [prompt] = toy_prompts(9)
    with pytest.raises(CapacityError, match="KV pool is full"):
        llm.generate(prompt, GREEDY)
    llm.pool.release(held)
    assert_all_free(llm)
    assert llm.generate(prompt, GREEDY)[0].finish_reason == "length"
