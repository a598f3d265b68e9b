"""Replicas as an application of Ray Serve, and draft actors beside them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic, sleep
from typing import Any

from draftwood.deploy.ray.cluster import NAMESPACE, Need, ray, serve
from draftwood.deploy.ray.draft_actor import DraftActor, DraftSettings
from draftwood.deploy.ray.fleet import ReplicaLostError
from draftwood.deploy.ray.messages import Addressed, Facts, Job, Message, Status
from draftwood.deploy.ray.replica import Replica, ReplicaSettings
from draftwood.errors import (
    CapacityError,
    ConfigError,
    DraftwoodError,
    ModelError,
    PromptError,
    StoreError,
    first_line,
)

_START_S = 600.0  # for weights to be read
_POLL_S = 0.1
_UPSCALE_S, _DOWNSCALE_S = 5.0, 60.0
_LOOK_BACK_S = 10.5  # Serve wants more than 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many of what, and what each takes.

    Attributes:
        replicas, max_replicas: of the target, least and most.
        draft_actors: how many share the drafting.
        replica, draft: what one takes of the cluster.
        drain_s: how long a replica that is to go may bring its requests to their end.
        upscale_s, downscale_s: how long load must be high, or low, before replicas come or go.
        name: of the application.
    """

    replicas: int = 1
    max_replicas: int = 1
    draft_actors: int = 0
    replica: Need = field(default_factory=lambda: Need("replica", 1))
    draft: Need = field(default_factory=lambda: Need("draft actor", 1))
    drain_s: float = 30.0
    upscale_s: float = _UPSCALE_S
    downscale_s: float = _DOWNSCALE_S
    name: str = "draftwood"

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}: it must be at least 1")
        if self.max_replicas < self.replicas:
            raise ConfigError(
                f"max-replicas is {self.max_replicas}: it must be at least replicas "
                f"({self.replicas})"
            )
        if self.draft_actors < 0:
            raise ConfigError(f"draft-actors is {self.draft_actors}: it must be at least 0")


