"""Puts a server together."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from draftwood.llm import LLM
from draftwood.serve.access import ApiKeys
from draftwood.serve.app import AppSettings, make_app
from draftwood.serve.held import RecoveryOptions
from draftwood.serve.metrics import Metrics
from draftwood.serve.page import mount_page
from draftwood.serve.recovery import Recovery
from draftwood.serve.recovery_gauges import RecoveryCollector
from draftwood.serve.run import Server
from draftwood.serve.service import Service
from draftwood.serve.tracing import Tracing
from draftwood.serve.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What a server allows.

    Attributes:
        names: what clients may call the model.
        keys, hosts, cors, max_body: see `AppSettings`.
        max_queue: most outputs that wait beside those that run.
        timeout_s: the most a request may take unless it says so itself; None for no limit.
        drain_timeout_s: how long running requests may go on after SIGTERM.
        tracing: makes spans of requests; None for none. Closing it is the caller's.
        recovery: how long requests are kept, where the model has checkpoints.
    """

    names: tuple[str, ...]
    keys: ApiKeys
    hosts: frozenset[str] | None = None
    cors: tuple[str, ...] = ()
    max_body: int = 8 << 20
    max_queue: int = 128
    timeout_s: float | None = None
    drain_timeout_s: float = 30.0
    tracing: Tracing | None = None
    recovery: RecoveryOptions = field(default_factory=RecoveryOptions)


def make_server(
    llm: LLM,
    options: ServeOptions,
    sock: socket.socket,
    on_ready: Callable[[], None] = lambda: None,
) -> Server:
    """A server for a loaded model; its engine's thread runs from here on.

    Raises:
        CheckpointError: what its checkpoint keeps is of another model or version.
    """
    watcher = Metrics(options.names[0])
    worker = Worker(llm, max_queue=options.max_queue, watcher=watcher)
    service = Service(llm, worker, options.names, options.timeout_s)
    if llm.checkpoints is not None:
        service.recovery = Recovery(service, llm, worker, options.recovery)
        watcher.add(RecoveryCollector(options.names[0], service.recovery))
    settings = AppSettings(
        keys=options.keys,
        hosts=options.hosts,
        cors=options.cors,
        max_body=options.max_body,
        render_metrics=watcher.render,
        extend=mount_page,
        tracing=options.tracing,
    )
    app = make_app(service, settings)
    server = Server(
        app,
        worker,
        sock,
        drain_timeout_s=options.drain_timeout_s,
        on_ready=on_ready,
        recovery=service.recovery,
    )
    worker.start(lambda: server.ask_to_stop(1))
    return server
