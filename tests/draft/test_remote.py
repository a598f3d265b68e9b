"""Drafting in another process: the same text whatever the desk does, and drafts when it can."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.draft.base import Drafter
from draftwood.draft.fused import FusedDrafter
from draftwood.draft.remote import Answer, Ask, Draft, DraftDesk, Link, Manner, RemoteDrafter, Wish
from draftwood.draft.remote.ahead import Ahead, graft, subtree, walk
from draftwood.draft.remote.link import Reply
from draftwood.kv import BlockPool
from draftwood.sampling import SamplingParams
from draftwood.tree import TokenTree
from tests.tiny import VOCAB, hf_model, random_prompts, tiny_llm

PROMPTS = random_prompts([9, 30, 17])
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = GREEDY.but(temperature=0.8, seed=3)


def desk(num_blocks: int = 200, seed: int = 2) -> DraftDesk:
    """A desk with the target's own weights, or with others."""
    model = hf_model("llama", seed=seed)
    pool = BlockPool(model.spec.kv, None, num_blocks=num_blocks, block_size=8, debug=True)
    return DraftDesk(model, pool, VOCAB)


class InlineLink(Link):
    """Answers while the target verifies: when a question is asked, before the reply is wanted.

    Args:
        call: the other side.
        lag: how many looks for a reply find nothing.
    """

    def __init__(self, call: Callable[[Ask], Answer], lag: int = 0) -> None:
        super().__init__(call)
        self.asks: list[Ask] = []
        self._lag = self._looks = lag

    def send(self, ask: Ask) -> bool:
        """Asks at once."""
        if self.busy:
            return False
        self.asks.append(ask)
        self._looks = self._lag
        self._reply = Reply(ask, self._asked(ask), 0.0)
        return True

    def take(self, patience_s: float = 0.0) -> Reply | None:
        """The reply, unless it is too early for it."""
        if self._looks > 0:
            self._looks -= 1
            return None
        return super().take()


def texts(drafter: Drafter | str, params: SamplingParams) -> list[list[int]]:
    """What the tiny model says, whoever drafts."""
    return tiny_llm("llama", drafter=drafter).run(PROMPTS, params)


@pytest.fixture(scope="module")
def plain() -> dict[SamplingParams, list[list[int]]]:
    """Texts of plain decoding."""
    return {params: texts("none", params) for params in (GREEDY, SAMPLED)}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", [2, 7], ids=["same weights", "other weights"])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_texts_are_those_of_plain_decoding(
    plain: dict[SamplingParams, list[list[int]]], params: SamplingParams, seed: int, lag: int
) -> None:
    drafter = RemoteDrafter(InlineLink(desk(seed=seed).answer, lag))
    assert texts(drafter, params) == plain[params]
    assert drafter.num_hits + drafter.num_waited > 0 or seed == 7


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_perfect_draft_is_there_before_it_is_wanted(params: SamplingParams) -> None:
    """Would fail if the desk drafted behind the present text instead of ahead of it."""
    drafter = RemoteDrafter(InlineLink(desk().answer))
    llm = tiny_llm("llama", drafter=drafter)
    [out] = llm.outputs(PROMPTS[:1], params)
    assert out.metrics.mean_acceptance_length > 2.5
    assert drafter.num_hits > 2 * (drafter.num_waited + drafter.num_missed)


def test_together_with_lookups(plain: dict[SamplingParams, list[list[int]]]) -> None:
    drafter = FusedDrafter(RemoteDrafter(InlineLink(desk().answer)), clock=lambda: 0.0)
    assert texts(drafter, SAMPLED) == plain[SAMPLED]


def test_a_question_says_only_what_is_new() -> None:
    link = InlineLink(desk().answer)
    tiny_llm("llama", drafter=RemoteDrafter(link)).run(PROMPTS, GREEDY)
    first, *others = (wish for ask in link.asks for wish in ask.wishes if wish.id == "request-2")
    assert first.start == 0
    assert first.tokens[: len(PROMPTS[1])] == tuple(PROMPTS[1])
    assert all(wish.start > 0 and len(wish.tokens) <= 20 for wish in others)
    assert max(len(pickle.dumps(ask)) for ask in link.asks) < 2000
    assert link.asks[-1].wishes  # it was asked to the end, with what had ended before
    assert {name for ask in link.asks for name in ask.ended} <= {f"request-{i}" for i in (1, 2, 3)}


