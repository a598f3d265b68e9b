"""Suffix automaton against brute force; recycling; growth; calibration; tree sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.draft.grow import Calibrator, Guess, grow
from draftwood.draft.recycling_table import RecyclingTable
from draftwood.draft.suffix import SuffixAutomaton, SuffixGuesser
from draftwood.engine.controller import Controller
from draftwood.engine.costs import CostModel
from draftwood.sampling import Verdict
from draftwood.tree import TokenTree
from draftwood.tree.shape import CostTable, best_size

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def longest_repeated_suffix(text: list[int]) -> int:
    for length in range(len(text) - 1, 0, -1):
        tail = text[-length:]
        if any(text[i : i + length] == tail for i in range(len(text) - length)):
            return length
    return 0


def followers(text: list[int], pattern: list[int]) -> Counter[int]:
    size = len(pattern)
    return Counter(text[i + size] for i in range(len(text) - size) if text[i : i + size] == pattern)


@given(texts)
def test_match_is_the_longest_repeated_suffix(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert automaton.match()[1] == longest_repeated_suffix(text)


@given(texts)
def test_followers_are_counted_right(text: list[int]) -> None:
    """Also for states that were split off, and for the first repetition of a substring."""
    automaton = SuffixAutomaton()
    automaton.extend(text)
    state, length = automaton.match()
    while length:
        expected = followers(text, text[-length:])
        got = dict(automaton.followers(state))
        assert set(got) == set(expected)
        if len(text) <= 32:  # counting stops after so many links
            assert got == dict(expected)
        state, length = automaton.shorter(state)


@given(texts, st.lists(st.integers(0, 3), max_size=6))
def test_step_reads_on_or_falls_back(text: list[int], more: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    state, length = automaton.match()
    read = text[len(text) - length :]
    for token in more:
        state, length = automaton.step(state, length, token)
        read = [*read, token]
        best = max(
            size
            for size in range(len(read) + 1)
            if size == 0
            or any(
                text[i : i + size] == read[len(read) - size :] for i in range(len(text) - size + 1)
            )
        )
        assert length == best
        read = read[len(read) - length :]


def test_suffix_guesses_continue_the_repetition() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3, 4, 5, 1, 2, 3])
    guesser = SuffixGuesser(automaton)
    tree = grow(3, [(guesser, guesser.start())], Calibrator(), budget=4)
    assert tree.tokens[:3] == (3, 4, 5)
    assert tree.sources[1].startswith("suffix:3.sole")


def test_frequent_followers_come_first_then_recent_ones() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([9, 1, 9, 2, 9, 2, 9, 3, 9])
    state, _ = automaton.match()
    assert [token for token, _ in automaton.followers(state)] == [2, 3, 1]


def test_recycling_prefers_the_longer_context() -> None:
    table = RecyclingTable(k=2)
    table.learn((1, 5), [6, 7])
    table.learn((2, 5), [8, 9])
    assert [g.token for g in table.guesses((1, 5))] == [6, 7, 8, 9]
    assert [g.token for g in table.guesses((3, 5))] == [8, 9]
    assert list(table.guesses((3, 4))) == []


def test_recycling_stays_bounded() -> None:
    table = RecyclingTable(k=1, max_pairs=10)
    for i in range(100):
        table.learn((i, 0), [i])
    assert len(table) == 11


class Fixed:
    """Guesses the same two tokens everywhere."""

    def guesses(self, state: int) -> Iterable[Guess]:
        return [Guess(1, "good", 0.8), Guess(2, "bad", 0.1)]

    def advance(self, state: int, token: int) -> int:
        return state + 1


def test_growth_is_best_first() -> None:
    tree = grow(0, [(Fixed(), 0)], Calibrator(), budget=5)
    assert tree.tokens == (0, 1, 1, 1, 1, 1)
    assert tree.scores == pytest.approx((1, 0.8, 0.64, 0.512, 0.4096, 0.32768))
    assert len(grow(0, [(Fixed(), 0)], Calibrator(), budget=50, min_score=0.5)) == 4
    assert len(grow(0, [(Fixed(), 0)], Calibrator(), budget=0)) == 1


def test_siblings_never_promise_more_than_certainty() -> None:
    class Sure:
        def guesses(self, state: int) -> Iterable[Guess]:
            return [Guess(token, f"t{token}", 0.9) for token in range(3)]

        def advance(self, state: int, token: int) -> None:
            return None

    tree = grow(0, [(Sure(), 0)], Calibrator(), budget=9, min_score=0.0)
    assert sum(tree.scores[1:]) == pytest.approx(1.0)


def test_calibration_counts_only_where_the_parent_was_right() -> None:
    calibrator = Calibrator()
    tree = TokenTree((0, 1, 2, 3), (-1, 0, 0, 2), (1,) * 4, ("", "a", "b", "c"))
    for _ in range(200):
        calibrator.observe(tree, Verdict((0, 1), (1, 9), 3))
    assert calibrator.probability("a", 0.5) > 0.9
    assert calibrator.probability("b", 0.5) < 0.1
    assert calibrator.probability("c", 0.5) == 0.5


def test_cost_table_interpolates_and_extrapolates() -> None:
    cost = CostTable((1, 4, 8), (1.0, 2.5, 3.5))
    assert [cost(n) for n in (1, 2, 4, 6, 8, 12)] == pytest.approx([1, 1.5, 2.5, 3, 3.5, 4.5])


def test_tree_size_weighs_gain_against_cost() -> None:
    tree = TokenTree.chain(range(9), decay=0.5)
    assert best_size([tree], CostTable((1, 9), (1.0, 1.0)))[0] == 8
    assert best_size([tree], CostTable((1, 9), (1.0, 9.0))) == (0, 1.0)
    # 1 + .5 tokens at 1.2, 1.75 at 1.4, 1.875 at 1.6, ...: both are 1.25 a second, the most.
    size, gain = best_size([tree], CostTable((1, 11), (1.0, 3.0)))
    assert size in (1, 2)
    assert gain == pytest.approx(1.25)
    assert best_size([tree], CostTable((1, 11), (1.0, 3.0)), trust=0.1)[0] == 0


def test_a_long_prompt_in_the_same_forward_is_no_reason_to_draft() -> None:
    """Its rows make the round long; a token saved is one of another, shorter round."""
    tree = TokenTree.chain(range(9), decay=0.5)
    linear = CostTable((1, 1000), (1.0, 1000.0))
    assert best_size([tree], linear, other_rows=500) == (0, 1.0)
    # A guess at .5 saves half of a plain round: it may take as long, prompt or not.
    flat = CostTable((1, 1000), (1.0, 1.0 + 0.2 * 999))
    size, gain = best_size([tree], flat)
    assert best_size([tree], flat, other_rows=500) == (size, pytest.approx(gain))


def test_the_time_of_drafting_can_make_it_a_loss() -> None:
    """A draft model of 0.11 s beside a forward of 0.025 s kept drafting, at a third of the speed.

    Its seconds were counted for plain decoding too. They are spent by the time the size is chosen,
    so the tree is verified, but a round that had not drafted would have been faster.
    """
    tree = TokenTree.chain(range(9), decay=0.9)
    cost = CostTable((1, 9), (1.0, 1.0))
    tokens = sum(0.9**depth for depth in range(9))
    assert best_size([tree], cost, overhead_s=4.0) == (8, pytest.approx(tokens / 5))
    size, gain = best_size([tree], cost, overhead_s=9.0)
    assert (size, gain) == (8, pytest.approx(tokens / 10))
    assert gain < 1


def costs(*seconds: float) -> CostModel:
    table = CostTable(tuple(range(1, len(seconds) + 1)), seconds)
    return CostModel(table, table, 0)


def rounds(controller: Controller, tree: TokenTree, count: int, draft_s: float, right: bool) -> int:
    """Runs rounds with one tree that is always or never right; in how many it was asked for."""
    asked = 0
    for _ in range(count):
        if controller.budget():
            asked += 1
            [cut] = controller.choose([tree], 0)
            controller.observe([cut], len(cut) - 1 if right else 0, draft_s)
    return asked


def test_controller_rests_longer_and_longer_and_recovers() -> None:
    """A dear drafter that is never right must cost next to nothing, and get another chance."""
    controller = Controller(costs(1.0, 2.0), 8)
    bad = TokenTree.chain([0, 1, 2], decay=0.1)
    assert 3 <= rounds(controller, bad, 400, 0.5, right=False) <= 25
    assert rounds(controller, bad, 640, 0.5, right=False) <= 12
    good = TokenTree.chain([0, 1, 2], decay=1.0)
    controller = Controller(costs(1.0, 1.1), 8, trust=0.01)
    rounds(controller, good, 3000, 0.5, right=True)
    assert controller.trust > 0.5
    assert rounds(controller, good, 10, 0.5, right=True) == 10


def test_cheap_drafting_rests_for_a_few_rounds_only() -> None:
    """A lookup finds nothing for a hundred rounds, and then a passage is repeated word by word."""
    controller = Controller(costs(1.0, 1.1), 8)
    bad = TokenTree.chain([0, 1, 2], decay=0.01)
    assert 20 <= rounds(controller, bad, 100, 0.02, right=False) <= 60
    good = TokenTree.chain([0, 1, 2], decay=1.0)
    assert rounds(controller, good, 60, 0.02, right=True) >= 40


def test_a_draft_slower_than_its_target_is_soon_left_alone() -> None:
    controller = Controller(costs(0.025, 0.025, 0.025), 8)
    tree = TokenTree.chain([0, 1, 2], decay=0.9)
    assert rounds(controller, tree, 1000, 0.11, right=True) <= 40


def test_one_long_read_does_not_stop_drafting() -> None:
    """A draft model read the prompts of a batch in 0.35 s, and nothing was drafted from then on."""
    controller = Controller(costs(0.03, 0.03, 0.03), 8)
    tree = TokenTree.chain([0, 1, 2], decay=0.9)
    rounds(controller, tree, 1, 0.35, right=True)
    assert rounds(controller, tree, 60, 0.01, right=True) >= 55


def test_a_drafter_that_is_never_right_costs_few_rows() -> None:
    """Once that is known, trees are looked at and verified one time in eight, two nodes each."""
    controller = Controller(costs(0.029, 0.030, 0.0316), 8)
    tree = TokenTree.chain([0, 1, 2], decay=0.9)
    verified = []
    for _ in range(500):
        if controller.budget():
            [cut] = controller.choose([tree], 0)
            verified.append(len(cut) - 1)
            if len(cut) > 1:
                controller.observe([cut], 0, 0.0003)
    late = verified[-150:]
    assert 10 <= sum(late) <= 40
    assert max(late) == 2


def test_gumbel_top_tokens_are_what_a_draft_like_the_target_proposes() -> None:
    """With the target's own distribution the first draft token is always right."""
    from draftwood.draft.model import likely_tokens
    from draftwood.sampling import SamplingParams, choose

    torch.manual_seed(1)
    for seed in range(30):
        logits, params = torch.randn(40), SamplingParams(temperature=0.9, top_p=0.8)
        assert likely_tokens(logits, params, seed, 5)[0][0] == choose(logits, params, seed, 5)
