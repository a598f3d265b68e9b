"""The front's engine: as many replicas as there are, behind what `Worker` offers to the routes.

Each prompt is driven by a task on the event loop. It asks the router for a replica, passes on what
comes, and begins again elsewhere if the replica is lost. The reader notices a pause, no more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from draftwood.deploy.ray.messages import Accepted, Job, Message, Refusal, Told
from draftwood.deploy.ray.progress import Progress
from draftwood.errors import CapacityError
from draftwood.sampling import SamplingParams
from draftwood.serve.errors import ApiError, too_late
from draftwood.serve.generation import Generation
from draftwood.serve.router import Route, Router

_log = logging.getLogger("draftwood.serve")
_RETRIED = ("engine_failed", "engine_dead", "shutting_down")  # refusals that another may not give


class ReplicaLostError(Exception):
    """A replica is gone, or cannot be reached. What it ran can run elsewhere."""


class Replicas(Protocol):
    """Replicas as the fleet sees them."""

    def generate(self, job: Job) -> AsyncGenerator[Message]:
        """Runs a job on the replica that it names.

        Raises:
            ReplicaLostError: it is lost.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """What a fleet takes on.

    Attributes:
        per_replica: most texts that run or wait on one replica.
        max_tries: replicas that a request is given to before it fails.
        patience_s: how long a request waits for any replica to be there.
    """

    per_replica: int = 144
    max_tries: int = 5
    patience_s: float = 60.0


