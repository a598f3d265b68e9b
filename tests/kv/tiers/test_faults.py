"""Stores that are absent, slow, full, lying or damaged: the text is right and comes in time."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import ResponseError

from draftwood.kv.tiers import DiskStore, KVTiers, MemoryStore, TierCounters
from draftwood.kv.tiers.breaker import Breaker
from draftwood.kv.tiers.record import RecordError, check, decode
from draftwood.kv.tiers.tier import Tier
from draftwood.sampling import SamplingParams
from tests.kv.tiers.test_contract import LABELS, key_of, record_of
from tests.redis_server import Redis
from tests.tiny import TinyLLM, hf_model, random_prompts, tiny_llm

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
MODEL = hf_model("llama")
PROMPTS = random_prompts([41, 33, 50], seed=9)
LIMIT_S = 0.25


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """The plain ones."""
    return tiny_llm(MODEL, drafter="none").run(PROMPTS, GREEDY)


@pytest.fixture(autouse=True)
def _quick_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.kv.tiers.breaker._FIRST_S", 0.05)
    monkeypatch.setattr("draftwood.kv.tiers.breaker._MOST_S", 0.05)


def make(**settings: Any) -> TinyLLM:
    return tiny_llm(MODEL, **{"block_size": 4, "kv_timeout_s": LIMIT_S, **settings})


def with_store(store: MemoryStore, **options: Any) -> TinyLLM:
    """An LLM on a store that is not made from settings."""
    llm = make()
    llm.tiers = KVTiers(
        [store],
        target=llm.pool.target.spec,
        block_size=4,
        labels=LABELS,
        **{"timeout_s": LIMIT_S, **options},
    )
    llm.engine = llm.make_engine(llm.engine.drafter.inner)
    return llm


def counters(llm: TinyLLM) -> TierCounters:
    """Of the only tier, when all is written."""
    assert llm.tiers is not None
    llm.tiers.flush()
    [one] = llm.tiers.counters.values()
    return one


def forget_ram(llm: TinyLLM) -> None:
    llm.engine.prefix.clear()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def soon(what: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.02)
    return False


# --- Redis -----------------------------------------------------------------------------------


def test_redis_that_comes_late_is_used_then(
    own_redis: Redis, texts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with make(kv_redis=own_redis.url) as llm:
        for _ in range(3):
            assert llm.run(PROMPTS, GREEDY) == texts
            forget_ram(llm)
            time.sleep(0.06)
        seen = counters(llm)
        assert seen.num_failures >= 4
        assert seen.num_dropped > 0
        said = warnings(caplog)
        assert len(said) == 2, said  # reading, writing
        assert all("redis" in line for line in said)
        own_redis.start()
        time.sleep(0.06)

        def restored() -> bool:
            assert llm.run(PROMPTS, GREEDY) == texts
            forget_ram(llm)
            return counters(llm).num_hits > 0

        assert soon(restored)
        assert len(warnings(caplog)) == 2


def test_redis_killed_in_the_middle(
    own_redis: Redis, texts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    own_redis.start()
    with make(kv_redis=own_redis.url) as llm:
        assert llm.run(PROMPTS, GREEDY) == texts
        assert counters(llm).num_stored > 0
        seqs = [llm.engine.add(prompt, GREEDY) for prompt in PROMPTS]
        llm.engine.step()
        own_redis.kill()
        while not all(seq.finished for seq in seqs):
            llm.engine.step()
        assert [seq.output_ids for seq in seqs] == texts
        forget_ram(llm)
        assert llm.run(PROMPTS, GREEDY) == texts
        assert counters(llm).num_failures >= 1
        own_redis.start()
        time.sleep(0.06)
        forget_ram(llm)
        assert llm.run(PROMPTS, GREEDY) == texts
        before = counters(llm)
        assert before.num_stored > 30
        forget_ram(llm)
        [output, *_] = llm.outputs(PROMPTS, GREEDY)
        assert output.metrics.cached_by_tier.get("redis") == 40


def test_a_slow_redis_costs_no_more_than_its_limit(
    own_redis: Redis, texts: list[list[int]]
) -> None:
    own_redis.start()
    with make(kv_redis=own_redis.url) as llm:
        assert llm.run(PROMPTS, GREEDY) == texts
        counters(llm)
        forget_ram(llm)
        begin = time.monotonic()
        assert llm.run(PROMPTS[:1], GREEDY) == texts[:1]
        quick_s = time.monotonic() - begin
        forget_ram(llm)
        with own_redis.client() as client:
            client.client_pause(2000)
        begin = time.monotonic()
        assert llm.run(PROMPTS[:1], GREEDY) == texts[:1]
        assert time.monotonic() - begin < quick_s + LIMIT_S + 0.3
        seen = counters(llm)
        assert seen.num_late + seen.num_failures >= 1


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_a_full_redis(
    own_redis: Redis, texts: list[list[int]], policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    own_redis.options = ("--maxmemory", "3mb", "--maxmemory-policy", policy)
    own_redis.start()
    with own_redis.client() as client, make(kv_redis=own_redis.url) as llm:
        with suppress(ResponseError):
            for i in range(40):
                client.set(f"other-{i}", b"x" * 100_000)
        for _ in range(3):
            assert llm.run(PROMPTS, GREEDY) == texts
            forget_ram(llm)
            time.sleep(0.06)
        seen = counters(llm)
        assert (seen.num_dropped > 0) is (policy == "noeviction")
        assert policy == "noeviction" or seen.num_hits > 0
        assert all("draftwood:kv1" not in line for line in warnings(caplog))


class _Garbage(socketserver.BaseRequestHandler):
    """Answers everything with what is not Redis."""

    def handle(self) -> None:
        while self.request.recv(65536):
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n\x00\xff" * 3)


def test_a_server_that_is_not_redis(texts: list[list[int]]) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Garbage) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.server_address[:2]
        with make(kv_redis=f"redis://{host!s}:{port}/0") as llm:
            assert llm.run(PROMPTS, GREEDY) == texts
            assert counters(llm).num_failures >= 1
        server.shutdown()


def test_garbage_under_our_keys_is_deleted(redis_server: Redis, texts: list[list[int]]) -> None:
    with redis_server.client() as client, make(kv_redis=redis_server.url) as llm:
        assert llm.run(PROMPTS, GREEDY) == texts
        counters(llm)
        names = list(client.scan_iter("draftwood:kv1:*"))
        for name in names:
            client.set(name, os.urandom(500))
        client.set("draftwood:kv1:not-hex", b"x")
        forget_ram(llm)
        assert llm.run(PROMPTS, GREEDY) == texts
        assert counters(llm).num_corrupt >= 1
        forget_ram(llm)
        assert llm.run(PROMPTS, GREEDY) == texts
        assert counters(llm).num_hits > 0


def test_a_password_and_a_namespace(own_redis: Redis, texts: list[list[int]]) -> None:
    own_redis.options = ("--requirepass", "secret")
    own_redis.start()
    right = own_redis.url.replace("unix://", "unix://:secret@")
    with make(kv_redis=right, kv_namespace="a") as llm:
        assert llm.run(PROMPTS, GREEDY) == texts
        assert counters(llm).num_stored > 0
        assert counters(llm).num_failures == 0
    with make(kv_redis=right, kv_namespace="b") as llm:
        llm.run(PROMPTS, GREEDY)
        assert counters(llm).num_hits == 0
    with make(kv_redis=own_redis.url) as llm:
        assert llm.run(PROMPTS, GREEDY) == texts
        assert counters(llm).num_failures >= 1


# --- stores of our own making ----------------------------------------------------------------


class Hanging(MemoryStore):
    """Does not answer while `stuck` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.free.wait()
        return super().get_many(keys)

    def put_many(self, records: Sequence[tuple[bytes, bytes]], *, replace: bool = True) -> None:
        self.free.wait()
        super().put_many(records, replace=replace)


