"""The engine's thread: takes requests from the event loop and gives text back.

The engine is single-threaded, and this is its thread. Between two rounds it takes what the event
loop has posted (new requests, cancellations, the end), so a request that nobody waits for any more
is gone within one round, whatever phase it is in. It never waits for a reader.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic
from typing import Any, Protocol

from draftwood.engine.engine import Engine
from draftwood.engine.observers import Observer
from draftwood.engine.sequence import Sequence as EngineSequence
from draftwood.errors import DraftwoodError
from draftwood.llm import LLM
from draftwood.serve.endings import ending_of
from draftwood.serve.errors import ApiError
from draftwood.serve.generation import Generation, Outbox, Teller
from draftwood.serve.rounds import RoundRecorder
from draftwood.serve.waiting import WaitingQueue

_log = logging.getLogger("draftwood.serve")


class Watcher(Observer, Protocol):
    """Who is told about rounds and about requests that ended: the metrics."""

    def on_finished(self, seq: EngineSequence) -> None:
        """A sequence has ended. Runs on the engine's thread."""

    def bind(self, engine: Engine, queue_length: Callable[[], int]) -> None:
        """There is a new engine to look at, and to observe."""


class Worker:
    """Runs an engine in a thread of its own.

    Args:
        llm: whose engine; it is the thread's alone while that runs.
        max_queue: most outputs that may wait beside those that run.
        watcher: told what happens; None for nobody.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_queue: int,
        watcher: Watcher | None = None,
    ) -> None:
        self._llm = llm
        self._watcher = watcher
        self._on_death: Callable[[], None] = lambda: None
        self.limit = llm.config.max_num_seqs + max_queue
        self._posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiting = WaitingQueue()
        self._running: list[Generation] = []
        self._rounds = RoundRecorder(llm.tokenizer)
        self._num_open = 0  # outputs accepted and not ended
        self._lock = threading.Lock()
        self._news: set[Outbox] = set()
        self._service_s = 1.0  # how long an output occupies its place, as a moving average
        self._stopping = False
        self.died = False
        self._thread = threading.Thread(target=self._run, name="draftwood-engine", daemon=True)

    def start(self, on_death: Callable[[], None] = lambda: None) -> None:
        """Begins; `on_death` is called from the thread if it cannot go on."""
        self._on_death = on_death
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests can be answered."""
        return self._thread.is_alive() and not self._stopping

    @property
    def queue_length(self) -> int:
        """Prompts that wait for a place."""
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        """Outputs accepted and not ended."""
        return self._num_open

    def submit(self, generations: Sequence[Generation]) -> None:
        """Takes all of a request's prompts, or none.

        Raises:
            ApiError: the queue is full, more is asked at once than it could ever hold, or the
                server is shutting down.
        """
        wanted = sum(one.params.n for one in generations)
        if wanted > self.limit:
            raise ApiError(
                400,
                f"this request asks for {wanted} texts: this server takes {self.limit} at once",
                param="n",
            )
        if not self.alive:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        with self._lock:
            if self._num_open + wanted > self.limit:
                raise self._full()
            self._num_open += wanted
        for one in generations:
            self._posted.put(lambda one=one: self._take(one))  # type: ignore[misc]

    def cancel(self, generations: Iterable[Generation]) -> None:
        """Ends generations that nobody waits for; those that have ended stay as they are."""
        for one in generations:
            if not one.ended:
                self._posted.put(lambda one=one: self._drop(one))  # type: ignore[misc]

    def fail_all(self, error: ApiError) -> None:
        """Ends everything that waits or runs."""
        self._posted.put(lambda: self._fail_all(error))

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends everything and the thread; from another thread."""
        self._posted.put(self._stop)
        self._thread.join(timeout_s)

    # --- from here on all runs on the engine's thread ----------------------------------------

    def _run(self) -> None:
        try:
            self._begin()
            while not self._stopping:
                self._turn()
            self._leave()
        except BaseException:
            _log.critical("the engine cannot go on", exc_info=True)
            self.died = self._stopping = True
            self._abandon_all(ApiError(500, "the engine cannot go on", code="engine_dead"))
            self._take_posted(wait=False)
            self._wake()
            self._on_death()

    def _begin(self) -> None:
        """Watches the engine, which may be a new one."""
        engine = self._llm.engine
        engine.observers.append(self._rounds)
        if self._watcher is not None:
            self._watcher.bind(engine, lambda: self.queue_length)

    def _leave(self) -> None:
        """Watches no longer: the engine may live on without a server."""
        observers = self._llm.engine.observers
        for observer in (self._rounds, self._watcher):
            if observer in observers:
                observers.remove(observer)

    def _turn(self) -> None:
        """Takes what was posted, then computes one round."""
        self._take_posted(wait=not self._llm.engine.has_work and not self._waiting)
        self._expire()
        self._admit()
        if self._llm.engine.has_work and not self._stopping:
            failure = self._step()
            if failure is not None:
                self._recover(failure)
        self._wake()

    def _take_posted(self, *, wait: bool) -> None:
        if wait:
            self._wake()
            self._posted.get()()
        while not self._posted.empty():
            self._posted.get()()

    def _stop(self) -> None:
        self._stopping = True
        self._fail_all(ApiError(503, "the server is shutting down", code="shutting_down"))

    def _take(self, one: Generation) -> None:
        """A new request: checked now, so that a wrong one need not wait to hear it."""
        if one.ended:
            return
        if self._stopping:
            self._end(one, ApiError(503, "the server is shutting down", code="shutting_down"))
            return
        try:
            one.seqs = self._make(one)
        except Exception as error:
            if not isinstance(error, DraftwoodError):
                _log.exception("a request could not be made")
            self._end(one, error)
            return
        one.tellers = [Teller(i, seq) for i, seq in enumerate(one.seqs, start=one.first_index)]
        one.outbox.accept()
        self._news.add(one.outbox)
        self._waiting.push(one)

    def _make(self, one: Generation) -> list[EngineSequence]:
        """The sequences of all outputs; those behind the first share its prompt's KV."""
        engine, params = self._llm.engine, one.params
        first = engine.make(one.prompt_ids, params, one.id)
        others = [
            engine.make(
                one.prompt_ids,
                params.but(seed=(first.seed + i) % 2**64, prompt_logprobs=None),
                f"{one.id}-{i}",
                first,
            )
            for i in range(1, params.n)
        ]
        return [first, *others]

    def _admit(self) -> None:
        busy = sum(not seq.finished for one in self._running for seq in one.seqs)
        while self._waiting and busy < self._llm.config.max_num_seqs:
            one = self._waiting.pop()
            for seq in one.seqs:
                self._llm.engine.submit(seq)
            if one.wants_rounds:
                self._rounds.watch(one)
            self._running.append(one)
            busy += len(one.seqs)

    def _expire(self) -> None:
        now = monotonic()
        for one in [*self._running, *self._waiting.all()]:
            if one.deadline is not None and one.deadline <= now:
                self._end(one, too_late())

    def _step(self) -> Exception | None:
        """One round; the exception that it ended in, if it did."""
        try:
            self._llm.engine.step()
        except Exception as error:
            _log.exception("the engine failed")
            return error.with_traceback(None)  # the frames hold the KV pool
        for one in list(self._running):
            self._tell(one)
        return None

    def _tell(self, one: Generation) -> None:
        """Passes on what is new of one request."""
        told = False
        for teller in one.tellers:
            piece = None if teller.done else teller.news()
            if piece is None:
                continue
            if teller.seq.finished:
                teller.done = True
                piece.ending = ending_of(teller.seq, self._llm.engine)
                self._count(teller.seq)
            if teller.seq.prompt_logprobs:
                one.outbox.prompt_logprobs[piece.index] = teller.seq.prompt_logprobs
            one.outbox.put(piece)
            told = True
        if told:
            self._news.add(one.outbox)
        if all(teller.done for teller in one.tellers):
            self._end(one)

    def _count(self, seq: EngineSequence) -> None:
        metrics = seq.metrics
        if metrics.finish_s is not None:
            self._service_s += 0.2 * (metrics.finish_s - metrics.arrival_s - self._service_s)
        if self._watcher is not None:
            self._watcher.on_finished(seq)

    def _drop(self, one: Generation) -> None:
        """Nobody waits for it any more."""
        if not one.ended:
            self._end(one, ApiError(499, "the client has gone"))

    def _end(self, one: Generation, error: Exception | None = None) -> None:
        """Lets go of a request, in whatever phase it is; its blocks are free afterwards."""
        if one.ended:
            return
        if one in self._running:
            self._running.remove(one)
            self._rounds.forget(one)
            for seq in one.seqs:
                self._llm.engine.abort(seq)
        else:
            self._waiting.remove(one)
        self._close(one, error, "abort")

    def _close(self, one: Generation, error: Exception | None, reason: str) -> None:
        """Counts what has not come to an end of its own, and leaves word for the reader."""
        one.ended = True
        for teller in one.tellers:
            if not teller.seq.finished:
                teller.seq.finish(reason)
            if not teller.done:
                self._count(teller.seq)
        with self._lock:
            self._num_open -= one.params.n
        if error is not None:
            one.outbox.fail(error)
        self._news.add(one.outbox)

    def _fail_all(self, error: Exception) -> None:
        for one in [*self._running, *self._waiting.all()]:
            self._end(one, error)
        self._wake()

    def _recover(self, failure: Exception) -> None:
        """Tells all who wait and goes on with a fresh engine on fresh KV memory."""
        name = type(failure).__name__
        self._abandon_all(ApiError(500, f"the engine failed ({name})", code="engine_failed"))
        self._llm.restart()
        self._begin()
        _log.warning("the engine was restarted after %s", name)

    def _abandon_all(self, error: Exception) -> None:
        """Ends everything without a word to the engine, which cannot be trusted any more."""
        for one in [*self._running, *self._waiting.all()]:
            self._close(one, error, "error")
        self._running, self._waiting = [], WaitingQueue()
        self._rounds.clear()
        self._wake()

    def _wake(self) -> None:
        """Wakes all readers that have something new, once for each event loop."""
        loops: dict[Any, list[Outbox]] = {}
        for outbox in self._news:
            loops.setdefault(outbox.loop, []).append(outbox)
        self._news = set()
        for loop, outboxes in loops.items():
            with suppress(RuntimeError):  # the loop is closed: so is whoever read
                loop.call_soon_threadsafe(_wake_all, outboxes)

    def _full(self) -> ApiError:
        places = self._llm.config.max_num_seqs
        waiting = max(self._num_open - places, 0)
        seconds = min(max(round(self._service_s * (1 + waiting / places)), 1), 60)
        return ApiError(
            429,
            f"the queue is full ({self._num_open} texts run or wait): try again later",
            code="queue_full",
            headers={"retry-after": str(seconds)},
        )


def _wake_all(outboxes: list[Outbox]) -> None:
    for outbox in outboxes:
        outbox.wake()


def too_late() -> ApiError:
    """The error of a request whose time is up."""
    return ApiError(
        408,
        "the request's time is up: raise timeout or ask for fewer tokens",
        code="timeout",
        headers={"x-should-retry": "false"},
    )