@pytest.mark.parametrize("every", [2, 3, 7])
def test_a_desk_that_loses_its_memory(
    plain: dict[SamplingParams, list[list[int]]], every: int
) -> None:
    """A new actor in the place of a dead one knows nothing: it is told all again."""
    asked, current = 0, desk()

    def answer(ask: Ask) -> Answer:
        nonlocal asked, current
        asked += 1
        if asked % every == 0:
            current = desk()
        return current.answer(ask)

    drafter = RemoteDrafter(InlineLink(answer))
    assert texts(drafter, GREEDY) == plain[GREEDY]
    assert drafter.num_hits + drafter.num_waited > 0


def test_a_desk_without_room(plain: dict[SamplingParams, list[list[int]]]) -> None:
    """Blocks for one sequence and a little more: it drafts for whom it can."""
    assert texts(RemoteDrafter(InlineLink(desk(num_blocks=10).answer)), GREEDY) == plain[GREEDY]


def test_a_desk_that_always_fails(plain: dict[SamplingParams, list[list[int]]]) -> None:
    def answer(ask: Ask) -> Answer:
        raise ConnectionError("nobody is there")

    drafter = RemoteDrafter(Link(answer))
    assert texts(drafter, SAMPLED) == plain[SAMPLED]
    assert drafter.num_hits == drafter.num_waited == 0


class Gate:
    """A desk that answers only while its door is open."""

    def __init__(self) -> None:
        self.door = threading.Event()
        self.door.set()
        self._desk = desk()

    def answer(self, ask: Ask) -> Answer:
        """Waits for the door first."""
        assert self.door.wait(20)
        return self._desk.answer(ask)


def test_a_slow_desk_holds_a_round_up_for_the_deadline_at_most(
    plain: dict[SamplingParams, list[list[int]]],
) -> None:
    gate, deadline = Gate(), 0.05
    drafter = RemoteDrafter(Link(gate.answer), deadline_s=deadline)
    longest = 0.0

    def propose(seqs: Sequence[object], budgets: Sequence[int]) -> list[TokenTree]:
        nonlocal longest
        begin = monotonic()
        trees = RemoteDrafter.propose(drafter, seqs, budgets)  # type: ignore[arg-type]
        longest = max(longest, monotonic() - begin)
        return trees

    drafter.propose = propose  # type: ignore[method-assign,assignment]
    gate.door.clear()
    begin = monotonic()
    assert texts(drafter, GREEDY) == plain[GREEDY]
    assert monotonic() - begin < 15
    assert drafter.num_hits == drafter.num_waited == 0
    # It is waited for once; after that an overdue answer is not waited for again.
    assert longest < deadline + 0.5
    gate.door.set()
    assert drafter._link.take(10) is not None
    assert texts(drafter, GREEDY) == plain[GREEDY]
    assert drafter.num_hits + drafter.num_waited > 0  # it has rejoined
    drafter.close()


def test_a_desk_that_comes_back() -> None:
    """After failures it is left alone for a while, then asked again."""
    now, broken, asked = 0.0, True, 0
    good = desk()

    def answer(ask: Ask) -> Answer:
        nonlocal asked
        asked += 1
        if broken:
            raise ConnectionError("dead")
        return good.answer(ask)

    link = Link(answer, clock=lambda: now)
    ask = Ask((Wish("a", 0, (1, 2, 3), 3, 4, Manner.of(GREEDY, 0)),))
    assert link.send(ask)
    reply = link.take(10)
    assert reply is not None
    assert reply.answer is None
    assert not link.send(ask)  # too early
    broken, now = False, 1.0
    assert link.send(ask)
    reply = link.take(10)
    assert reply is not None
    assert reply.answer is not None
    assert reply.answer.drafts[0].num_known == 3
    assert (asked, link.num_failures) == (2, 1)
    link.close()
    assert not link.send(ask)


def wish(tokens: Sequence[int], start: int = 0, sure: int | None = None, name: str = "a") -> Wish:
    """A greedy wish."""
    num_sure = start + len(tokens) if sure is None else sure
    return Wish(name, start, tuple(tokens), num_sure, 8, Manner.of(GREEDY, 0))


def only(answer: Answer) -> Draft:
    """The answer to one wish."""
    [draft] = answer.drafts
    return draft