def test_an_answer_that_comes_late_is_a_miss(texts: list[list[int]]) -> None:
    store = Hanging()
    with with_store(store) as llm:
        assert llm.run(PROMPTS, GREEDY) == texts
        counters(llm)
        forget_ram(llm)
        store.free.clear()
        begin = time.monotonic()
        [output] = llm.outputs(PROMPTS[:1], GREEDY)
        assert LIMIT_S <= time.monotonic() - begin < LIMIT_S + 1.0
        assert list(output.token_ids) == texts[0]
        assert output.metrics.num_cached_tokens == 0
        assert llm.tiers is not None
        assert llm.tiers.counters["memory"].num_late == 1
        store.free.set()
        time.sleep(0.06)
        forget_ram(llm)
        [output] = llm.outputs(PROMPTS[:1], GREEDY)
        assert output.metrics.num_cached_tokens == 40


def test_others_decode_while_a_store_is_asked(texts: list[list[int]]) -> None:
    """A request that waits for a store must not hold up those that run."""
    store = Hanging()
    with with_store(store, timeout_s=30.0) as llm:
        llm.run(PROMPTS[:1], GREEDY)
        counters(llm)
        forget_ram(llm)
        running = llm.engine.add(PROMPTS[1], GREEDY)
        llm.engine.step()
        store.free.clear()
        waiting = llm.engine.add(PROMPTS[0], GREEDY)
        while not running.finished:
            llm.engine.step()
        assert running.output_ids == texts[1]
        assert waiting.output_ids == []
        threading.Timer(0.1, store.free.set).start()
        while not waiting.finished:
            llm.engine.step()
        assert waiting.output_ids == texts[0]
        assert waiting.metrics.num_cached_tokens == 40


