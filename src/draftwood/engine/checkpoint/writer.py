"""When to save what: the part of checkpoints that runs on the engine's thread.

It is an observer of rounds. When a checkpoint is due it first publishes the KV of the running
requests, one a round, so that the cache tiers write it; then it copies token ids and hands them to
a thread. It also keeps what has ended until somebody says that the answer has arrived.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from draftwood.engine.checkpoint.background import Background, CheckpointStats
from draftwood.engine.checkpoint.maker import Maker
from draftwood.engine.checkpoint.saved import Offset, SavedRequest, can_be_saved
from draftwood.engine.checkpoint.store import Checkpoint, CheckpointStore
from draftwood.engine.observers import Round
from draftwood.engine.sequence import Sequence
from draftwood.errors import ConfigError, DraftwoodError
from draftwood.kv.tiers import KVTiers

if TYPE_CHECKING:
    from draftwood.engine.engine import Engine

_log = logging.getLogger("draftwood")
MAX_BYTES = 64 << 20
_SOON_S = 0.5
_SETTLE_S = 2.0
_WAIT_S = 10.0


class CheckpointWriter:
    """Saves what the requests of an engine need to go on in another process.

    All methods belong to the engine's thread, and none but `save` and `close` waits for the disk.

        writer = CheckpointWriter(folder, Maker.of(model.spec))
        writer.observe(engine, tiers)
        seqs = writer.resume()      # what an earlier process left behind, queued again
        ...
        writer.delivered(id, Offset(num_tokens, num_chars))
        writer.forget(id)           # its reader has all of it, or is gone
        writer.close()              # before the engine is

    Args:
        folder: of the checkpoints; one process at a time.
        maker: who we are.
        every_s: seconds between two checkpoints. New requests are saved within half a second.
        max_bytes: of one checkpoint, of which there are two.

    Raises:
        CheckpointError: what is in the folder was made by another model or version, or is damaged.
        ConfigError: the folder cannot be used, or a value is out of its range.

    Attributes:
        pending: what an earlier process left behind and nobody has resumed, by id. It stays in
            every checkpoint until then.
        maker, folder: see above.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        maker: Maker,
        *,
        every_s: float = 5.0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if not every_s > 0:
            raise ConfigError(f"checkpoint_every_s is {every_s}: it must be above 0")
        self._store = CheckpointStore(folder)
        self.maker = maker
        self.folder = self._store.folder
        self._every_s = every_s
        try:
            self._found = self._store.load()
            if self._found is not None:
                maker.check(self._found.maker, str(self._store.folder))
        except BaseException:
            self._store.close()
            raise
        found = self._found.requests if self._found else ()
        self.pending = {saved.request_id: saved for saved in found}
        self._live: dict[str, Sequence] = {}
        self._copies: dict[str, SavedRequest] = {}
        self._delivered: dict[str, Offset] = {}
        self._forgotten: set[str] = set()
        self._unpublished: list[Sequence] | None = None  # None: no checkpoint is under way
        self._has_news = False
        self._last_s = monotonic()
        self._engine_s = 0.0
        self._engine: Engine | None = None
        self._tiers: KVTiers | None = None
        self._background = Background(self._store, max_bytes, self._settle)
        self._warned = False

    @property
    def stats(self) -> CheckpointStats:
        """What was written so far."""
        return replace(self._background.stats, engine_s=self._engine_s)

    def observe(self, engine: Engine, tiers: KVTiers | None = None) -> None:
        """Watches an engine from now on.

        Args:
            engine: what the one before it had not finished becomes pending.
            tiers: where its KV is kept; None computes it again.
        """
        if self._engine is not None and self in self._engine.observers:
            self._engine.observers.remove(self)
        for seq in [seq for seq in self._live.values() if not seq.finished]:
            saved = self._copy(seq)
            self.forget(seq.request_id)
            self.pending[seq.request_id] = saved
        self._engine, self._tiers, self._unpublished = engine, tiers, None
        engine.observers.append(self)
        if self._found is not None:
            engine.count_from(self._found.num_requests)
            if self._found.drafter == engine.drafter.name:
                engine.drafter.restore(self._found.drafter_state)

    def on_round(self, round_: Round) -> None:
        """Looks for new requests; publishes, copies, or does nothing, as it is time for."""
        with self._timed():
            self._meet()
            if self._unpublished is None:
                if self._due:
                    self._unpublished = list(self._running)
            elif self._unpublished:
                self._publish(self._unpublished.pop())
            else:
                self._hand_over()

    def resume(self, request_ids: Iterable[str] | None = None) -> list[Sequence]:
        """Queues pending requests again, each with the output it had.

        Args:
            request_ids: which; None for all.

        Returns:
            Their sequences, in the order in which they first came, those that had ended included.

        Raises:
            ConfigError: one does not fit this engine, or what it needs is not installed. Then all
                of them stay pending.
        """
        engine = self._engine
        assert engine is not None, "observe an engine first"
        wanted = set(self.pending if request_ids is None else request_ids)
        chosen = [saved for name, saved in self.pending.items() if name in wanted]
        seqs: dict[str, Sequence] = {}
        for saved in chosen:
            parent = None if saved.parent is None else seqs.get(saved.parent)
            try:
                seqs[saved.request_id] = engine.resume(saved, parent)
            except DraftwoodError as error:
                for seq in seqs.values():
                    engine.abort(seq)
                raise ConfigError(
                    f"request {saved.request_id!r} of the checkpoint cannot go on: {error}"
                ) from error
        for saved in chosen:
            del self.pending[saved.request_id]
            self._delivered[saved.request_id] = saved.delivered
        self._live.update(seqs)
        return list(seqs.values())

    def delivered_of(self, request_id: str) -> Offset:
        """What the reader of a request has, as far as it is known."""
        return self._delivered.get(request_id, Offset())

    def delivered(self, request_id: str, offset: Offset) -> None:
        """The reader of a request has so much by now."""
        self._delivered[request_id] = offset

    def forget(self, request_id: str) -> None:
        """A request need not be saved any more: its reader has its end, or does not want it."""
        self.pending.pop(request_id, None)
        if self._live.pop(request_id, None) is not None:
            self._forgotten.add(request_id)
        self._copies.pop(request_id, None)
        self._delivered.pop(request_id, None)
        self._has_news = True

    def keep_state(self) -> None:
        """From now on what the drafter has learned is kept also when no request is left."""
        self._background.keeps_empty = True

    def expect(self, requests: Iterable[SavedRequest]) -> None:
        """Makes requests pending that somebody else has kept; what a checkpoint has is newer."""
        for saved in requests:
            self.pending[saved.request_id] = self.pending.pop(saved.request_id, saved)

    def suspend(self, seqs: Iterable[Sequence], *, publish: bool = True) -> None:
        """These are about to be aborted, and shall go on later, here or in another process.

        Args:
            seqs: the sequences.
            publish: whether their KV can be trusted.
        """
        self._meet()
        for seq in seqs:
            name = seq.request_id
            if can_be_saved(seq.params) and name in self._live:
                if publish:
                    self._publish(seq)
                saved = self._copy(seq)
                self.forget(name)
                self.pending[name] = saved

    def save(self, *, wait: bool = True) -> bool:
        """Saves all requests now; returns whether they are on the disk (or, not waiting, will be).

        Call it between two rounds. Once closed it saves nothing.
        """
        if self._engine is None:
            return False
        with self._timed():
            self._meet()
            for seq in self._running:
                self._publish(seq)
            number = self._hand_over()
        num_failed = self._background.stats.num_failed
        if not wait:
            return True
        in_time = self._background.wait(number, _WAIT_S)
        return in_time and self._background.stats.num_failed == num_failed

    def close(self) -> None:
        """Saves what has not come to an end, and lets go of the folder."""
        if self._engine is not None:
            self.save(wait=False)
            if self in self._engine.observers:
                self._engine.observers.remove(self)
            self._engine = None
            self._background.close(_WAIT_S)
            self._store.close()

    def _settle(self) -> None:
        """Lets KV reach the disk before the requests that want it do. Runs in the background."""
        if self._tiers is not None:
            self._tiers.flush(_SETTLE_S)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = perf_counter()
        try:
            yield
        finally:
            self._engine_s += perf_counter() - begin

    @property
    def _due(self) -> bool:
        wait_s = min(_SOON_S, self._every_s) if self._has_news else self._every_s
        busy = bool(self._live or self.pending or self._has_news)
        return busy and monotonic() - self._last_s >= wait_s

    @property
    def _running(self) -> Iterator[Sequence]:
        return (seq for seq in self._live.values() if not seq.finished and seq.lease.length > 0)

    def _meet(self) -> None:
        """Takes note of the engine's new requests."""
        if self._engine is None:
            return
        current = self._engine.unfinished
        # Those that run may have overtaken others that waited for a store.
        for seq in sorted(current, key=lambda one: one.metrics.arrival_s):
            name = seq.request_id
            if name in self._live or name in self._forgotten:
                continue
            if can_be_saved(seq.params):
                self._live[name] = seq
                self._has_news = True
            elif not self._warned:
                self._warned = True
                _log.warning("requests with logits processors are not in checkpoints")
        if self._forgotten:
            self._forgotten &= {seq.request_id for seq in current}

    def _publish(self, seq: Sequence) -> None:
        """Lets the cache tiers have the KV of a running request, as far as its blocks are full."""
        if not seq.finished and seq.lease.length > 0:
            seq.lease.publish(seq.tokens, seq.cache_salt)

    def _copy(self, seq: Sequence) -> SavedRequest:
        """A request as it is; what has not changed since the last time is not copied again."""
        name, old = seq.request_id, self._copies.get(seq.request_id)
        offset = self.delivered_of(name)
        if old is not None and (
            old.ending is not None if seq.finished else len(old.tokens) == len(seq.tokens)
        ):
            saved = replace(old, delivered=offset)
        else:
            saved = SavedRequest.of(seq, offset)
        self._copies[name] = saved
        return saved

    def _hand_over(self) -> int:
        """Copies all requests and gives them to the thread that writes."""
        assert self._engine is not None
        self._unpublished, self._has_news, self._last_s = None, False, monotonic()
        live = [self._copy(seq) for seq in self._live.values()]
        drafter = self._engine.drafter
        return self._background.put(
            Checkpoint(
                self.maker,
                (*self.pending.values(), *live),
                self._engine.num_requests,
                drafter.name,
                drafter.state(),
            )
        )
