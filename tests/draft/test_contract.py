"""What every drafter promises, whoever wrote it: one suite over all of them.

A drafter sees sequences only through `start`, `propose`, `observe` and `stop`. Here it is driven by
hand, without an engine, so that each call can be looked at.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from draftwood.draft.base import Drafter, NoDrafter, Outcome, drafter_names, load_drafter_class
from draftwood.draft.fused import FusedDrafter
from draftwood.draft.guard import GuardedDrafter
from draftwood.draft.hybrid import AutoDrafter, DraftSource
from draftwood.draft.model import ModelDrafter
from draftwood.draft.synthetic import OracleDrafter, RandomDrafter
from draftwood.draft.vocabulary import shared_vocabulary
from draftwood.engine.sequence import Sequence as EngineSequence
from draftwood.errors import ConfigError
from draftwood.kv import BlockPool, Lease
from draftwood.models.base import Model
from draftwood.sampling import SamplingParams, choose, walk
from draftwood.tree import TokenTree
from tests.tiny import (
    LetterTokenizer,
    TinyLLM,
    bushy_drafter,
    hf_model,
    near_oracle,
    oracle,
    random_prompts,
    tiny_llm,
)
from tests.vocabularies import letters_drafter

VOCAB = 12
TARGET = hf_model("llama", vocab_size=VOCAB, calm=True)
DRAFT = hf_model("llama", vocab_size=VOCAB, calm=True, seed=50)
PROMPTS = random_prompts((12, 1, 30, 5), vocab_size=VOCAB)
PARAMS = SamplingParams(max_tokens=40, temperature=0.7, seed=9, ignore_eos=True)


def answers() -> dict[tuple[int, ...], list[int]]:
    """The plain texts, for the drafters that know them."""
    llm = tiny_llm(TARGET, drafter="none", vocab_size=VOCAB)
    return {tuple(p): llm.run([p], PARAMS)[0] for p in PROMPTS}


def ticks() -> Callable[[], float]:
    """A clock for drafters that weigh time: every look at it is a millisecond later."""
    count = itertools.count()
    return lambda: next(count) / 1000


ANSWERS = answers()
KINDS: dict[str, Callable[[BlockPool], Drafter]] = {
    **{
        name: (lambda pool, name=name: load_drafter_class(name)())
        for name in drafter_names()
        if name != "model"
    },
    "model": lambda pool: ModelDrafter(DRAFT, pool, VOCAB),
    "self": lambda pool: ModelDrafter(TARGET, pool, VOCAB),
    "hybrid": lambda pool: AutoDrafter(DraftSource(DRAFT, pool, VOCAB), ticks()),
    "hybrid_self": lambda pool: AutoDrafter(DraftSource(TARGET, pool, VOCAB), ticks()),
    "text": lambda pool: letters_drafter("text", VOCAB),
    "tokens": lambda pool: letters_drafter("tokens", VOCAB),
    "fused": lambda pool: FusedDrafter(letters_drafter("text", VOCAB), ticks()),
    "fused_self": lambda pool: FusedDrafter(ModelDrafter(TARGET, pool, VOCAB), lambda: 0.0),
    "scripted": lambda pool: bushy_drafter(VOCAB),
    "near_oracle": lambda pool: near_oracle(ANSWERS, VOCAB),
    "oracle": lambda pool: oracle(ANSWERS),
    "random": lambda pool: RandomDrafter(VOCAB),
}
every_drafter = pytest.mark.parametrize("kind", list(KINDS))


def test_every_registered_drafter_is_under_contract() -> None:
    """A drafter that is added to the entry points is tested here without another word."""
    assert set(drafter_names()) <= set(KINDS)
    assert {"none", "suffix", "recycling", "model", "auto"} <= set(drafter_names())
    for name in drafter_names():
        assert load_drafter_class(name).name == name
    with pytest.raises(ConfigError, match=r"unknown drafter 'sufix'.*suffix"):
        load_drafter_class("sufix")


class Hand:
    """Drives one drafter over sequences, by the target's own choices."""

    def __init__(self, kind: str, *, block_size: int = 4, num_blocks: int = 200) -> None:
        self.pool = BlockPool(
            TARGET.spec.kv, DRAFT.spec.kv, num_blocks=num_blocks, block_size=block_size, debug=True
        )
        self.drafter = KINDS[kind](self.pool)

    def start(self, prompt: Sequence[int], name: str, params: Any = PARAMS) -> EngineSequence:
        """A sequence whose prompt is computed and whose first token is there."""
        llm = tiny_llm(TARGET, drafter="none", vocab_size=VOCAB)
        seq = llm.engine.add(prompt, params, name)
        seq.lease = Lease(self.pool)
        self.drafter.start(seq)
        self._compute(seq, TokenTree.root(prompt[-1]), before=len(prompt) - 1)
        return seq

    def propose(self, seqs: Sequence[EngineSequence], budgets: Sequence[int]) -> list[TokenTree]:
        """The drafter's trees; nothing but the draft's KV may have changed."""
        before = [(list(seq.tokens), seq.lease.length) for seq in seqs]
        random_state = torch.get_rng_state()
        trees = self.drafter.propose(seqs, budgets)
        assert [(list(seq.tokens), seq.lease.length) for seq in seqs] == before
        assert torch.equal(torch.get_rng_state(), random_state), "it uses the global generator"
        self.pool.check()
        return trees

    def verify(
        self, seqs: Sequence[EngineSequence], trees: Sequence[TokenTree], keep: int | None = None
    ) -> list[Outcome]:
        """A round after `propose`; at most `keep` tokens are kept of each verdict."""
        outcomes = [
            self._compute(seq, tree, observe=False, keep=keep)
            for seq, tree in zip(seqs, trees, strict=True)
        ]
        self.drafter.observe(seqs, outcomes)
        return outcomes

    def round(self, seqs: Sequence[EngineSequence], budget: int = 8) -> list[Outcome]:
        """Propose, verify, observe."""
        return self.verify(seqs, self.propose(seqs, [budget] * len(seqs)))

    def _compute(
        self,
        seq: EngineSequence,
        tree: TokenTree,
        *,
        before: int = 0,
        observe: bool = True,
        keep: int | None = None,
    ) -> Outcome:
        from draftwood.attention import Work, pack

        tokens = [*seq.tokens[:before], *tree.tokens]
        seq.lease.reserve(len(tokens))
        rows = range(before, len(tokens))
        work = Work(seq.lease, seq.lease.length, tokens, None if before else tree, rows)
        logits = TARGET.forward(pack([work], self.pool.device), self.pool.target)
        length = len(seq.tokens)
        verdict = walk(
            tree,
            lambda node, depth: choose(logits[node], seq.params, seq.seed, length + depth),
        )
        kept = len(verdict.tokens) if keep is None else min(keep, len(verdict.tokens))
        seq.tokens.extend(verdict.tokens[:kept])
        seq.lease.commit([*range(before), *(before + i for i in verdict.path[:kept])])
        outcome = Outcome(tree, verdict, verdict.tokens[:kept], logits)
        if observe:
            self.drafter.observe([seq], [outcome])
        return outcome