def test_an_abort_while_a_store_is_asked() -> None:
    store = Hanging()
    with with_store(store, timeout_s=30.0) as llm:
        llm.run(PROMPTS[:1], GREEDY)
        counters(llm)
        forget_ram(llm)
        store.free.clear()
        seq = llm.engine.add(PROMPTS[0], GREEDY)
        other = llm.engine.add(PROMPTS[0][:3], GREEDY)
        llm.engine.step()
        llm.engine.abort(seq)
        while not other.finished:
            llm.engine.step()
        store.free.set()
    assert llm.pool.num_free == llm.pool.num_blocks


def test_a_queue_that_is_full_drops_and_counts(texts: list[list[int]]) -> None:
    """The engine never waits for a write; what is kept of a chain is its beginning."""
    store = Hanging()
    block = 4 * MODEL.spec.kv.bytes_per_token
    with with_store(store, queue_bytes=5 * block) as llm:
        store.free.clear()
        assert llm.run(PROMPTS[:1], GREEDY) == texts[:1]
        assert llm.tiers is not None
        assert llm.tiers.counters["memory"].num_dropped == 12 - 5
        store.free.set()
        assert counters(llm).num_stored == 5
        forget_ram(llm)
        [output] = llm.outputs(PROMPTS[:1], GREEDY)
        assert output.metrics.num_cached_tokens == 20


class Forgetful(MemoryStore):
    """Loses keys at random, between asking and reading too."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.delete([block.key for block in self.ls() if self.rng.random() < 0.1])
        return super().get_many(keys)


def test_keys_dropped_at_random_under_load(texts: list[list[int]]) -> None:
    with with_store(Forgetful()) as llm:
        for _ in range(12):
            assert llm.run(PROMPTS, GREEDY) == texts
            counters(llm)
            forget_ram(llm)
        assert counters(llm).num_hits > 20
        assert counters(llm).num_failures == 0


class Raising(MemoryStore):
    """Somebody's store with a bug."""

    def run(self, keys: Sequence[bytes]) -> int:
        raise ZeroDivisionError

    def put_many(self, records: Sequence[tuple[bytes, bytes]], *, replace: bool = True) -> None:
        raise KeyError


def test_a_store_with_a_bug_is_left_out(texts: list[list[int]]) -> None:
    with with_store(Raising()) as llm:
        for _ in range(2):
            assert llm.run(PROMPTS, GREEDY) == texts
            forget_ram(llm)
        assert counters(llm).num_failures >= 2


# --- disk ------------------------------------------------------------------------------------


