"""What every store must do, run against each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import pytest
import torch

from draftwood.kv.tiers import BlockStore, DiskStore, Labels, MemoryStore, RedisStore
from draftwood.kv.tiers.record import Block, PlaneKV, encode

Make = Callable[..., BlockStore]
LABELS = Labels("a-model", "a-draft")


def key_of(number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=16).digest()


@lru_cache(maxsize=256)  # the order of a header's entries is not always the same
def record_of(number: int, *, draft: bool = False, width: int = 4) -> bytes:
    kv = torch.full((2, 4, 1, width), float(number))
    part = PlaneKV(kv, -kv)
    other = PlaneKV(kv + 0.5, kv + 0.25) if draft else None
    block = Block((number,) * 4, part, other)
    return encode(key_of(number), block, LABELS)


def records_of(*numbers: int) -> list[tuple[bytes, bytes]]:
    return [(key_of(n), record_of(n)) for n in numbers]


def keys_of(*numbers: int) -> list[bytes]:
    return [key_of(n) for n in numbers]


@pytest.fixture(params=["memory", "disk", "redis"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes stores of one kind; those without options share what they hold."""
    made: list[BlockStore] = []

    def make(**options: float) -> BlockStore:
        store: BlockStore
        if request.param == "memory":
            store = made[0] if made and not options else MemoryStore(**options)  # type: ignore[arg-type]
        elif request.param == "disk":
            store = DiskStore(tmp_path / "kv", **options)  # type: ignore[arg-type]
        else:
            server = request.getfixturevalue("redis_server")
            store = RedisStore(server.url, timeout_s=5.0, **options)  # type: ignore[arg-type]
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


def test_what_is_put_is_got(make: Make) -> None:
    store = make()
    store.put_many(records_of(1, 2))
    assert store.get_many(keys_of(2, 3, 1)) == [record_of(2), None, record_of(1)]
    assert store.get_many([]) == []
    assert store.get_many(keys_of(9)) == [None]


def test_it_outlives_the_client(make: Make) -> None:
    first = make()
    first.put_many(records_of(1))
    first.close()
    assert make().get_many(keys_of(1)) == [record_of(1)]


def test_a_run_ends_at_the_first_that_lacks(make: Make) -> None:
    store = make()
    store.put_many(records_of(1, 2, 4))
    assert store.run(keys_of(1, 2, 3, 4)) == 2
    assert store.run(keys_of(1, 2)) == 2
    assert store.run(keys_of(3)) == 0
    assert store.run([]) == 0


def test_replace_is_a_choice(make: Make) -> None:
    """A record without the draft's part must not take the place of one that has it."""
    store = make()
    richer = (key_of(1), record_of(1, draft=True))
    store.put_many(records_of(1))
    store.put_many([richer])
    assert store.get_many(keys_of(1)) == [richer[1]]
    store.put_many(records_of(1), replace=False)
    assert store.get_many(keys_of(1)) == [richer[1]]


def test_delete_and_clear(make: Make) -> None:
    store = make()
    store.put_many(records_of(*range(6)))
    store.delete(keys_of(0, 1, 99))
    store.delete([])
    assert store.run(keys_of(2, 3, 4, 5)) == 4
    assert store.clear() == 4
    assert store.get_many(keys_of(*range(6))) == [None] * 6
    assert store.clear() == 0


def test_stats_and_list(make: Make) -> None:
    store = make()
    assert (store.stats().num_blocks, list(store.ls())) == (0, [])
    store.put_many([*records_of(1), (key_of(2), record_of(2, draft=True))])
    stats = store.stats()
    assert stats.name == store.name
    assert stats.num_blocks == 2
    assert stats.num_bytes == len(record_of(1)) + len(record_of(2, draft=True))
    listed = {block.key: block for block in store.ls()}
    assert set(listed) == set(keys_of(1, 2))
    assert [listed[key].has_draft for key in keys_of(1, 2)] == [False, True]
    assert listed[key_of(2)].labels == LABELS
    assert listed[key_of(1)].num_bytes == len(record_of(1))
    assert (listed[key_of(1)].idle_s or 0) < 60


def test_verify_deletes_what_is_damaged(make: Make) -> None:
    """Flipped bits, cut ends, other formats, and a sound record under another's key."""
    store = make()
    store.put_many(records_of(*range(20)))
    flipped = bytearray(record_of(3))
    flipped[-1] ^= 1
    bad = {3: bytes(flipped), 4: record_of(4)[:-7], 5: b"garbage", 6: record_of(7), 8: b"\0" * 500}
    store.put_many([(key_of(n), record) for n, record in bad.items()])
    report = store.verify()
    assert (report.num_good, report.num_bad) == (15, 5)
    assert store.get_many(keys_of(*bad)) == [None] * 5
    assert store.verify().num_bad == 0


def test_unused_blocks_go_after_their_time(make: Make) -> None:
    store = make(ttl_s=0.6)
    store.put_many(records_of(1, 2))
    end = time.monotonic() + 0.9
    while time.monotonic() < end:
        store.touch(keys_of(1))
        time.sleep(0.05)
    assert store.get_many(keys_of(1, 2)) == [record_of(1), None]
    assert store.run(keys_of(1, 2)) == 1
    assert store.stats().num_blocks == 1


def test_many_threads(make: Make) -> None:
    """Each reads whole records or none, whoever writes the same key meanwhile."""
    store = make()
    good = {key_of(n): {record_of(n, draft=d) for d in (False, True)} for n in range(8)}

    def work(seed: int) -> None:
        for turn in range(12):
            number = (seed + turn) % 8
            draft = bool(turn % 2)
            store.put_many([(key_of(number), record_of(number, draft=draft))], replace=draft)
            for key, record in zip(good, store.get_many(list(good)), strict=True):
                assert record is None or record in good[key]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert store.verify().num_bad == 0


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_the_budget_holds_and_roots_stay(kind: str, tmp_path: Path) -> None:
    """Least recently used go first; of a chain that was touched, its end."""
    budget = 12 * len(record_of(10))
    store: BlockStore = (
        MemoryStore(max_bytes=budget) if kind == "memory" else DiskStore(tmp_path, max_bytes=budget)
    )
    for number in range(10, 20):
        store.put_many(records_of(number))
    store.touch(keys_of(*range(10, 20)))
    for number in range(30, 36):
        store.put_many(records_of(number))
        assert store.stats().num_bytes <= budget
    assert store.run(keys_of(*range(30, 36))) == 6
    left = store.run(keys_of(*range(10, 20)))
    assert 2 <= left <= 6
    assert store.get_many(keys_of(*range(10 + left, 20))) == [None] * (10 - left)