def check_tree(tree: TokenTree, seq: EngineSequence, budget: int) -> None:
    """Everything the engine builds on."""
    assert isinstance(tree, TokenTree)
    assert tree.tokens[0] == seq.tokens[-1], "not rooted at the last token"
    assert len(tree) - 1 <= budget, "over its budget"
    size = len(tree)
    assert size == len(tree.parents) == len(tree.scores) == len(tree.sources)
    assert tree.parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents[1:], start=1))
    assert all(type(token) is int and 0 <= token < VOCAB for token in tree.tokens)
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == size, "twins"
    assert tree.scores[0] == 1.0
    for node in range(1, size):
        assert 0 <= tree.scores[node] <= tree.scores[tree.parents[node]]
        assert tree.sources[node], "a node without a source cannot be calibrated"


@every_drafter
@pytest.mark.parametrize("budget", [0, 1, 2, 5, 33])
def test_trees_are_sound_and_within_the_budget(kind: str, budget: int) -> None:
    """For each sequence its own budget, in one batch, over many rounds."""
    hand = Hand(kind)
    seqs = [hand.start(p, f"r{i}") for i, p in enumerate(PROMPTS)]
    for round_ in range(5):
        budgets = [(budget + 3 * i * (round_ % 2)) for i in range(len(seqs))]
        trees = hand.propose(seqs, budgets)
        assert len(trees) == len(seqs)
        for tree, seq, own in zip(trees, seqs, budgets, strict=True):
            check_tree(tree, seq, own)
        hand.verify(seqs, trees)