def _cut(record: bytes) -> bytes:
    return record[: len(record) // 2]


def _flip(record: bytes) -> bytes:
    return record[:-9] + bytes([record[-9] ^ 4]) + record[-8:]


@pytest.mark.parametrize("harm", [_cut, _flip, lambda record: b"", lambda record: b"\0" * 99])
def test_damaged_files_are_misses_and_go(
    tmp_path: Path, texts: list[list[int]], harm: Callable[[bytes], bytes]
) -> None:
    with make(kv_disk=str(tmp_path)) as llm:
        llm.run(PROMPTS, GREEDY)
    files = sorted(tmp_path.rglob("*.kv"))
    for file in files:
        file.write_bytes(harm(file.read_bytes()))
    with make(kv_disk=str(tmp_path)) as llm:
        outputs = llm.outputs(PROMPTS, GREEDY)
        assert [list(output.token_ids) for output in outputs] == texts
        assert all(output.metrics.num_cached_tokens == 0 for output in outputs)
        assert counters(llm).num_corrupt == 3
    with make(kv_disk=str(tmp_path)) as llm:
        assert llm.outputs(PROMPTS[:1], GREEDY)[0].metrics.num_cached_tokens >= 4


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written(
    tmp_path: Path,
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    def fail(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(code, os.strerror(code))

    with make(kv_disk=str(tmp_path)) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", fail)
            for _ in range(2):
                assert llm.run(PROMPTS, GREEDY) == texts
                forget_ram(llm)
            assert counters(llm).num_stored == 0
        assert counters(llm).num_dropped > 0
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        [said] = warnings(caplog)
        assert os.strerror(code) in said
        time.sleep(0.06)
        assert llm.run(PROMPTS, GREEDY) == texts
        assert counters(llm).num_stored > 0


def test_a_disk_that_cannot_be_read(
    tmp_path: Path, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: DiskStore, key: bytes) -> bytes | None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with make(kv_disk=str(tmp_path)) as llm:
        llm.run(PROMPTS, GREEDY)
        counters(llm)
        forget_ram(llm)
        with monkeypatch.context() as patch:
            patch.setattr(DiskStore, "_get", refuse)
            assert llm.run(PROMPTS, GREEDY) == texts
        assert counters(llm).num_failures >= 1
        time.sleep(0.06)
        forget_ram(llm)
        assert llm.outputs(PROMPTS[:1], GREEDY)[0].metrics.num_cached_tokens == 40


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path, texts: list[list[int]]) -> None:
    import shutil

    with make(kv_disk=str(tmp_path / "kv")) as llm:
        llm.run(PROMPTS, GREEDY)
        counters(llm)
        shutil.rmtree(tmp_path / "kv")
        for _ in range(2):
            forget_ram(llm)
            assert llm.run(PROMPTS, GREEDY) == texts
            counters(llm)
        assert counters(llm).num_failures == 0
        assert counters(llm).num_hits > 0


_WRITE_FOREVER = """
import random, sys, torch
from draftwood.kv.tiers import DiskStore, Labels
from draftwood.kv.tiers.record import Block, PlaneKV, encode
torch.set_num_threads(1)
kv = torch.zeros(2, 4, 1, 2000)
blocks = {n.to_bytes(16): Block((n,) * 4, PlaneKV(kv, kv + 1)) for n in range(60)}
records = [(key, encode(key, block, Labels())) for key, block in blocks.items()]
store = DiskStore(sys.argv[1], max_bytes=4_000_000)
rng = random.Random(int(sys.argv[2]))
print("ready", flush=True)
while True:
    store.put_many(rng.sample(records, 4))
    store.get_many(list(blocks))
"""


def test_two_processes_on_one_folder_killed_while_they_write(tmp_path: Path) -> None:
    """Whenever it is looked at, every file is whole and the budget holds, give or take a bit."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITE_FOREVER, str(tmp_path), str(seed)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for seed in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        store = DiskStore(tmp_path)
        most = 0
        for i in range(10):
            time.sleep(0.05)
            most = max(most, store.stats().num_bytes)
            if i == 5:
                writers[0].send_signal(signal.SIGKILL)
        assert store.verify().num_bad == 0
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    report = store.verify()
    assert (report.num_good > 0, report.num_bad) == (True, 0)
    assert most <= 4_000_000 * 1.5


def test_what_killed_processes_left_is_swept(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put_many([(key_of(1), record_of(1))])
    old, new = (tmp_path / "draftwood-kv-1" / "tmp" / name for name in ("1-a.part", "2-b.part"))
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, (0, 0))
    DiskStore(tmp_path).put_many([(key_of(2), record_of(2))])
    assert (old.exists(), new.exists()) == (False, True)
    assert store.stats().num_blocks == 2


# --- records ---------------------------------------------------------------------------------


@given(st.integers(0, len(record_of(1, draft=True)) - 1), st.integers(1, 255))
def test_any_changed_byte_is_found(place: int, change: int) -> None:
    record = bytearray(record_of(1, draft=True))
    record[place] ^= change
    with pytest.raises(RecordError):
        decode(key_of(1), bytes(record))


@given(st.integers(0, len(record_of(1)) - 1), st.binary(max_size=20))
def test_a_cut_or_lengthened_record_is_found(length: int, tail: bytes) -> None:
    with pytest.raises(RecordError):
        check(key_of(1), record_of(1)[:length] + tail)
    if tail:
        with pytest.raises(RecordError):
            check(key_of(1), record_of(1) + tail)


def test_what_a_tier_has_is_known_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("draftwood.kv.tiers.tier.monotonic", lambda: now)
    tier = Tier(MemoryStore(), ttl_s=100.0)
    assert tier.lacks(b"a", False)
    tier.note(b"a", False)
    assert not tier.lacks(b"a", False)
    assert tier.lacks(b"a", True)
    now = 51.0
    assert tier.lacks(b"a", False)
    tier.note(b"a", True)
    assert not tier.lacks(b"a", True)
    tier.forget([b"a", b"b"])
    assert tier.lacks(b"a", False)


def test_failures_at_the_same_moment_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Two readers both saw that nobody had warned yet."""
    together = threading.Barrier(2, timeout=10)

    class Slow(float):
        """A clock's answer that lets the other thread come as far when it is compared."""

        def __ge__(self, other: float) -> bool:
            with suppress(threading.BrokenBarrierError):
                together.wait(0.2)
            return float(self) >= other

    breaker = Breaker("reading", clock=lambda: Slow(1.0))
    threads = [threading.Thread(target=breaker.failed, args=("gone",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert breaker.num_failures == 2
    assert len(warnings(caplog)) == 1
