"""Requests that outlive their connection, and the process that began them.

With checkpoints a request has a ticket: a file with all that its answer follows from, written
before anything of the answer is told. A client that lost its connection comes back with the
request's id and gets the rest; after a crash the next process goes on with every ticket whose
request had not ended, from the last checkpoint. All of it runs on the event loop; what the engine's
thread says of an ending is passed on to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from draftwood.engine.checkpoint import CheckpointStats, CheckpointWriter, SavedRequest
from draftwood.errors import ConfigError, DraftwoodError
from draftwood.llm import LLM
from draftwood.serve.asked import (
    body_of,
    fill,
    generations_of,
    in_use,
    kind_of,
    question_of,
    ticket_of,
    unknown,
)
from draftwood.serve.chat import reopen_chat
from draftwood.serve.completions import reopen_completion
from draftwood.serve.endings import ending_of
from draftwood.serve.errors import ApiError
from draftwood.serve.generation import Generation, Outbox, Piece, Teller
from draftwood.serve.held import Held, RecoveryCounts, RecoveryOptions, Whole
from draftwood.serve.replay import Position
from draftwood.serve.requests import ChatRequest, CompletionRequest, Sampling
from draftwood.serve.responder import Responder
from draftwood.serve.service import ENGINE_PREFIX, Answer, Caller, Service, Start
from draftwood.serve.tickets import Ticket, TicketFolder, file_name
from draftwood.serve.worker import Worker

_log = logging.getLogger("draftwood.serve")
_SWEEP_S = 0.25
_MOST_STARTS = 5  # of processes, for a request that gets no token in any of them
_SUSPENDED = frozenset({"shutting_down", "engine_dead"})  # errors after which a request goes on


class Recovery:
    """Keeps requests, and finds them again.

    Args:
        service: what requests are asked of.
        llm: the model; it has a checkpoint writer.
        worker: its engine's thread.
        options: how long.

    Raises:
        CheckpointError: what is kept is of another model or version.
        ConfigError: the folder cannot be used, or holds what is no server's.
    """

    def __init__(
        self, service: Service, llm: LLM, worker: Worker, options: RecoveryOptions
    ) -> None:
        writer = llm.checkpoints
        assert writer is not None, "recovery needs checkpoints"
        self._service = service
        self._llm = llm
        self._worker = worker
        self._writer: CheckpointWriter = writer
        self._options = options
        self._folder = TicketFolder(writer.folder / "requests")
        self._held: dict[tuple[str, str], Held] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.counts = RecoveryCounts()
        writer.keep_state()
        self._load()

    # --- the start ---------------------------------------------------------------------------

    def _load(self) -> None:
        """Finds what an earlier process left; what has to go on is made pending."""
        found = [(ticket, size) for ticket, size in self._folder.load()]
        found.sort(key=lambda item: (item[0].priority, item[0].created))
        initial: list[SavedRequest] = []
        for ticket, size in found:
            self._writer.maker.check(ticket.maker, str(self._writer.folder))
            held = self._held_of(ticket, size)
            self._held[held.key] = held
            if not held.finished:
                initial += self._take_up(held, ticket)
        wanted = {saved.request_id for saved in initial}
        strangers = [name for name in self._writer.pending if not name.startswith(ENGINE_PREFIX)]
        if strangers:
            raise ConfigError(
                f"the checkpoint in {self._writer.folder} is of a batch job: end it with "
                "`draftwood generate`, or name another folder"
            )
        for name in list(self._writer.pending):
            if name not in wanted:  # it was answered after the checkpoint
                self._writer.forget(name)
        self._writer.expect(initial)

    def _take_up(self, held: Held, ticket: Ticket) -> list[SavedRequest]:
        """The requests of a ticket as they began; none if it has ended too many processes."""
        found = [saved for i in range(len(ticket.prompts)) for saved in ticket.sequences(i)]
        states = [self._writer.pending.get(saved.request_id, saved) for saved in found]
        held.ticket = ticket.started(sum(len(saved.tokens) for saved in states))
        if held.ticket.num_starts <= _MOST_STARTS:
            return found
        _log.warning(
            "request %s is given up: %d processes have ended without a token of it",
            ticket.request_id,
            _MOST_STARTS,
        )
        self.counts.num_lost += 1
        self._drop(held)
        return []

    def _held_of(self, ticket: Ticket, size: int) -> Held:
        body = body_of(ticket)
        held = Held(
            self,
            (ticket.owner, ticket.request_id),
            question_of(ticket.kind, body),
            keeps=True,
            response_id=ticket.response_id,
            created=ticket.created,
            ticket=ticket,
        )
        held.resumed = True
        held.opened.set()
        held.written.set()
        if ticket.outputs is not None:
            held.finished, held.finished_s = True, ticket.finished_s
            held.num_bytes, held.ticket = size, None
        return held

    def begin(self) -> None:
        """Goes on with what had not ended. On the event loop, when it runs."""
        self._loop = asyncio.get_running_loop()
        now = time.monotonic()
        for held in self._held.values():
            if held.ticket is not None and not held.finished:
                held.generations = generations_of(held, held.ticket)
                held.left_s = now
                self._folder.put(held.ticket, lambda size: None)
                self._worker.resume(held.generations)
                self.counts.num_resumed += 1
        if self.counts.num_resumed:
            _log.info("%d requests go on from the checkpoint", self.counts.num_resumed)
        self._sweep()

    def close(self) -> None:
        """Writes what waits. From any thread."""
        self._folder.close()

    @property
    def stats(self) -> CheckpointStats:
        """Of the checkpoints."""
        return self._writer.stats

    def size(self) -> tuple[int, int]:
        """How many requests are kept, and bytes of answers among them. From any thread."""
        held = list(self._held.values())
        return len(held), sum(one.num_bytes for one in held)

    # --- asking ------------------------------------------------------------------------------

    async def ask(
        self, start: Start, body: Sampling, caller: Caller, last_event_id: str | None
    ) -> Responder:
        """The response to a request: a new one, or the one that the client's id already has.

        Raises:
            ApiError: the id is another request's, or the event that was had last is of none.
        """
        key = (caller.owner, caller.request_id)
        question = question_of(kind_of(body), body)
        while (held := self._held.get(key)) is not None:
            if held.question != question:
                raise self._refused(in_use(caller.request_id))
            await held.opened.wait()
            if not held.dropped:
                return await self._reopen(held, body, last_event_id)
        if last_event_id:
            raise self._refused(unknown(caller.request_id))
        held = self._held[key] = Held(self, key, question, keeps=caller.chose_id)
        try:
            responder = await start(self._service, body, replace(caller, held=held))
        except BaseException:
            self._drop(held)
            raise
        self._adopt(held, body, responder, caller)
        return responder

    async def again(self, caller: Caller, request_id: str, last_event_id: str | None) -> Responder:
        """The response to a request that was sent before.

        Raises:
            ApiError: there is none with this id, or it is another client's.
        """
        held = self._held.get((caller.owner, request_id))
        if held is not None:
            await held.opened.wait()
        if held is None or held.dropped:
            raise self._refused(unknown(request_id))
        body = body_of(await self._read_ticket(held))
        return await self._reopen(held, body, last_event_id)

    def cancel(self, caller: Caller, request_id: str) -> None:
        """Ends a request and forgets its answer.

        Raises:
            ApiError: there is none with this id, or it is another client's.
        """
        held = self._held.get((caller.owner, request_id))
        if held is None or not held.response_id:
            raise self._refused(unknown(request_id))
        if held.reader is not None:
            held.reader.fail(ApiError(409, "the request was deleted", code="request_deleted"))
            held.reader.wake()
        self._drop(held)

    def _adopt(self, held: Held, body: Sampling, responder: Responder, caller: Caller) -> None:
        """The engine has found it sound: from here on it is kept."""
        answer = responder.answer
        held.response_id, held.created = responder.id, responder.created
        held.generations, held.reader = answer.generations, answer.outbox
        held.ticket = ticket_of(held, body, caller, self._writer.maker)
        self._folder.put(held.ticket, lambda size: self.tell(held.written.set))
        held.opened.set()
        if any(one.error is not None for one in held.generations):
            self._drop(held)
        elif held.num_ended == len(held.generations):
            self._finish(held)

    async def _reopen(self, held: Held, body: Sampling, last_event_id: str | None) -> Responder:
        ticket = await self._read_ticket(held)
        have = Position.of(last_event_id, (body.n or 1) * len(ticket.prompts))
        outbox = Outbox(asyncio.get_running_loop(), 0)
        runs = ticket.outputs is None
        generations = held.generations if runs else fill(outbox, ticket)
        answer = Answer(self._service.worker, generations, outbox, held)
        responder: Responder
        if isinstance(body, ChatRequest):
            responder = await reopen_chat(self._service, body, answer)
        else:
            assert isinstance(body, CompletionRequest)
            responder = await reopen_completion(self._service, body, answer)
        responder.skip(have)
        # Nothing is waited for from here on: a reader that was noted is also seen to leave.
        if held.dropped:
            raise self._refused(unknown(held.key[1]))
        if runs and held.finished:
            return await self._reopen(held, body, last_event_id)
        if runs:
            self._take_over(held, outbox)
        self.counts.num_reconnects += 1
        return responder

    def _take_over(self, held: Held, outbox: Outbox) -> None:
        """The newest reader is told: the one before has probably lost its connection."""
        if held.reader is not None:
            held.reader.fail(
                ApiError(409, "another reader has taken over this request", code="taken_over")
            )
            held.reader.wake()
        held.reader = outbox
        self._worker.attach(held.generations, outbox)

    async def _read_ticket(self, held: Held) -> Ticket:
        ticket = held.ticket
        if ticket is None:
            ticket = await asyncio.to_thread(self._folder.read, _name(held))
        if ticket is None:
            self._drop(held)
            raise self._refused(unknown(held.key[1]))
        return ticket

    def _refused(self, error: ApiError) -> ApiError:
        self.counts.num_refused += 1
        return error

    # --- endings -----------------------------------------------------------------------------

    def left(self, held: Held, outbox: Outbox, *, complete: bool) -> bool:
        """See `Held.left`."""
        if held.ticket is None and not held.finished:
            return False  # it was never accepted
        held.complete |= complete
        if held.reader is not outbox:
            return True
        held.reader, held.left_s = None, time.monotonic()
        if not held.keeps:
            self._drop(held)
        return True

    def whole_of(self, one: Generation) -> Whole:
        """The outputs of a generation that has ended. On the engine's thread."""
        whole = Whole()
        for index, seq in enumerate(one.seqs, start=one.first_index):
            piece = Teller(index, seq).news() or Piece(index)
            piece.ending = ending_of(seq, self._llm.engine)
            whole.pieces[index] = piece
            if seq.prompt_logprobs:
                whole.prompt_logprobs[index] = seq.prompt_logprobs
        return whole

    def tell(self, call: Callable[[], None]) -> None:
        """Lets the event loop do something; nothing when it is past. From any thread."""
        with suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)

    def note_end(self, held: Held, whole: Whole, error: Exception | None) -> None:
        """A generation has ended, with all of its text or with an error."""
        if held.dropped:
            return
        if isinstance(error, ApiError) and error.code in _SUSPENDED:
            held.keeps = True  # it goes on in another process
            return
        if error is not None:
            # One of an earlier process that does not fit here: a deadline is no such error.
            self.counts.num_lost += held.resumed and isinstance(error, DraftwoodError)
            if held.response_id:
                self._drop(held)
            return
        held.whole.add(whole)
        held.num_ended += 1
        if held.ticket is not None and held.num_ended == len(held.generations):
            self._finish(held)

    def _finish(self, held: Held) -> None:
        """All of it has ended: the answer goes to the disk, if anybody may come back for it."""
        assert held.ticket is not None
        held.finished, held.finished_s = True, time.time()
        pieces = held.whole.pieces
        held.ticket = replace(
            held.ticket,
            outputs=tuple(pieces[index] for index in sorted(pieces)),
            prompt_logprobs=held.whole.prompt_logprobs,
            finished_s=held.finished_s,
        )
        if held.keeps:
            self._folder.put(
                held.ticket, lambda size: self.tell(lambda: self._note_kept(held, size))
            )

    def _note_kept(self, held: Held, size: int) -> None:
        """The answer is in its file, or could not be written and stays in memory."""
        if held.dropped:
            return
        # Where it could not be written, memory holds several times its text.
        held.num_bytes = size or sum(64 * len(one.text) for one in held.whole.pieces.values()) + 1
        self._worker.forget(held.generations)
        held.generations = []
        if size:
            held.ticket, held.whole = None, Whole()

    def _drop(self, held: Held) -> None:
        """Forgets a request, and ends it if it has not ended."""
        if held.dropped:
            return
        held.dropped = True
        held.opened.set()
        if self._held.get(held.key) is held:
            del self._held[held.key]
        if held.response_id:
            self._folder.remove(_name(held))
            self._worker.cancel(held.generations)
            self._worker.forget(held.generations)

    def _sweep(self) -> None:
        """Lets go of what nobody came back for, again and again."""
        assert self._loop is not None
        self._loop.call_later(_SWEEP_S, self._sweep)
        now, wall = time.monotonic(), time.time()
        for held in list(self._held.values()):
            alone = held.reader is None and held.opened.is_set()
            if held.finished:
                late = alone and wall - held.finished_s > self._options.keep_s
            else:
                late = alone and now - held.left_s > self._options.grace_s
            if late:
                self.counts.num_expired += not (held.finished and held.complete)
                self._drop(held)
        self._keep_budget()

    def _keep_budget(self) -> None:
        kept = sorted(
            (held for held in self._held.values() if held.num_bytes),
            key=lambda held: held.finished_s,
        )
        total = sum(held.num_bytes for held in kept)
        for held in kept:
            if total <= self._options.keep_bytes:
                break
            total -= held.num_bytes
            self._drop(held)


def _name(held: Held) -> str:
    return file_name(*held.key)
