"""The router's policy: where a prompt goes, what it costs, and what is forgotten."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import CapacityError, ConfigError
from draftwood.kv.prefix import PrefixIndex
from draftwood.serve.block_views import BlockViews
from draftwood.serve.router import Costs, LeastQueue, Report, RoundRobin, Route, Router
from tests.unit.test_kv import make_pool

SIZE = 4
COSTS = Costs(prefill_s=0.01, running_s=0.05, slots=4, turn_s=1.0)
LONG = list(range(100))


def make(*names: str, kind: type[Router] = Router, max_blocks: int = 1000) -> Router:
    router = kind(COSTS, block_size=SIZE, max_blocks=max_blocks)
    for name in names:
        router.add(name)
    return router


def choose(router: Router, tokens: list[int], salt: bytes = b"", **options: list[str]) -> Route:
    return router.choose(router.prompt(tokens, salt), **options)


def serve(router: Router, tokens: list[int], salt: bytes = b"") -> str:
    """Sends a prompt and ends it."""
    route = choose(router, tokens, salt)
    router.done(router.send(route))
    return route.replica


def test_the_longest_cached_prefix_wins() -> None:
    router = make("a", "b", "c")
    home = serve(router, LONG[:40])
    other = next(name for name in "abc" if name != home)
    router.report(other, Report(0, 0, router.prompt(LONG[:80]).keys))
    route = choose(router, LONG)
    assert (route.replica, route.cached_tokens) == (other, 80)
    assert route.seconds == pytest.approx(20 * COSTS.prefill_s)


def test_a_hot_prefix_spills_over_and_is_then_hot_in_both_places() -> None:
    router = make("a", "b", "c", "d")
    serve(router, LONG)
    routes = []
    for i in range(16):
        route = choose(router, [*LONG, i])
        router.send(route)
        routes.append(route)
    load = Counter(route.replica for route in routes)
    assert set(load) == set("abcd")
    assert max(load.values()) <= 5
    assert routes[0].cached_tokens == routes[-1].cached_tokens == 100


def test_waiting_work_outweighs_a_prefix_exactly_when_it_takes_longer() -> None:
    router = make("a", "b")
    home = serve(router, LONG)  # saves 100 tokens there
    for tokens, goes_home in ((94, True), (95, False)):  # and 0.05 s for the request itself
        router.report(home, Report(tokens=tokens, requests=1))
        assert (choose(router, [*LONG, 7]).replica == home) is goes_home


def test_the_last_token_is_never_cached() -> None:
    router = make("a")
    serve(router, LONG)
    assert choose(router, LONG).cached_tokens == 99


def test_tenants_do_not_share() -> None:
    router = make("a")
    serve(router, LONG, b"one")
    assert choose(router, LONG, b"one").cached_tokens == 99
    assert choose(router, LONG, b"two").cached_tokens == choose(router, LONG).cached_tokens == 0


def test_an_answer_is_cached_too() -> None:
    router = make("a", "b")
    route = choose(router, LONG[:40])
    ticket = router.send(route)
    router.done(ticket, router.prompt(LONG[:80]).keys)
    assert choose(router, LONG) == Route(route.replica, router.prompt(LONG), 80, 0.2)


def test_keys_are_those_of_the_replicas_index() -> None:
    index = PrefixIndex(make_pool(), b"a model")
    size = make_pool().block_size
    router = Router(block_size=size, identity=b"a model")
    keys = tuple(key for key, _ in index.keys(LONG, b"tenant"))
    assert keys
    assert router.prompt(LONG, b"tenant").keys == keys


def test_what_a_replica_evicted_is_not_counted_on() -> None:
    router = make("a")
    serve(router, LONG)
    keys = router.prompt(LONG).keys
    router.report("a", Report(0, 0, evicted=keys[20:]))
    assert choose(router, LONG).cached_tokens == 80
    router.report("a", Report(0, 0, published=keys[:2], whole=True))
    assert choose(router, LONG).cached_tokens == 8
    router.report("nobody", Report(9, 9))


def test_the_view_is_bounded_and_forgets_the_oldest_end_first() -> None:
    router = make("a", max_blocks=10)
    serve(router, LONG[:32])
    serve(router, [500 + token for token in LONG[:16]])
    assert choose(router, LONG).cached_tokens == 24
    serve(router, LONG)
    assert choose(router, LONG).cached_tokens == 40


def test_a_dead_replica_is_forgotten_and_comes_back_with_nothing() -> None:
    router = make("a", "b")
    home = serve(router, LONG)
    ticket = router.send(choose(router, LONG))
    late = choose(router, LONG)
    router.remove(home)
    router.remove(home)
    with pytest.raises(CapacityError, match="has gone"):
        router.send(late)
    route = choose(router, LONG)
    assert (route.replica != home, route.cached_tokens) == (True, 0)
    router.add(home)
    assert router.requests(home) == 0
    router.done(ticket, router.prompt(LONG).keys)  # the dead one's: it changes nothing
    assert choose(router, LONG, avoid=[route.replica]) == Route(
        home, router.prompt(LONG), 0, pytest.approx(1.0)
    )


def test_a_draining_replica_ends_what_it_has_and_gets_nothing_more() -> None:
    router = make("a", "b")
    home = serve(router, LONG)
    ticket = router.send(choose(router, LONG))
    router.drain(home)
    assert choose(router, LONG).replica != home
    assert home not in router.replicas
    router.done(ticket)
    assert router.requests(home) == 0
    assert choose(router, LONG).replica != home
    router.add(home)
    assert choose(router, LONG).replica == home
    router.drain("nobody")


def test_no_replica_is_an_error_and_avoiding_is_a_wish() -> None:
    router = make()
    with pytest.raises(CapacityError, match="no replica is ready"):
        choose(router, LONG)
    router.add("a")
    assert choose(router, LONG, avoid=["a", "nobody"]).replica == "a"
    router.drain("a")
    with pytest.raises(CapacityError, match="no replica is ready"):
        choose(router, LONG)


def test_full_slots_cost_a_turn() -> None:
    assert [COSTS.wait(0, n) for n in (0, 3, 4, 5)] == pytest.approx([0, 0.15, 1.2, 2.2])


def test_tickets_count_once() -> None:
    router = make("a")
    ticket = router.send(choose(router, LONG))
    assert choose(router, LONG[50:]).seconds == pytest.approx(1.0 + 0.05 + 0.5)
    router.prefilled(ticket)
    router.prefilled(ticket)
    assert choose(router, LONG[50:]).seconds == pytest.approx(0.05 + 0.5)
    router.done(ticket)
    router.done(ticket)
    assert (router.requests("a"), choose(router, LONG[50:]).seconds) == (0, pytest.approx(0.5))


def test_reports_add_what_other_routers_sent_and_nothing_twice() -> None:
    router = make("a")
    ticket = router.send(choose(router, LONG))
    router.report("a", Report(tokens=150, requests=3))
    assert router.requests("a") == 3
    assert choose(router, [1]).seconds == pytest.approx(1.5 + 0.15 + 0.01)
    router.done(ticket)
    assert router.requests("a") == 2
    assert choose(router, [1]).seconds == pytest.approx(0.5 + 0.1 + 0.01)


def test_equals_are_spread_over_prefixes_and_the_same_for_every_router() -> None:
    names = [f"replica-{i}" for i in range(20)]
    first, second = make(*names), make(*reversed(names))
    prompts = [[i] * 8 for i in range(400)]
    chosen = [choose(first, prompt).replica for prompt in prompts]
    assert chosen == [choose(second, prompt).replica for prompt in prompts]
    assert max(Counter(chosen).values()) < 45
    assert len(set(chosen)) == 20


def test_when_one_leaves_only_its_prefixes_move() -> None:
    names = [f"replica-{i}" for i in range(20)]
    router = make(*names)
    prompts = [[i] * 8 for i in range(200)]
    before = [choose(router, prompt).replica for prompt in prompts]
    router.remove("replica-7")
    after = [choose(router, prompt).replica for prompt in prompts]
    moved = {a for a, b in zip(before, after, strict=True) if a != b}
    assert moved == {"replica-7"}


def test_the_policies_to_compare_with() -> None:
    turns = make("a", "b", "c", kind=RoundRobin)
    assert [serve(turns, LONG) for _ in range(4)] == ["a", "b", "c", "a"]
    turns.drain("b")
    assert [serve(turns, LONG) for _ in range(3)] == ["c", "a", "c"]
    turns.add("b")
    assert choose(turns, LONG, avoid=["a"]).replica == "b"

    queue = make("a", "b", kind=LeastQueue)
    home = serve(queue, LONG)
    queue.send(Route(home, queue.prompt([1]), 0, 0))
    assert choose(queue, LONG).replica != home
    queue.report("a", Report(0, 3))
    queue.report("b", Report(0, 2))
    assert choose(queue, LONG).replica == "b"
    queue.drain("b")
    assert choose(queue, LONG).replica == "a"


@pytest.mark.parametrize(
    "wrong", [{"prefill_s": -1.0}, {"running_s": -0.1}, {"slots": 0}, {"turn_s": -1.0}]
)
def test_costs_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Costs(**wrong)  # type: ignore[arg-type]


def test_sizes_out_of_range() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Router(block_size=0)
    with pytest.raises(ConfigError, match="at least 1"):
        Router(max_blocks=0)


class Believed:
    """The views, the slow and obvious way."""

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.slots: list[list[bytes]] = [[] for _ in range(num_slots)]
        self.max_blocks = max_blocks

    def touch(self, slot: int, keys: list[bytes]) -> None:
        old = [key for key in self.slots[slot] if key not in keys]
        self.slots[slot] = (old + keys[::-1])[-self.max_blocks :]

    def drop(self, slot: int, keys: list[bytes]) -> None:
        self.slots[slot] = [key for key in self.slots[slot] if key not in keys]

    def matched(self, keys: list[bytes]) -> list[int]:
        return [
            next((i for i, key in enumerate(keys) if key not in slot), len(keys))
            for slot in self.slots
        ]


CHAINS = st.builds(
    lambda family, length: [bytes([family, i]) for i in range(length)],
    st.integers(0, 3),
    st.integers(0, 6),
)
ACTIONS = st.tuples(st.sampled_from(["touch", "drop", "clear"]), st.integers(0, 10), CHAINS)


@given(st.lists(ACTIONS, max_size=40), CHAINS, st.integers(1, 9))
def test_views_are_those_of_lists(
    actions: list[tuple[str, int, list[bytes]]], asked: list[bytes], max_blocks: int
) -> None:
    views, believed = BlockViews(max_blocks), Believed(11, max_blocks)
    for _ in range(11):
        views.grow()
    for what, slot, keys in actions:
        if what == "touch":
            views.touch(slot, keys)
            believed.touch(slot, keys)
        elif what == "drop":
            views.drop(slot, keys[1:])
            believed.drop(slot, keys[1:])
        else:
            views.clear(slot)
            believed.drop(slot, list(believed.slots[slot]))
        assert views.matched(asked).tolist() == believed.matched(asked)
    assert len(views) == len({key for slot in believed.slots for key in slot})
    assert [views.num_blocks(i) for i in range(11)] == [len(slot) for slot in believed.slots]


LIVES = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "prefilled", "done", "drain", "remove", "add"]),
        st.integers(0, 30),
    ),
    max_size=60,
)


@given(LIVES)
def test_whatever_happens_the_cheapest_open_replica_is_chosen_and_counts_end_at_zero(
    lives: list[tuple[str, int]],
) -> None:
    router = make("r0", "r1", "r2", max_blocks=12)
    opened, tickets = {"r0", "r1", "r2"}, []
    for what, number in lives:
        name = f"r{number % 4}"
        if what == "send":
            if not opened:
                with pytest.raises(CapacityError):
                    choose(router, LONG[:number])
                continue
            route = choose(router, LONG[:number])
            others = [choose(router, LONG[:number], avoid=opened - {name}) for name in opened]  # type: ignore[arg-type]
            assert route.replica in opened
            assert route.seconds == min(other.seconds for other in others)
            tickets.append(router.send(route))
        elif what == "prefilled" and tickets:
            router.prefilled(tickets[number % len(tickets)])
        elif what == "done" and tickets:
            router.done(tickets.pop(number % len(tickets)))
        elif what in ("drain", "remove"):
            (router.drain if what == "drain" else router.remove)(name)
            opened.discard(name)
        elif what == "add":
            router.add(name)
            opened.add(name)
        assert set(router.replicas) == opened
    for ticket in tickets:
        router.done(ticket)
    for name in opened:
        only = choose(router, [1], avoid=opened - {name})  # type: ignore[arg-type]
        assert (router.requests(name), only.seconds) == (0, COSTS.prefill_s)
