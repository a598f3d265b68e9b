"""A replica: an engine in a thread, as `draftwood serve` has one, behind an actor's methods."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from time import monotonic

from draftwood.cli.loading import quiet
from draftwood.config import EngineConfig
from draftwood.deploy.ray.draft_actor import RayCall
from draftwood.deploy.ray.messages import (
    Accepted,
    Addressed,
    Facts,
    Job,
    Message,
    Refusal,
    Status,
    Told,
)
from draftwood.draft.base import Drafter
from draftwood.draft.fused import FusedDrafter
from draftwood.draft.remote import Link, RemoteDrafter
from draftwood.errors import DraftwoodError
from draftwood.llm import LLM
from draftwood.serve.generation import Generation, Outbox
from draftwood.serve.metrics import Metrics
from draftwood.serve.service import Answer
from draftwood.serve.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """What a replica loads.

    Attributes:
        model, device, dtype, quantization, max_model_len, config: see `LLM`.
        draft, drafter: the same; with draft actors, `draft` is theirs and None here.
        draft_actors: their names; a replica uses one of them.
        namespace: where they are known.
        deadline_s: the most seconds that a round waits for a draft actor.
        name: what clients call the model.
        max_queue: most texts that wait beside those that run.
    """

    model: str
    draft: str | None = None
    drafter: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    max_model_len: int | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    draft_actors: tuple[str, ...] = ()
    namespace: str = ""
    deadline_s: float = 0.1
    name: str = "model"
    max_queue: int = 128


class Replica:
    """Runs jobs.

    Args:
        settings: what to load. What is wrong with it is told by `about`.
        number: of this replica, to share out draft actors; None takes the process's.
    """

    def __init__(self, settings: ReplicaSettings, number: int | None = None) -> None:
        quiet()
        self._facts = Facts()
        self._worker: Worker | None = None
        self._remote: RemoteDrafter | None = None
        self._settings = settings
        try:
            self._open(os.getpid() if number is None else number)
        except DraftwoodError as error:
            self._facts = Facts(problem=str(error), kind=type(error).__name__)

    def _open(self, number: int) -> None:
        given = self._settings
        self._llm = LLM(
            given.model,
            draft=given.draft,
            drafter=self._drafter(number) or given.drafter,
            device=given.device,
            dtype=given.dtype,
            quantization=given.quantization,
            max_model_len=given.max_model_len,
            config=given.config,
        )
        self._metrics = Metrics(given.name)
        self._worker = Worker(self._llm, max_queue=given.max_queue, watcher=self._metrics)
        self._worker.start()
        spec, engine = self._llm.model.spec, self._llm.engine
        self._facts = Facts(
            spec, block_size=self._llm.config.block_size, drafter=engine.drafter.name
        )

    def _drafter(self, number: int) -> Drafter | None:
        """One that asks a draft actor, if there is any."""
        names = self._settings.draft_actors
        if not names:
            return None
        call = RayCall(names[number % len(names)], self._settings.namespace)
        self._remote = RemoteDrafter(
            Link(call), self._settings.deadline_s, prefix=f"{os.uname().nodename}-{os.getpid()}-"
        )
        return self._remote if self._settings.drafter == "model" else FusedDrafter(self._remote)

    async def about(self, to: Addressed | None = None) -> Facts:
        """What it has loaded, or why it could not."""
        return self._facts

    async def pid(self, to: Addressed | None = None) -> int:
        """Of its process."""
        return os.getpid()

    async def status(self, to: Addressed) -> Status:
        """How it fares."""
        assert self._worker is not None
        remote = self._remote
        drafts = (
            {"hit": remote.num_hits, "waited": remote.num_waited, "missed": remote.num_missed}
            if remote is not None
            else {}
        )
        unread = sum(max(seq.num_missing - 1, 0) for seq in self._llm.engine.unfinished)
        return Status(self._worker.num_open, unread, self._metrics.render()[0], drafts)

    async def generate(self, job: Job) -> AsyncGenerator[Message]:
        """Runs a job; its text in pieces. When nobody reads it any more, it ends."""
        try:
            assert self._worker is not None, self._facts.problem
            async for message in self._messages(self._worker, job):
                yield message
        except Exception as error:
            yield Refusal.of(error)

    async def _messages(self, worker: Worker, job: Job) -> AsyncGenerator[Message]:
        outbox = Outbox(asyncio.get_running_loop())
        generation = Generation(
            id=job.id,
            prompt_ids=job.prompt_ids,
            params=job.params,
            outbox=outbox,
            first_index=job.first_index,
            priority=job.priority,
            client=job.client,
            deadline=None if job.seconds is None else monotonic() + job.seconds,
            wants_rounds=job.wants_rounds,
        )
        worker.submit([generation])
        answer = Answer(worker, [generation], outbox)
        await answer.accepted()
        yield Accepted()
        told: set[int] = set()
        async for news in answer.news():
            fresh = {i: known for i, known in outbox.prompt_logprobs.items() if i not in told}
            told.update(fresh)
            yield Told(news.pieces, news.rounds, fresh)

    def check_health(self) -> None:
        """Raises if the engine's thread has died: Serve then starts another replica."""
        if self._worker is not None and self._worker.died:
            raise RuntimeError("the engine cannot go on")

    def __del__(self) -> None:
        """Ends the engine's thread; Serve calls it before it ends the process."""
        if self._remote is not None:
            self._remote.close()
        if self._worker is not None:
            self._worker.stop()