@every_drafter
def test_it_never_changes_the_text(kind: str) -> None:
    """Driven by hand, each sequence becomes its plain text."""
    hand = Hand(kind)
    seqs = [hand.start(p, f"r{i}") for i, p in enumerate(PROMPTS)]
    while min(len(seq.tokens) - seq.num_prompt_tokens for seq in seqs) < 25:
        hand.round(seqs)
    for seq, prompt in zip(seqs, PROMPTS, strict=True):
        wanted = ANSWERS[tuple(prompt)]
        assert seq.output_ids[: len(wanted)] == wanted[: len(seq.output_ids)]


@every_drafter
def test_a_drafter_is_asked_for_some_and_observes_others(kind: str) -> None:
    """Batches change from round to round: sequences join, pause, are drafted for or only observed.

    A prompt's last chunk, or a round without a draft, is observed though nothing was proposed.
    """
    hand = Hand(kind)
    seqs = [hand.start(p, f"r{i}") for i, p in enumerate(PROMPTS[:2])]
    seqs.append(hand.start(PROMPTS[2], "late"))
    for asked in ([0], [1, 2], [2, 0], [], [0, 1, 2]):
        chosen = [seqs[i] for i in asked]
        trees = hand.propose(chosen, [4] * len(chosen))
        rest = [seq for seq in seqs if seq not in chosen]
        roots = [TokenTree.root(seq.tokens[-1]) for seq in rest]
        hand.verify([*rest, *chosen], [*roots, *trees])
    for seq, prompt in zip(seqs, PROMPTS, strict=False):
        assert seq.output_ids == ANSWERS[tuple(prompt)][: len(seq.output_ids)]


@every_drafter
def test_a_tree_that_was_cut_down_may_come_back(kind: str) -> None:
    """The engine verifies the part that pays: any best n, or only the root."""
    hand = Hand(kind)
    [seq] = [hand.start(PROMPTS[0], "r")]
    for size in (1, 2, 3, 5, 1, 9):
        [tree] = hand.propose([seq], [8])
        [outcome] = hand.verify([seq], [tree.best(size)])
        assert len(outcome.tree) <= size
        assert seq.output_ids == ANSWERS[tuple(PROMPTS[0])][: len(seq.output_ids)]


@every_drafter
@pytest.mark.parametrize("keep", [0, 1, 2])
def test_an_outcome_that_a_stop_rule_cut_short(kind: str, keep: int) -> None:
    """Fewer tokens are kept than the verdict has: none to learn from, or not all."""
    hand = Hand(kind)
    seq = hand.start(PROMPTS[0], "r")
    hand.round([seq])
    [tree] = hand.propose([seq], [8])
    if keep == 0:
        # A stop string may take back all that a round gave.
        outcome = hand._compute(seq, tree, observe=False)
        del seq.tokens[len(seq.tokens) - len(outcome.tokens) :]
        seq.lease.truncate(len(seq.tokens))
        cut = Outcome(outcome.tree, outcome.verdict, (), outcome.logits)
        hand.drafter.observe([seq], [cut])
    else:
        hand.verify([seq], [tree], keep=keep)
    hand.drafter.stop(seq)
    seq.lease.close()
    assert hand.pool.num_free == hand.pool.num_blocks


