"""From a bound socket to the end of the process: uvicorn, signals, and the order of the end."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from draftwood.errors import ConfigError
from draftwood.serve.errors import ApiError
from draftwood.serve.recovery import Recovery

_INTERRUPTED = 130
_BACKLOG = 2048
_GRACE_S = 5.0  # for readers to take what there is, after the last text has ended


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host is {host!r}: it cannot be resolved") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on {host} port {port} ({reason}): choose another with --port, or 0 "
            "for a free one"
        ) from error
    return sock


def url_of(sock: socket.socket) -> str:
    """The address of a bound socket as a URL."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Ended(Protocol):
    """What generates, as its end sees it: see `Worker`."""

    @property
    def died(self) -> bool:
        """Whether it could not go on."""

    def fail_all(self, error: ApiError) -> None:
        """Ends everything that waits or runs."""

    def stop(self) -> None:
        """Ends everything for good."""


class Server:
    """Runs the application until a signal or the engine's death ends it.

    Args:
        app: the application.
        worker: the engine's thread, or whatever stands for it, started already.
        sock: where to listen.
        drain_timeout_s: how long running requests may go on after the signal.
        on_ready: called when requests are answered.
        recovery: goes on with what an earlier process left; None where nothing is kept.
    """

    def __init__(
        self,
        app: FastAPI,
        worker: Ended,
        sock: socket.socket,
        *,
        drain_timeout_s: float,
        on_ready: Callable[[], None] = lambda: None,
        recovery: Recovery | None = None,
    ) -> None:
        self.worker = worker
        self.recovery = recovery
        self._sock = sock
        self._drain_timeout_s = drain_timeout_s
        self._code = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        config = uvicorn.Config(
            app,
            http="h11",  # always there, and tested; "auto" would take what else is installed
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(drain_timeout_s + _GRACE_S),
            backlog=_BACKLOG,
        )
        self._uvicorn = _Uvicorn(config, on_ready)

    def run(self) -> int:
        """Serves; returns the exit code: 0 after SIGTERM, 130 after Ctrl-C, 1 without an engine."""
        _raise_file_limit()
        asyncio.run(self._serve())
        self.worker.stop()
        if self.recovery is not None:
            self.recovery.close()
        return self._code

    def stop(self, code: int) -> None:
        """Accepts nothing more and lets what runs come to its end; a second time, at once.

        On the event loop's thread.
        """
        if self._uvicorn.should_exit:
            self._cut()
            return
        self._code = code
        self._uvicorn.should_exit = True
        if code == 1:
            self._cut()
        elif self._loop is not None:
            self._loop.call_later(self._drain_timeout_s, self._cut)

    def ask_to_stop(self, code: int) -> None:
        """`stop`, from any thread; nothing when the end is already past."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.stop, code)

    def _cut(self) -> None:
        self.worker.fail_all(ApiError(503, "the server is shutting down", code="shutting_down"))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        signals = {signal.SIGTERM: 0, signal.SIGINT: _INTERRUPTED}
        with contextlib.suppress(RuntimeError, ValueError):  # not the main thread: no signals
            for number, code in signals.items():
                self._loop.add_signal_handler(number, self.stop, code)
        if self.worker.died:
            self.stop(1)
        if self.recovery is not None:
            self.recovery.begin()
        await self._uvicorn.serve(sockets=[self._sock])


class _Uvicorn(uvicorn.Server):
    """Without signal handlers of its own: they would end the process by the signal."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()


def _raise_file_limit() -> None:
    """A connection is a file: as many as the system lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
