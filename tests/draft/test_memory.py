"""What drafters remember: found again, within its budget, and only by whose it is."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Sequence

import pytest

from draftwood.draft.base import Drafter
from draftwood.draft.combine import LookupDrafter
from draftwood.draft.memory import DraftMemory, TenantMemory
from draftwood.draft.past import PastAnswers
from draftwood.draft.recycling import RecyclingDrafter
from draftwood.draft.recycling_table import RecyclingTable
from draftwood.sampling import SamplingParams
from draftwood.tree import TokenTree
from tests.tiny import TinyLLM, hf_model, random_prompts, tiny_llm

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
ANSWER = [5, 6, 7, 8, 9, 10, 11, 12]


def guessed(past: PastAnswers, tokens: Sequence[int], count: int) -> list[int]:
    """The first guess, again and again."""
    guesser, place = past.guesser(tokens)
    found: list[int] = []
    while place is not None and len(found) < count:
        guess = next(iter(guesser.guesses(place)), None)
        if guess is None:
            break
        found.append(guess.token)
        place = guesser.advance(place, guess.token)
    return found


def test_a_past_answer_is_found_by_its_beginning() -> None:
    past = PastAnswers(1 << 20)
    past.learn([1, 2, 3, *ANSWER], 3)
    assert guessed(past, [30, 31, 5, 6, 7], 3) == [8, 9, 10]
    assert guessed(past, [30, 31, 5, 6], 3) == [], "two tokens are too few"


def test_the_prompts_end_leads_to_the_answer() -> None:
    past = PastAnswers(1 << 20)
    past.learn([1, 2, 3, *ANSWER], 3)
    assert guessed(past, [9, 1, 2, 3], 2) == [5, 6]


def test_an_answer_ends_and_the_next_is_another() -> None:
    past = PastAnswers(1 << 20)
    past.learn([1, 2, 3, *ANSWER], 3)
    past.learn([20, 21, 22, 23, 24], 0)
    assert guessed(past, [10, 11, 12], 5) == []
    assert guessed(past, [12, 20, 21], 5) == []


def test_what_is_old_is_forgotten_and_the_budget_holds() -> None:
    past = PastAnswers(200_000)
    rng = random.Random(0)
    answers = [[rng.randrange(1000) for _ in range(20)] for _ in range(100)]
    for answer in answers:
        past.learn(answer, 0)
        assert past.num_bytes <= 200_000
    assert guessed(past, answers[-1][:5], 3) == answers[-1][5:8]
    assert guessed(past, answers[0][:5], 3) == []


def test_an_answer_longer_than_the_budget_keeps_its_end() -> None:
    past = PastAnswers(100_000)
    answer = [random.Random(1).randrange(1000) for _ in range(5000)]
    past.learn(answer, 0)
    assert past.num_bytes <= 100_000
    assert guessed(past, answer[-10:-5], 3) == answer[-5:-2]


@pytest.mark.parametrize("make", [RecyclingTable, lambda: PastAnswers(1 << 40)])
def test_the_bytes_counted_are_about_those_taken(make: Callable[[], object]) -> None:
    rng = random.Random(0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        store = make()
        for _ in range(300):
            tokens = [rng.randrange(1000, 50_000) for _ in range(30)]
            if isinstance(store, PastAnswers):
                store.learn(tokens, 0)
            elif isinstance(store, RecyclingTable):
                store.learn((tokens[0], tokens[1]), [token + 1 for token in tokens[2:10]])
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert isinstance(store, PastAnswers | RecyclingTable)
    assert taken / 1.5 <= store.num_bytes <= 1.5 * taken


def fill(memory: TenantMemory, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        memory.table.learn((rng.randrange(10**6), rng.randrange(10**6)), [1] * 8)


def test_the_tenant_that_was_used_longest_ago_goes_first() -> None:
    memory = DraftMemory(3_000_000)
    for name in ("a", "b", "c"):
        fill(memory.of(name), 1500, seed=ord(name))
        memory.trim()
    assert len(memory) == 3
    memory.of("a")
    fill(memory.of("d"), 1500, seed=4)
    memory.trim()
    assert memory.num_bytes <= 3_000_000
    assert len(memory.of("a").table) > 0
    assert len(memory.of("b").table) == 0, "it was the one"


def test_one_tenant_cannot_take_more_than_its_share() -> None:
    memory = DraftMemory(1_000_000)
    fill(memory.of("a"), 10_000, seed=1)
    assert memory.num_bytes <= 500_000


def test_a_state_is_restored_tenant_by_tenant() -> None:
    memory = DraftMemory()
    memory.of("a").past.learn([1, 2, 3, *ANSWER], 3)
    memory.of("b").table.learn((1, 2), [3, 4, 5, 6, 7, 8, 9, 10])
    other = DraftMemory()
    other.restore(memory.state())
    assert guessed(other.of("a").past, ANSWER[:3], 2) == ANSWER[3:5]
    assert [g.token for g in other.of("b").table.guesses((1, 2))] == [3, 4, 5, 6, 7, 8, 9, 10]
    assert len(other.of("a").table) == 0
    assert guessed(other.of("b").past, ANSWER[:3], 2) == []


@pytest.mark.parametrize("state", [b"{}", b"[1]", b"nothing", b'[{"tenant": "a"}]'])
def test_another_state_is_refused(state: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        DraftMemory().restore(state)


class Watched(LookupDrafter):
    """Keeps what it proposed."""

    def __init__(self) -> None:
        super().__init__()
        self.trees: list[TokenTree] = []

    def propose(self, seqs, budgets):  # type: ignore[no-untyped-def]
        trees = super().propose(seqs, budgets)
        self.trees.extend(trees)
        return trees


def shapes(drafter: Watched) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(tree.tokens), tuple(tree.parents)) for tree in drafter.trees]


def test_one_tenants_answers_do_not_shape_what_is_drafted_for_another() -> None:
    """The trees are those of an engine that has never met the first one."""
    [prompt] = random_prompts([30])

    def trees(*salts: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        drafter = Watched()
        llm = tiny_llm("llama", drafter=drafter, block_size=4, adaptive=False)
        for salt in salts:
            drafter.trees.clear()
            # What kinds of guesses come true is a statistic, and no tenant's: begin it anew.
            drafter.calibrator.__init__()  # type: ignore[misc]
            llm.run([prompt], PARAMS.but(cache_salt=salt))
        return shapes(drafter)

    assert trees("a", "b") == trees("b")
    assert trees("b", "b") != trees("b"), "the same tenant's does"


def near_budget(llm: TinyLLM) -> DraftMemory:
    inner = llm.engine.drafter.inner
    assert isinstance(inner, LookupDrafter | RecyclingDrafter)
    return inner.memory


def test_past_answers_can_be_left_out() -> None:
    [prompt] = random_prompts([30])
    for kept in (True, False):
        llm = tiny_llm("llama", drafter="lookup", block_size=4, past_answers=kept)
        llm.run([prompt], PARAMS)
        [text] = llm.run([prompt], PARAMS)
        found = guessed(near_budget(llm).of(None).past, text[:4], 2)
        assert found == (text[4:6] if kept else [])


@pytest.mark.parametrize("drafter", ["lookup", "recycling", "auto"])
def test_the_engine_sets_the_budget_and_texts_are_plain(drafter: str) -> None:
    classes: dict[str, Callable[[], Drafter]] = {
        "lookup": LookupDrafter,
        "recycling": RecyclingDrafter,
    }
    made = classes[drafter]() if drafter in classes else drafter
    llm = tiny_llm("llama", drafter=made, block_size=4, kv_memory=1 << 20)
    prompts = random_prompts((20, 24, 20))
    params = [PARAMS.but(cache_salt=salt) for salt in ("a", "b", "a")]
    plain = tiny_llm(hf_model("llama"), drafter="none").run(prompts, PARAMS)
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        assert [list(output.token_ids) for output in outputs] == plain
    assert near_budget(llm)._max_bytes == llm.config.draft_memory == (1 << 20) // 16
    assert near_budget(llm).num_bytes <= llm.config.draft_memory