@every_drafter
def test_no_state_is_left_behind(kind: str) -> None:
    """Per-request state that outlives `stop` is a leak; what is kept must not grow with requests.

    Whatever way a sequence ends: before its first proposal, between propose and observe, or whole.
    """
    hand = Hand(kind)

    def rounds(name: str, count: int) -> None:
        seq = hand.start(PROMPTS[0], name)
        for _ in range(count):
            hand.round([seq])
        hand.propose([seq], [4])
        hand.drafter.stop(seq)
        seq.lease.close()

    for i in range(3):
        rounds(f"warm{i}", 6)
    before = per_request_state(hand.drafter)
    for i in range(10):
        rounds(f"r{i}", i % 4)
    assert per_request_state(hand.drafter) == before
    assert hand.pool.num_free == hand.pool.num_blocks
    hand.pool.check()


def per_request_state(drafter: Drafter) -> dict[str, int]:
    """Sizes of all dictionaries, sets and lists with request ids in them, at any depth."""
    sizes: dict[str, int] = {}
    stack: list[tuple[str, Any]] = [("", drafter)]
    seen: set[int] = set()
    while stack:
        path, thing = stack.pop()
        if id(thing) in seen or isinstance(thing, torch.Tensor | BlockPool | type):
            continue
        seen.add(id(thing))
        if isinstance(thing, dict | set | list):
            named = [key for key in thing if isinstance(key, str) and key[:1] in "rw"]
            ids = [key for key in named if key[1:].isdigit() or key[4:].isdigit()]
            sizes[path] = len(ids)
        elif type(thing).__module__.startswith("draftwood.draft"):
            names = getattr(thing, "__dict__", None) or getattr(thing, "__slots__", ())
            stack += [(f"{path}.{name}", getattr(thing, name)) for name in names]
    return sizes


@every_drafter
def test_a_request_id_may_come_back(kind: str) -> None:
    """State of an earlier request of the same id must not reach a later one."""
    hand = Hand(kind)
    for prompt in (PROMPTS[2], PROMPTS[0], PROMPTS[1], PROMPTS[2]):
        seq = hand.start(prompt, "same")
        for _ in range(4):
            for tree in hand.propose([seq], [6]):
                check_tree(tree, seq, 6)
                hand.verify([seq], [tree])
        assert seq.output_ids == ANSWERS[tuple(prompt)][: len(seq.output_ids)]
        hand.drafter.stop(seq)
        seq.lease.close()


@every_drafter
def test_the_same_calls_give_the_same_trees(kind: str) -> None:
    """No clock, no global generator, no order of a set: a run can be repeated to be understood."""
    runs: list[list[list[TokenTree]]] = []
    for _ in range(2):
        hand, trees = Hand(kind), []
        seqs = [hand.start(p, f"r{i}") for i, p in enumerate(PROMPTS)]
        for _ in range(4):
            trees.append(hand.propose(seqs, [6] * len(seqs)))
            hand.verify(seqs, trees[-1])
        runs.append(trees)
    assert runs[0] == runs[1]


@every_drafter
def test_budget_zero_everywhere_is_plain_decoding(kind: str) -> None:
    """The root alone, also when it is asked again and again."""
    hand = Hand(kind)
    seqs = [hand.start(p, f"r{i}") for i, p in enumerate(PROMPTS)]
    for _ in range(3):
        trees = hand.propose(seqs, [0] * len(seqs))
        assert [len(tree) for tree in trees] == [1] * len(seqs)
        hand.verify(seqs, trees)
    assert hand.drafter.propose([], []) == []


