"""`draftwood serve --ray`: a cluster, replicas on it, and OpenAI's routes in front of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from draftwood.deploy.ray import members
from draftwood.deploy.ray.application import Application, Layout
from draftwood.deploy.ray.cluster import Cluster
from draftwood.deploy.ray.draft_actor import DraftSettings
from draftwood.deploy.ray.fleet import Fleet, FleetLimits
from draftwood.deploy.ray.replica import ReplicaSettings
from draftwood.deploy.ray.watch import Watch
from draftwood.models.base import ModelSpec
from draftwood.models.sources import resolve
from draftwood.serve.app import AppSettings, make_app
from draftwood.serve.page import mount_page
from draftwood.serve.router import Costs, Router
from draftwood.serve.run import Server
from draftwood.serve.service import Service
from draftwood.serve.start import ServeOptions
from draftwood.text import Tokenizer

_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class _Model:
    """A model that is elsewhere."""

    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class _Front:
    """What the routes need of it, here: see `Served`."""

    model: _Model
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that `draftwood serve --ray` was told.

    Attributes:
        settings: of the replicas.
        draft: of the draft actors, if there are any.
        layout: how many of them.
        options: of the server in front.
        address: of a Ray cluster; None starts one on this machine.
    """

    settings: ReplicaSettings
    draft: DraftSettings | None
    layout: Layout
    options: ServeOptions
    address: str | None = None


def serve_on_ray(plan: Plan, sock: socket.socket, on_ready: Callable[[], None]) -> int:
    """Serves until a signal comes; nothing is left running afterwards.

    Args:
        plan: what.
        sock: where to listen, bound.
        on_ready: called when requests are answered.

    Returns:
        The exit code: 0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        DraftwoodError: the cluster, a replica or a draft actor cannot be had.
    """
    tokenizer = Tokenizer.load(resolve(plan.settings.model).path)
    layout = plan.layout
    needs = [replace(layout.replica, count=layout.replicas)]
    if layout.draft_actors:
        needs.append(replace(layout.draft, count=layout.draft_actors))
    most = layout.max_replicas * layout.replica.cpus + layout.draft_actors * layout.draft.cpus
    with ExitStack() as stack:
        stack.enter_context(_terminable())
        cluster = stack.enter_context(Cluster(plan.address, max(most, os.cpu_count() or 1)))
        cluster.check(needs)
        application = Application(plan.settings, plan.draft, layout)
        stack.callback(application.close)
        application.start()
        return run_front(application, tokenizer, plan.options, sock, on_ready)


def run_front(
    application: Application,
    tokenizer: Tokenizer,
    options: ServeOptions,
    sock: socket.socket,
    on_ready: Callable[[], None],
) -> int:
    """The routes, before an application that is ready; see `serve_on_ray`."""
    server, _ = make_front(application, tokenizer, options, sock, on_ready)
    return server.run()


def make_front(
    application: Application,
    tokenizer: Tokenizer,
    options: ServeOptions,
    sock: socket.socket,
    on_ready: Callable[[], None] = lambda: None,
) -> tuple[Server, Fleet]:
    """A server whose engine is an application's replicas."""
    facts, config = application.facts, application.settings.config
    assert facts.spec is not None, "the application has not started"
    router = Router(
        Costs(slots=config.max_num_seqs),
        facts.block_size,
        f"{facts.spec.kv_identity}:{facts.block_size}".encode(),
    )
    limits = FleetLimits(per_replica=config.max_num_seqs + options.max_queue)
    fleet = Fleet(application, router, limits)
    watch = Watch(fleet, application.status)
    service = Service(
        _Front(_Model(facts.spec), tokenizer), fleet, options.names, options.timeout_s
    )
    app = make_app(
        service,
        AppSettings(
            keys=options.keys,
            hosts=options.hosts,
            cors=options.cors,
            max_body=options.max_body,
            render_metrics=watch.render,
            extend=mount_page,
        ),
    )
    tasks: list[asyncio.Task[None]] = []

    def ready() -> None:
        loop = asyncio.get_running_loop()

        def heard(names: frozenset[str]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(fleet.members, names)

        members.listen(application.name, heard)
        tasks.append(loop.create_task(watch.run()))
        on_ready()

    drain_s = options.drain_timeout_s
    return Server(app, fleet, sock, drain_timeout_s=drain_s, on_ready=ready), fleet


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM inside ends in SystemExit, so that what was started is ended too."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(_TERMINATED)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
