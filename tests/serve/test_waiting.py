"""The queue: priorities, clients in turn, order of arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftwood.sampling import SamplingParams
from draftwood.serve.generation import Generation
from draftwood.serve.waiting import WaitingQueue


def _one(name: str, client: str = "a", priority: int = 0) -> Generation:
    return Generation(name, [1], SamplingParams(), None, 0, priority, client)  # type: ignore[arg-type]


def test_clients_take_turns() -> None:
    queue = WaitingQueue()
    for name, client in [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c")]:
        queue.push(_one(name, client))
    assert [queue.pop().id for _ in range(5)] == ["a1", "b1", "c1", "a2", "a3"]


def test_a_place_is_for_who_has_fewest() -> None:
    queue = WaitingQueue()
    for name, client in [("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b"), ("c1", "c")]:
        queue.push(_one(name, client))
    assert queue.pop({"a": 3, "b": 1, "c": 2}).id == "b1"
    assert queue.pop({"a": 3, "b": 2, "c": 2}).id == "c1"
    assert queue.pop({"a": 3, "b": 2, "c": 3}).id == "b2"
    assert queue.pop({"a": 3, "b": 3, "c": 3}).id == "a1"


def test_a_lower_number_goes_first() -> None:
    queue = WaitingQueue()
    for name, priority in [("late", 5), ("first", -1), ("middle", 0), ("second", -1)]:
        queue.push(_one(name, priority=priority))
    assert [queue.pop().id for _ in range(4)] == ["first", "second", "middle", "late"]


_moves = st.lists(
    st.tuples(st.sampled_from(["push", "pop", "remove"]), st.sampled_from("ab"), st.integers(0, 2))
)


@given(_moves)
def test_nobody_is_lost_or_served_twice(moves: list[tuple[str, str, int]]) -> None:
    queue, inside = WaitingQueue(), []
    for number, (move, client, priority) in enumerate(moves):
        if move == "push":
            inside.append(_one(str(number), client, priority))
            queue.push(inside[-1])
        elif move == "pop" and inside:
            popped = queue.pop()
            inside.remove(popped)
            assert all(popped.priority <= one.priority for one in inside)
            same = [o for o in inside if (o.priority, o.client) == (popped.priority, popped.client)]
            assert all(int(popped.id) < int(one.id) for one in same)
        elif move == "remove" and inside:
            assert queue.remove(inside.pop(number % len(inside)))
        assert len(queue) == len(inside) == len(queue.all())
        assert bool(queue) == bool(inside)
    assert not queue.remove(_one("never"))