@every_drafter
def test_parameters_of_any_kind(kind: str) -> None:
    """Greedy, hot, narrow: a drafter reads the parameters and must not trip over them."""
    for params in (
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=30, temperature=5.0, seed=2**64 - 1),
        SamplingParams(max_tokens=30, temperature=1e-4, seed=0),
        SamplingParams(max_tokens=30, temperature=1.0, top_k=1, seed=1),
        SamplingParams(max_tokens=30, temperature=1.0, top_p=1e-9, min_p=1.0, seed=1),
    ):
        hand = Hand(kind)
        seq = hand.start(PROMPTS[1], "r", params)
        for _ in range(3):
            [tree] = hand.propose([seq], [6])
            check_tree(tree, seq, 6)
            hand.verify([seq], [tree])
            if "oracle" in kind:
                break  # they know the text of other parameters


@every_drafter
def test_a_crowded_pool_is_no_error(kind: str) -> None:
    """A draft needs room for its guesses; without it there is no draft, and nobody is robbed."""
    prompt = PROMPTS[2]
    needed = -(-(len(prompt) + 40) // 4)
    for spare in range(4):
        hand = Hand(kind, num_blocks=needed + spare)
        seq = hand.start(prompt, "r")
        for _ in range(5):
            [tree] = hand.propose([seq], [4])
            check_tree(tree, seq, 4)
            hand.verify([seq], [tree])
        assert seq.output_ids == ANSWERS[tuple(prompt)][: len(seq.output_ids)]


# --- what only some of them promise ----------------------------------------------------------


def test_no_drafter_says_nothing() -> None:
    """The tree of one node is plain decoding."""
    [seq] = [Hand("none").start(PROMPTS[0], "r")]
    assert NoDrafter().propose([seq], [8]) == [TokenTree.root(seq.tokens[-1])]


@pytest.mark.parametrize("kind", ["suffix", "lookup", "auto"])
def test_what_was_there_before_is_guessed(kind: str) -> None:
    """A text that repeats is drafted from its repetition, prompt and output alike."""
    hand = Hand(kind)
    phrase = [1, 2, 3, 4, 5, 6, 7]
    seq = hand.start([*phrase, 8, *phrase, 9, *phrase[:3]], "r")
    seq.tokens[-1] = 4  # whatever the target said, the text goes on as it did
    drafter = KINDS[kind](hand.pool)
    drafter.start(seq)
    [tree] = drafter.propose([seq], [3])
    assert tree.tokens[:4] == (4, 5, 6, 7)


@pytest.mark.parametrize("kind", ["recycling", "lookup", "auto"])
def test_tables_stay_warm_across_requests(kind: str) -> None:
    """The second time the same prompt comes, the target's own candidates are proposed."""
    hand = Hand(kind)
    accepted = []
    for i in range(2):
        seq = hand.start(PROMPTS[0], f"r{i}", PARAMS.but(temperature=0.0))
        outcomes = [hand.round([seq])[0] for _ in range(6)]
        accepted.append(sum(o.verdict.num_accepted for o in outcomes))
        hand.drafter.stop(seq)
        seq.lease.close()
    assert accepted[1] > accepted[0]
    assert accepted[1] >= 8


def test_the_oracle_is_always_right() -> None:
    """It measures overhead: a miss of its own would be counted as the engine's."""
    hand = Hand("oracle")
    seq = hand.start(PROMPTS[0], "r")
    while len(seq.output_ids) < 30:
        [outcome] = hand.round([seq])
        assert outcome.verdict.num_accepted == len(outcome.tree) - 1 == 8
    assert isinstance(hand.drafter, OracleDrafter)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_a_draft_model_equal_to_the_target_is_always_right(temperature: float) -> None:
    """By hand and in uneven batches: the first child at each level is the target's choice."""
    hand = Hand("self")
    params = PARAMS.but(temperature=temperature)
    seqs = [hand.start(p, f"r{i}", params) for i, p in enumerate(PROMPTS)]
    for _ in range(5):
        for outcome in hand.round(seqs, budget=6):
            assert outcome.verdict.path[-1] not in outcome.tree.parents, "a walk ended in the tree"
            assert outcome.verdict.num_accepted >= 1


def test_a_draft_model_runs_only_over_what_is_new() -> None:
    """After a round its KV is the accepted path's: the next catch-up is a few tokens, not all."""
    from tests.tiny import CountingModel

    counting = CountingModel(TARGET)
    hand = Hand("self")
    hand.drafter = ModelDrafter(counting, hand.pool, VOCAB)
    seq = hand.start(PROMPTS[2], "r")
    for round_ in range(6):
        counting.clear()
        hand.round([seq], budget=6)
        assert counting.rows[0] <= (len(seq.tokens) if round_ == 0 else 2)
        assert seq.lease.draft_length <= len(seq.tokens) - 1


def test_names_of_tokens_are_compared_and_not_sizes() -> None:
    """Equal sizes do not make equal tokens, and padding does not make unequal ones."""

    class Other(LetterTokenizer):
        @property
        def token_strings(self) -> list[str | None]:
            return ["a", "b", "ü", *super().token_strings[3:]]

    ours: Any = LetterTokenizer(12)
    longer: Any = LetterTokenizer(20)
    other: Any = Other(12)
    assert shared_vocabulary(ours, longer) == 12
    assert shared_vocabulary(longer, ours) == 12
    assert shared_vocabulary(ours, other) is None


def test_a_draft_model_with_a_padded_vocabulary_proposes_shared_ids_only() -> None:
    """Its logits are wider than the target's: what lies beyond means nothing."""
    wide: Model = hf_model("llama", vocab_size=20, calm=True)
    hand = Hand("self")
    pool = BlockPool(TARGET.spec.kv, wide.spec.kv, num_blocks=50, block_size=4, debug=True)
    hand.pool, hand.drafter = pool, ModelDrafter(wide, pool, VOCAB)
    seq = hand.start(PROMPTS[0], "r")
    for _ in range(5):
        [tree] = hand.propose([seq], [8])
        check_tree(tree, seq, 8)
        hand.verify([seq], [tree])


def test_the_guard_starts_and_stops_in_pairs() -> None:
    """Every `start` has one `stop`, also when sequences are preempted, aborted or refused rows."""
    calls: list[tuple[str, str]] = []

    class Logging(Drafter):
        name = "logging"

        def start(self, seq: Any) -> None:
            calls.append(("start", seq.request_id))

        def stop(self, seq: Any) -> None:
            calls.append(("stop", seq.request_id))

    llm: TinyLLM = tiny_llm(
        TARGET, drafter=Logging(), vocab_size=VOCAB, block_size=4, num_blocks=20
    )
    assert isinstance(llm.engine.drafter, GuardedDrafter)
    seqs = [llm.engine.add(p, PARAMS.but(max_tokens=20)) for p in [*PROMPTS, *PROMPTS]]
    for i in range(200):
        if i == 5:
            llm.engine.abort(seqs[2])
            llm.engine.abort(seqs[7])
        if all(seq.finished for seq in seqs):
            break
        llm.engine.step()
    for seq in seqs:
        mine = [name for name, request_id in calls if request_id == seq.request_id]
        assert mine == ["start", "stop"] * (len(mine) // 2)
    assert len(calls) > 2 * 7, "nobody was preempted: the pool is too large for this test"


def test_trees_are_values() -> None:
    """A proposal that shares state with the drafter would change under the engine's hands."""
    hand = Hand("auto")
    seq = hand.start(PROMPTS[2], "r")
    [tree] = hand.propose([seq], [8])
    kept = copy.deepcopy(tree)
    hand.verify([seq], [tree])
    hand.round([seq])
    assert tree == kept
