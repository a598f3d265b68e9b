"""Pool, lease and prefix index against plain Python lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftwood.errors import CapacityError
from draftwood.kv import BlockPool, KVSpec, Lease, PrefixIndex

SPEC = KVSpec(2, 1, 2, 3, torch.float32, torch.device("cpu"))


def make_pool(num_blocks: int = 8, block_size: int = 4, draft: bool = False) -> BlockPool:
    return BlockPool(
        SPEC, SPEC if draft else None, num_blocks=num_blocks, block_size=block_size, debug=True
    )


def write(lease: Lease, pool: BlockPool, start: int, marks: list[int], draft: bool = False) -> None:
    """Writes each mark as the KV of one position, in every layer."""
    plane = pool.draft if draft else pool.target
    assert plane is not None
    for layer in range(SPEC.num_layers):
        keys = torch.tensor(marks, dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
        values = torch.tensor(marks, dtype=torch.float32)[:, None, None].expand(-1, 1, 3)
        plane.write(layer, lease.slots(start, start + len(marks)), keys + layer, values - layer)


def read(lease: Lease, pool: BlockPool, length: int, draft: bool = False) -> list[float]:
    plane = pool.draft if draft else pool.target
    assert plane is not None
    keys, values = plane.read(1, lease.slots(0, length))
    assert torch.equal(keys[:, 0, 0] - 1, values[:, 0, 2] + 1)
    return (keys[:, 0, 0] - 1).tolist()


paths = st.integers(1, 6).flatmap(
    lambda n: st.sets(st.integers(1, 9), max_size=n).map(lambda s: [0, *sorted(s)])
)


class LeaseMachine(RuleBasedStateMachine):
    """Several leases on one small pool, each compared with a list of marks."""

    @initialize(block_size=st.sampled_from([1, 3, 4]))
    def setup(self, block_size: int) -> None:
        self.pool = make_pool(24 // block_size + 12, block_size, draft=True)
        self.prefix = PrefixIndex(self.pool)
        self.leases: list[Lease] = []
        self.models: list[list[int]] = []
        self.mark = 0

    def marks(self, n: int) -> list[int]:
        self.mark += n
        return list(range(self.mark - n + 1, self.mark + 1))

    @rule()
    def open(self) -> None:
        self.leases.append(Lease.open(self.pool, self.prefix))
        self.models.append([])

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), path=paths)
    def round(self, data: st.DataObject, path: list[int]) -> None:
        """One round: write a tree of nodes behind the committed length, keep a path."""
        i = data.draw(st.integers(0, len(self.leases) - 1))
        lease, model = self.leases[i], self.models[i]
        nodes = self.marks(path[-1] + 1)
        try:
            lease.reserve(len(nodes))
        except CapacityError:
            return
        write(lease, self.pool, lease.length, nodes)
        lease.commit(path)
        model.extend(nodes[node] for node in path)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), kept=paths, path=paths)
    def two_rounds(self, data: st.DataObject, kept: list[int], path: list[int]) -> None:
        """A set of nodes stays behind the committed ones; the next round goes on from there."""
        i = data.draw(st.integers(0, len(self.leases) - 1))
        lease, model = self.leases[i], self.models[i]
        nodes, tail = self.marks(kept[-1] + 1), data.draw(st.integers(0, len(kept)))
        try:
            lease.reserve(len(nodes) + 10)
        except CapacityError:
            return
        write(lease, self.pool, lease.length, nodes)
        lease.commit(kept, tail)
        left = [nodes[node] for node in kept]
        model.extend(left[: len(left) - tail])
        old, new = left[len(left) - tail :], self.marks(max(path[-1] + 1 - tail, 0))
        lease.reserve(len(old) + len(new))
        write(lease, self.pool, lease.length + len(old), new)
        lease.commit(path)
        model.extend([*old, *new][node] for node in path)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.leases) - 1))
        length = data.draw(st.integers(0, len(self.models[i])))
        self.leases[i].truncate(length)
        del self.models[i][length:]

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), publish=st.booleans())
    def close(self, data: st.DataObject, publish: bool) -> None:
        """The marks stand for tokens too: equal marks mean equal KV."""
        i = data.draw(st.integers(0, len(self.leases) - 1))
        lease, model = self.leases.pop(i), self.models.pop(i)
        if publish:
            lease.publish(model)
        lease.close()
        if publish and len(model) > 1:
            again = Lease.open(self.pool, self.prefix, model)
            assert again.length % self.pool.block_size == 0
            assert again.length < len(model)
            self.leases.append(again)
            self.models.append(model[: again.length])

    @invariant()
    def contents_match(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        for lease, model in zip(self.leases, self.models, strict=True):
            assert lease.length == len(model)
            assert read(lease, self.pool, len(model)) == model
            rest = self.pool.target.read(0, lease.slots(lease.length, lease.capacity))[0]
            shared = self.pool.references(lease.block_table[-1]) > 1 if lease.block_table else True
            assert shared or bool(rest.isnan().all()), "a slot behind the end holds something"

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for lease in self.leases:
                lease.close()
            self.prefix.clear()
            assert self.pool.num_free == self.pool.num_blocks


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(paths, st.integers(0, 9))
def test_draft_plane_commits_on_its_own(path: list[int], start: int) -> None:
    pool = make_pool(draft=True)
    lease = Lease.open(pool)
    lease.reserve(start + path[-1] + 1)
    lead, nodes = list(range(100, 100 + start)), list(range(path[-1] + 1))
    write(lease, pool, 0, lead + nodes, draft=True)
    lease.commit_draft(start, path)
    assert lease.draft_length == start + len(path)
    assert lease.length == 0
    assert read(lease, pool, lease.draft_length, draft=True) == lead + [float(n) for n in path]


def test_blocks_of_a_lone_lease_are_adjacent() -> None:
    """On a CPU a read is a view only when blocks lie side by side."""
    pool = make_pool(16)
    lease = Lease.open(pool)
    for _ in range(10):
        lease.reserve(4)
        write(lease, pool, lease.length, [1] * 4)
        lease.commit(range(4))
    assert isinstance(lease.slots(0, 40), slice)


def test_two_growing_leases_both_stay_adjacent() -> None:
    pool = make_pool(16)
    leases = [Lease.open(pool), Lease.open(pool)]
    for _ in range(7):
        for lease in leases:
            lease.reserve(4)
            write(lease, pool, lease.length, [1] * 4)
            lease.commit(range(4))
    assert all(isinstance(lease.slots(0, 28), slice) for lease in leases)


def test_scattered_blocks_read_and_commit_right() -> None:
    pool = make_pool(8, 2)
    hole = [pool.take() for _ in range(8)]
    pool.release([hole[1], hole[4], hole[6]])
    lease = Lease.open(pool)
    lease.reserve(6)
    assert not isinstance(lease.slots(0, 6), slice)
    write(lease, pool, 0, [10, 11, 12, 13, 14, 15])
    lease.commit([0, 2, 5])
    assert read(lease, pool, 3) == [10, 12, 15]


def test_a_full_pool_says_so() -> None:
    pool = make_pool(2)
    lease = Lease.open(pool)
    with pytest.raises(CapacityError, match="kv_memory"):
        lease.reserve(9)


def test_cached_prefixes_give_way() -> None:
    pool = make_pool(4)
    prefix = PrefixIndex(pool)
    first = Lease.open(pool, prefix)
    first.reserve(16)
    write(first, pool, 0, list(range(16)))
    first.commit(range(16))
    first.publish(list(range(16)))
    first.close()
    assert (pool.num_free, len(prefix)) == (0, 4)
    second = Lease.open(pool, prefix, [7, 7, 7])
    second.reserve(12)
    assert second.length == 0
    assert second.capacity == 12


def test_prefix_is_evicted_from_its_end() -> None:
    """Evicting the first block of a chain would strand all that follow it."""
    pool = make_pool(4)
    prefix = PrefixIndex(pool)
    lease = Lease.open(pool, prefix)
    lease.reserve(16)
    write(lease, pool, 0, list(range(16)))
    lease.commit(range(16))
    lease.publish(list(range(16)))
    lease.close()
    assert prefix.evict(2) == 2
    assert Lease.open(pool, prefix, list(range(16))).length == 8


def test_prefix_compares_tokens_not_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Same:
        def __init__(self, *args: object, **kwargs: object) -> None: ...

        def digest(self) -> bytes:
            return b"same"

    monkeypatch.setattr("draftwood.kv.chain.blake2b", Same)
    pool = make_pool(4)
    prefix = PrefixIndex(pool)
    lease = Lease.open(pool, prefix)
    lease.reserve(4)
    write(lease, pool, 0, [1, 2, 3, 4])
    lease.commit(range(4))
    lease.publish([1, 2, 3, 4])
    assert Lease.open(pool, prefix, [1, 2, 3, 4, 5]).length == 4
    assert Lease.open(pool, prefix, [1, 2, 9, 4, 5]).length == 0


def test_prefix_says_how_far_the_draft_knows_it() -> None:
    """A hit that restores only the target's KV would make acceptance collapse unseen."""
    pool = make_pool(8, draft=True)
    prefix = PrefixIndex(pool)
    lease = Lease.open(pool, prefix)
    lease.reserve(12)
    write(lease, pool, 0, list(range(12)))
    write(lease, pool, 0, list(range(8)), draft=True)
    lease.commit(range(12))
    lease.commit_draft(0, range(8))
    lease.publish(list(range(12)))
    again = Lease.open(pool, prefix, [*range(12), 99])
    assert (again.length, again.draft_length) == (12, 8)
    assert read(again, pool, 8, draft=True) == list(range(8))


def test_salt_separates_tenants() -> None:
    pool = make_pool()
    prefix = PrefixIndex(pool)
    lease = Lease.open(pool, prefix)
    lease.reserve(4)
    write(lease, pool, 0, [1, 2, 3, 4])
    lease.commit(range(4))
    lease.publish([1, 2, 3, 4], salt=b"a")
    assert Lease.open(pool, prefix, [1, 2, 3, 4, 5], salt=b"b").length == 0
    assert Lease.open(pool, prefix, [1, 2, 3, 4, 5], salt=b"a").length == 4


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    """Rewinding into a published block and going on must not change it for others."""
    pool = make_pool()
    prefix = PrefixIndex(pool)
    first = Lease.open(pool, prefix)
    first.reserve(4)
    write(first, pool, 0, [1, 2, 3, 4])
    first.commit(range(4))
    first.publish([1, 2, 3, 4])
    second = Lease.open(pool, prefix, [1, 2, 3, 4, 5])
    second.truncate(2)
    second.reserve(2)
    write(second, pool, 2, [8, 9])
    second.commit(range(2))
    assert read(second, pool, 4) == [1, 2, 8, 9]
    assert read(first, pool, 4) == [1, 2, 3, 4]