class Application:
    """Runs replicas and draft actors.

    Args:
        settings: of the replicas; names of draft actors are filled in.
        draft: of the draft actors; needed if there are any.
        layout: how many.

    Attributes:
        facts: what the first replica said of itself.
        settings: of the replicas.
        actors: handles of the draft actors.
    """

    def __init__(
        self, settings: ReplicaSettings, draft: DraftSettings | None, layout: Layout
    ) -> None:
        self.facts = Facts()
        self._layout = layout
        self.actors: list[Any] = []
        self._names = tuple(f"{layout.name}-draft-{i}" for i in range(layout.draft_actors))
        self._draft = draft
        self.settings = replace(settings, draft_actors=self._names, namespace=NAMESPACE)
        self._handle: Any = None

    @property
    def name(self) -> str:
        """Of the application in Serve."""
        return self._layout.name

    def start(self, wait_s: float = _START_S) -> None:
        """Starts everything and waits until it is ready.

        Raises:
            DraftwoodError: what a replica or draft actor could not do.
            CapacityError: not all came up in time.
        """
        until = monotonic() + wait_s
        self._start_drafts()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(
            proxy_location="Disabled", logging_config=serve.schema.LoggingConfig(log_level="ERROR")
        )
        target = serve.RunTarget(self._deployment(), name=self.name, route_prefix=None)
        [self._handle] = serve.run_many([target], wait_for_applications_running=False)
        for actor in self.actors:
            _raise_problem(_get(actor.about.remote(), until, "draft actors"))
        self._wait(until)

    def close(self) -> None:
        """Ends all of it."""
        with suppress(Exception):
            serve.delete(self.name)  # only ours: a cluster's Serve may have others
        for actor in self.actors:
            with suppress(Exception):
                ray.kill(actor)
        self.actors.clear()

    # What the fleet needs.

    async def generate(self, job: Job) -> AsyncGenerator[Message]:
        """See `Replicas`."""
        stream = self._handle.options(method_name="generate", stream=True).remote(job)
        done = False
        try:
            async for message in stream:
                yield message
            done = True
        except (ray.exceptions.RayError, serve.exceptions.RayServeException) as error:
            done = True
            raise ReplicaLostError(first_line(error)) from error
        finally:
            if not done:
                stream.cancel()

    async def status(self, name: str) -> Status:
        """How a replica fares; waits while there is none of that name."""
        status: Status = await self._call("status", name)
        return status

    async def pid(self, name: str) -> int:
        """Of a replica's process."""
        pid: int = await self._call("pid", name)
        return pid

    async def _call(self, method: str, name: str) -> Any:
        response = getattr(self._handle, method).remote(Addressed(name, only=True))
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise

    # How it starts.

    def _start_drafts(self) -> None:
        if not self._names:
            return
        assert self._draft is not None
        options = {"max_restarts": -1, "max_task_retries": 0, **self._layout.draft.options}
        make = ray.remote(DraftActor)
        self.actors = [
            make.options(name=name, namespace=NAMESPACE, **options).remote(self._draft)
            for name in self._names
        ]

    def _deployment(self) -> Any:
        layout = self._layout
        per_replica = self.settings.config.max_num_seqs + self.settings.max_queue
        scaling: dict[str, Any] = {"num_replicas": layout.replicas}
        if layout.max_replicas > layout.replicas:
            scaling = {
                "autoscaling_config": {
                    "min_replicas": layout.replicas,
                    "max_replicas": layout.max_replicas,
                    # Where all of them run and none waits, another replica pays.
                    "target_ongoing_requests": max(self.settings.config.max_num_seqs / 2, 1),
                    "upscale_delay_s": layout.upscale_s,
                    "downscale_delay_s": layout.downscale_s,
                    "look_back_period_s": max(layout.upscale_s, _LOOK_BACK_S),
                }
            }
        deployment = serve.deployment(
            Replica,
            name=f"{layout.name}-replica",
            # Beyond its own limit a replica refuses with a reason; Serve would let calls wait.
            max_ongoing_requests=2 * per_replica,
            ray_actor_options=layout.replica.options,
            graceful_shutdown_timeout_s=math.ceil(layout.drain_s),
            graceful_shutdown_wait_loop_s=0.2,
            health_check_period_s=2.0,
            health_check_timeout_s=30.0,
            request_router_config=serve.config.RequestRouterConfig(
                request_router_class="draftwood.deploy.ray.pinned.PinnedRouter"
            ),
            **scaling,
        )
        return deployment.bind(self.settings)

    def _wait(self, until: float) -> None:
        """Until the first replica has said what it is, and all run."""
        answer = self._handle.about.remote()
        while True:
            with suppress(TimeoutError):
                self.facts = answer.result(timeout_s=_POLL_S)
                break
            self._check(until)
        _raise_problem(self.facts)
        while self._status() != "RUNNING":
            self._check(until)
            sleep(_POLL_S)

    def _status(self) -> str:
        application = serve.status().applications.get(self.name)
        return "" if application is None else str(application.status.value)

    def _check(self, until: float) -> None:
        application = serve.status().applications.get(self.name)
        failed = application is not None and application.status.value in (
            "DEPLOY_FAILED",
            "UNHEALTHY",
        )
        if failed or monotonic() > until:
            reasons = (
                [one.message for one in application.deployments.values()] if application else []
            )
            said = " ".join(" ".join(reasons).split())[:300] or "no reason was given"
            raise CapacityError(f"the replicas did not come up: {said}")


def _get(ref: Any, until: float, what: str) -> Any:
    try:
        return ray.get(ref, timeout=max(until - monotonic(), 0.0))
    except ray.exceptions.RayError as error:
        raise CapacityError(f"the {what} did not come up: {first_line(error)}") from error


def _raise_problem(facts: Facts) -> None:
    """Raises what went wrong elsewhere as if it had here."""
    if facts.spec is None:
        kinds: dict[str, type[DraftwoodError]] = {
            one.__name__: one for one in (PromptError, ModelError, CapacityError, StoreError)
        }
        raise kinds.get(facts.kind, ConfigError)(facts.problem)