class Fleet:
    """Takes requests from the routes and gives them to replicas. On one event loop.

    Args:
        replicas: who runs them.
        router: chooses.
        limits: see there.

    Attributes:
        num_open: outputs accepted and not ended.
        num_retries: how often a request was begun again elsewhere.
        died: never: replicas die and come back.
    """

    died = False

    def __init__(
        self, replicas: Replicas, router: Router, limits: FleetLimits | None = None
    ) -> None:
        self.num_open = 0
        self.num_retries = 0
        self._replicas = replicas
        self._router = router
        self._limits = limits or FleetLimits()
        self._names: frozenset[str] = frozenset()
        self._changed = asyncio.Event()
        self._tasks: dict[Generation, asyncio.Task[None]] = {}
        self._stopping = False

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return not self._stopping

    @property
    def names(self) -> frozenset[str]:
        """Of the replicas that run."""
        return self._names

    @property
    def router(self) -> Router:
        """Who chooses."""
        return self._router

    def members(self, names: frozenset[str]) -> None:
        """These are the replicas now."""
        for name in self._names - names:
            self._router.remove(name)
        for name in names:
            self._router.add(name)
        self._names = names
        self._changed.set()

    def submit(self, generations: Sequence[Generation]) -> None:
        """Takes all of a request's prompts, or none; on the event loop.

        Raises:
            ApiError: there is no room, more is asked at once than there could ever be, or the
                server is shutting down.
        """
        wanted = sum(one.params.n for one in generations)
        most = self._limits.per_replica * max(len(self._names), 1)
        if any(one.params.n > self._limits.per_replica for one in generations):
            raise ApiError(
                400,
                f"this request asks for {wanted} texts: this server takes "
                f"{self._limits.per_replica} of a prompt at once",
                param="n",
            )
        if self._stopping:
            raise _shutting_down()
        if self.num_open + wanted > most:
            raise ApiError(
                429,
                f"the queue is full ({self.num_open} texts run or wait): try again later",
                code="queue_full",
                headers={"retry-after": "1"},
            )
        self.num_open += wanted
        for one in generations:
            # Whatever replica runs it, and however often: the same noise, so the same text.
            one.params = _seeded(one)
            task = self._tasks[one] = asyncio.ensure_future(self._drive(one))
            # Not in the task itself: one that is cancelled at once never runs.
            task.add_done_callback(lambda _, one=one: self._ended(one))  # type: ignore[misc]

    def cancel(self, generations: Iterable[Generation]) -> None:
        """Ends generations that nobody waits for."""
        for one in generations:
            task = self._tasks.get(one)
            if task is not None:
                task.cancel()

    def fail_all(self, error: ApiError) -> None:
        """Ends everything that waits or runs."""
        for one, task in list(self._tasks.items()):
            one.outbox.fail(error)
            one.outbox.wake()
            task.cancel()

    def stop(self) -> None:
        """Takes nothing more."""
        self._stopping = True

    async def _drive(self, one: Generation) -> None:
        """Brings one prompt to its end, whatever that is."""
        try:
            left = None if one.deadline is None else one.deadline - monotonic()
            async with asyncio.timeout(left):
                await self._run(one)
        except TimeoutError:
            one.outbox.fail(too_late())
        except ApiError as error:
            one.outbox.fail(error)
        except Exception:
            _log.exception("a request failed in the front")
            one.outbox.fail(ApiError(500, "the server failed; its log says why"))

    def _ended(self, one: Generation) -> None:
        """Lets go of a prompt, whatever its end was."""
        one.ended = True
        self.num_open -= one.params.n
        self._tasks.pop(one, None)
        one.outbox.wake()

    async def _run(self, one: Generation) -> None:
        """Tries one replica after the other."""
        progress, lost = Progress(), set[str]()
        salt = (one.params.cache_salt or "").encode()
        prompt = self._router.prompt(one.prompt_ids, salt)
        accepted = False
        for _ in range(self._limits.max_tries):
            route = await self._route(lambda: self._router.choose(prompt, lost))
            ticket = self._router.send(route)
            try:
                async with aclosing(self._replicas.generate(_job(one, route))) as messages:
                    async for message in messages:
                        if isinstance(message, Accepted) and not accepted:
                            accepted = True
                            one.outbox.accept()
                            one.outbox.wake()
                        elif isinstance(message, Told):
                            self._router.prefilled(ticket)
                            _pass_on(one, progress, message)
                        elif isinstance(message, Refusal):
                            raise _refused(message)
                if progress.num_outputs_ended == one.params.n:
                    return
                raise ReplicaLostError("its stream ended before the text did")
            except ReplicaLostError as error:
                _log.warning(
                    "a request begins again elsewhere: replica %s: %s", route.replica, error
                )
                lost.add(route.replica)
                self.num_retries += 1
                progress.again()
            finally:
                self._router.done(ticket)
        raise ApiError(503, "every replica that ran this request was lost", code="replicas_lost")

    async def _route(self, choose: Callable[[], Route]) -> Route:
        """A replica, as soon as there is one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.patience_s):
                while True:
                    self._changed.clear()
                    try:
                        return choose()
                    except CapacityError:
                        await self._changed.wait()
        raise ApiError(503, "no replica is ready: try again later", code="no_replica")


def _pass_on(one: Generation, progress: Progress, told: Told) -> None:
    """Gives the reader what is new."""
    one.outbox.prompt_logprobs.update(told.prompt_logprobs)
    fresh = [piece for piece in map(progress.fresh, told.pieces) if piece is not None]
    for piece in fresh:
        one.outbox.put(piece)
    if fresh:
        for record in told.rounds:
            one.outbox.put_round(record)
        one.outbox.wake()


def _job(one: Generation, route: Route) -> Job:
    return Job(
        replica=route.replica,
        id=f"{one.id}-{secrets.token_hex(4)}",  # a try that was given up may still be there
        prompt_ids=tuple(one.prompt_ids),
        params=one.params,
        first_index=one.first_index,
        priority=one.priority,
        client=one.client,
        wants_rounds=one.wants_rounds,
        seconds=None if one.deadline is None else max(one.deadline - monotonic(), 0.0),
    )


def _seeded(one: Generation) -> SamplingParams:
    params = one.params
    return params if params.seed is not None else params.but(seed=secrets.randbits(63))


def _refused(refusal: Refusal) -> Exception:
    """What to raise for a refusal: another replica may do better, or none can."""
    if refusal.code in _RETRIED:
        return ReplicaLostError(refusal.message)
    return refusal.error


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
