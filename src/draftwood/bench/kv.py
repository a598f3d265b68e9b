"""Time to first token for a known prefix: computed, from RAM, from disk, from Redis.

Beside each stands its floor: the time that moving the same bytes takes and nothing else.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any

import torch

from draftwood.bench.fingerprint import Neighbours
from draftwood.draft.base import NoDrafter
from draftwood.engine.engine import Engine
from draftwood.errors import CapacityError, ConfigError, StoreError
from draftwood.kv.tiers import BlockStore, DiskStore, KVTiers, Labels, RedisStore
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams

_SERVER = "redis-server"
_START_S = 10.0
_TIMEOUT_S = 30.0  # the measurement shall see slow answers, not leave them out
_QUEUE_BYTES = 4 << 30
_PIECE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoint:
    """One line of the result.

    Attributes:
        tier: "cold", "ram", "disk" or "redis", the latter two with the compression behind it.
        num_tokens: of the prompt.
        num_cached_tokens: of them that were not computed.
        ttft_s, min_s: seconds to the first token, median and least.
        speedup: the cold median over this one.
        num_bytes: of the records that were read.
        floor_s: least seconds that reading these bytes took, without decoding or copying them;
            None where nothing is read.
        same_token: the first token is the cold one.
        repeats: how often it was measured.
        neighbours: cores that other processes kept busy meanwhile; None where it is not known.
    """

    tier: str
    num_tokens: int
    num_cached_tokens: int
    ttft_s: float
    min_s: float
    speedup: float
    num_bytes: int
    floor_s: float | None
    same_token: bool
    repeats: int
    neighbours: float | None

    def to_json(self) -> dict[str, Any]:
        """The fields of a `kv` line."""
        return {"type": "kv", **asdict(self)}


@dataclass(frozen=True, slots=True)
class _First:
    """One request up to its first token."""

    token: int
    seconds: float
    num_cached: int


class KVBench:
    """Measures one prefix again and again.

    Args:
        llm: the model; its own engine is not used.
        num_tokens: of the prefix.
        repeats: of each measurement.
        on_point: told each result as soon as it is there.

    Raises:
        ConfigError: the prefix does not fit the model or the KV memory.
    """

    def __init__(
        self, llm: LLM, num_tokens: int, repeats: int, on_point: Callable[[KVPoint], None]
    ) -> None:
        if num_tokens + 2 > llm.engine.max_length:
            raise ConfigError(
                f"prefix of {num_tokens} tokens: the context holds {llm.engine.max_length}"
                " (a larger --kv-memory may help)"
            )
        rng = random.Random(0)
        vocabulary = min(llm.model.spec.vocab_size, 10_000)
        self._prompt = [rng.randrange(vocabulary) for _ in range(num_tokens + 1)]
        self._llm = llm
        self._repeats = repeats
        self._on_point = on_point
        self._cold: KVPoint | None = None
        self._token = -1
        self._compression = "none"

    def memory(self) -> list[KVPoint]:
        """Cold, then from RAM."""
        engine = self._engine(None)
        self._first(engine)  # pays for what is set up late
        points = []
        for tier in ("cold", "ram"):
            neighbours = Neighbours()
            firsts = []
            for _ in range(self._repeats):
                if tier == "cold":
                    engine.prefix.clear()
                firsts.append(self._first(engine))
            points.append(self._point(tier, firsts, 0, None, neighbours))
        engine.close()
        return points

    def store(
        self,
        store: BlockStore,
        compression: str = "none",
        before: Callable[[], None] = lambda: None,
    ) -> KVPoint:
        """From a store, which is filled first.

        Args:
            store: where to.
            compression: how blocks are written into it.
            before: runs before each read of it.
        """
        self._compression = compression
        keys = self._fill(store)
        num_bytes, floors, firsts = 0, [], []
        neighbours = Neighbours()
        for _ in range(self._repeats):
            before()
            with self._tiered(store) as engine:
                firsts.append(self._first(engine))
            before()
            begin = perf_counter()
            num_bytes = sum(len(record) for record in _read(store, keys))
            floors.append(perf_counter() - begin)
        name = store.name if compression == "none" else f"{store.name} {compression}"
        return self._point(name, firsts, num_bytes, min(floors), neighbours)

    def _fill(self, store: BlockStore) -> list[bytes]:
        """Writes the prefix; returns its keys. Raises StoreError if not all of it is there."""
        with self._tiered(store) as engine:
            self._first(engine)
            keys = [key for key, _ in engine.prefix.keys(self._prompt[:-1])]
        if store.run(keys) < len(keys):
            raise StoreError(f"{store.name} did not keep the prefix: is it too small or too slow?")
        return keys

    @contextmanager
    def _tiered(self, store: BlockStore) -> Iterator[Engine]:
        """An engine that knows nothing yet, on a store; what it writes is written at the end.

        The store is closed then, which ours survive: they open again what they need.
        """
        tiers = self._tiers(store)
        engine = self._engine(tiers)
        try:
            yield engine
            tiers.flush(_TIMEOUT_S)
        finally:
            engine.close()
            tiers.close()

    def _tiers(self, store: BlockStore) -> KVTiers:
        pool = self._llm.pool
        return KVTiers(
            [store],
            target=pool.target.spec,
            block_size=pool.block_size,
            labels=Labels(self._llm.model.spec.name, compression=self._compression),
            timeout_s=_TIMEOUT_S,
            queue_bytes=_QUEUE_BYTES,
        )

    def _engine(self, tiers: KVTiers | None) -> Engine:
        llm = self._llm
        config = replace(llm.config, max_tree_nodes=0, kv_compression=self._compression)
        return Engine(llm.model, llm.tokenizer, NoDrafter(), llm.pool, config, tiers)

    def _first(self, engine: Engine) -> _First:
        """One token, its KV published afterwards."""
        begin = perf_counter()
        seq = engine.add(self._prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        try:
            while not seq.finished:
                engine.step()
            if engine.pool.device.type == "cuda":
                torch.cuda.synchronize(engine.pool.device)
        except CapacityError as error:
            raise ConfigError(f"the prefix does not fit the KV memory: {error}") from error
        finally:
            engine.abort(seq)
        first_s = seq.metrics.first_token_s
        seconds = perf_counter() - begin if first_s is None else first_s - begin
        return _First(seq.output_ids[0], seconds, seq.metrics.num_cached_tokens)

    def _point(
        self,
        tier: str,
        firsts: Sequence[_First],
        num_bytes: int,
        floor_s: float | None,
        neighbours: Neighbours,
    ) -> KVPoint:
        seconds = median(one.seconds for one in firsts)
        if self._cold is None:
            self._token = firsts[0].token
        point = KVPoint(
            tier=tier,
            num_tokens=len(self._prompt),
            num_cached_tokens=min(one.num_cached for one in firsts),
            ttft_s=seconds,
            min_s=min(one.seconds for one in firsts),
            speedup=self._cold.ttft_s / seconds if self._cold else 1.0,
            num_bytes=num_bytes,
            floor_s=floor_s,
            same_token=all(one.token == self._token for one in firsts),
            repeats=len(firsts),
            neighbours=neighbours.cores(),
        )
        self._cold = self._cold or point
        self._on_point(point)
        return point


def measure(
    llm: LLM,
    num_tokens: int,
    repeats: int,
    on_point: Callable[[KVPoint], None],
    *,
    compressions: Sequence[str] = ("none",),
    disk: Path | None = None,
    redis: str | None = None,
) -> tuple[list[KVPoint], list[str]]:
    """Measures all tiers that can be had.

    Args:
        llm: the model.
        num_tokens: of the prefix.
        repeats: of each measurement.
        on_point: told each result as soon as it is there.
        compressions: of the stores, each by itself.
        disk: folder for the files; None takes a temporary one.
        redis: URL of a server; None starts one, where redis-server is installed.

    Returns:
        The results, and a line for each tier that is missing.

    Raises:
        ConfigError: the prefix does not fit.
        StoreError: a store does not work.
    """
    bench = KVBench(llm, num_tokens, repeats, on_point)
    points, missing = bench.memory(), []
    for how in compressions:
        with tempfile.TemporaryDirectory(prefix="draftwood-", dir=disk) as folder:
            store: BlockStore = DiskStore(folder)
            points.append(bench.store(store, how, partial(_drop_cached, Path(folder))))
    with redis_url(redis) as url:
        if url is None:
            missing.append(f"redis: give --redis URL, or install {_SERVER}")
        else:
            store = RedisStore(url, namespace="draftwood-bench", timeout_s=_TIMEOUT_S)
            for how in compressions:
                points.append(bench.store(store, how))
                store.clear()
            store.close()
    return points, missing


@contextmanager
def redis_url(given: str | None) -> Iterator[str | None]:
    """The URL given, or that of a server started for as long as this lasts; None without one."""
    if given is not None or shutil.which(_SERVER) is None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="draftwood-") as folder:
        socket = Path(folder) / "s"
        place = ("--port", "0", "--unixsocket", str(socket), "--dir", folder)
        server = subprocess.Popen(
            [_SERVER, *place, "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            end = monotonic() + _START_S
            while not socket.exists() and server.poll() is None and monotonic() < end:
                sleep(0.01)
            yield f"unix://{socket}?db=0" if socket.exists() else None
        finally:
            server.kill()
            server.wait()


def _read(store: BlockStore, keys: Sequence[bytes]) -> Iterator[bytes]:
    for start in range(0, len(keys), _PIECE):
        for record in store.get_many(keys[start : start + _PIECE]):
            if record is None:
                raise StoreError(f"{store.name} has lost a part of the prefix: is it too small?")
            yield record


def _drop_cached(folder: Path) -> None:
    """Has the next read come from the disk and not from the system's memory; Linux only."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*.kv"):
        with suppress(OSError), open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