def test_a_draft_does_not_depend_on_how_the_desk_came_to_the_text() -> None:
    """Straight, after a wrong guess, or token by token: KV of a wrong path would show."""
    text = PROMPTS[1]
    straight = only(desk().answer(Ask((wish(text),))))
    wrong, one_by_one = desk(), desk()
    wrong.answer(Ask((wish([*text[:20], 5, 6, 7, 8], sure=20),)))
    after_wrong = only(wrong.answer(Ask((wish(text[20:], start=20),))))
    one_by_one.answer(Ask((wish(text[:12]),)))
    for i in range(12, len(text)):
        last = only(one_by_one.answer(Ask((wish(text[i : i + 1], start=i, sure=i + 1),))))
    assert len(straight.tokens) > 3
    assert after_wrong.tokens[:3] == straight.tokens[:3] == last.tokens[:3]
    assert straight.num_known == after_wrong.num_known == last.num_known == len(text)


def test_a_beginning_that_the_desk_has_not_is_asked_for() -> None:
    assert only(desk().answer(Ask((wish([1, 2], start=5),)))).num_known == 0


def test_what_has_ended_is_forgotten() -> None:
    one = desk()
    one.answer(Ask((wish([1, 2, 3]), wish([1, 2], name="b"))))
    assert one.num_texts == 2
    one.answer(Ask((), ended=("a", "b", "c")))
    assert one.num_texts == 0
    one._pool.check()
    assert one._pool.num_free == one._pool.num_blocks


def test_a_long_prompt_is_read_in_parts() -> None:
    """Others who ask at the same time are not kept waiting for all of it."""
    model = hf_model("llama")
    pool = BlockPool(model.spec.kv, None, num_blocks=60, block_size=8, debug=True)
    one = DraftDesk(model, pool, VOCAB)
    one._chunk = 64
    text = random_prompts([200])[0]
    answers = [only(one.answer(Ask((wish(text),))))]
    while not answers[-1].tokens:
        answers.append(only(one.answer(Ask((wish((), start=len(text)),)))))
        assert len(answers) < 10
    assert [a.num_known for a in answers] == [200] * 4
    assert answers[-1].tokens == only(desk().answer(Ask((wish(text),)))).tokens


@given(
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.integers(0, 3), max_size=4),
    st.lists(st.integers(0, 3), max_size=4),
)
def test_what_is_ahead_is_what_follows_the_text(
    text: list[int], guess: list[int], behind: list[int]
) -> None:
    """A draft behind a guess is used exactly where the text takes that guess."""
    text = [9, *text]
    ahead = Ahead(TokenTree.root(9), 1)
    ahead.settle(text)
    ahead.tree = TokenTree.chain([text[-1], *guess], decay=0.9)
    path = ahead.likely_path()
    assert path == guess
    ahead.note_sent([*text, *path], len(text))
    root = (text + path)[-1]
    tree = TokenTree.chain([root, *behind], decay=0.5)
    draft = Draft("a", len(text) + len(path), tree.tokens, tree.parents, tree.scores)
    for bonus in (guess + behind)[:3]:
        text.append(bonus)
        ahead.settle(text)
    ahead.take(draft, text)
    rest = (guess + behind)[3:]
    assert ahead.likely_path()[: len(rest)] == rest[: len(ahead.likely_path())]
    assert len(ahead.tree) == 1 + len(rest)
    assert all(0 <= score <= 1 for score in ahead.tree.scores)
    text.append(8)  # nobody guessed that
    ahead.settle(text)
    assert ahead.empty


def test_an_answer_for_another_text_is_not_used() -> None:
    ahead = Ahead(TokenTree.root(1), 1)
    ahead.note_sent([1, 2, 3], 1)
    ahead.settle([1, 5, 6])
    ahead.take(Draft("a", 3, (3, 4), (-1, 0), (1.0, 0.9)), [1, 5, 6])
    assert ahead.empty
    assert ahead.num_sent([1, 5, 6]) == 1
    ahead.take(Draft("a", 0), [1, 5, 6])
    assert ahead.sent == []


def test_cutting_and_grafting_trees() -> None:
    tree = TokenTree((1, 2, 3, 4), (-1, 0, 0, 2), (1.0, 0.5, 0.4, 0.2), ("", "x", "x", "x"))
    below = subtree(tree, 2)
    assert (below.tokens, below.parents, below.scores) == ((3, 4), (-1, 0), (1.0, 0.5))
    assert walk(tree, 0, [3, 4]) == 3
    assert walk(tree, 0, [2, 4]) is None
    grown = graft(tree, 1, TokenTree.chain([2, 7, 8], decay=0.5))
    assert grown.tokens[4:] == (7, 8)
    assert grown.scores[4:] == (0.25, 0.125)
    assert grown.parents[4:] == (1, 4)
