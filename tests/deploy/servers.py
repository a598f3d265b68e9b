"""Others' servers, in the environment that `make test` makes for them (.venv-servers)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.services import SERVICES

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("DRAFTWOOD_SERVERS") or ROOT / ".venv-servers")


def need_server(program: str) -> str:
    """Where a program of that environment is; skips, or fails on CI, where it is not."""
    path = FOLDER / "bin" / program
    if not path.exists():
        reason = f"no {program} in {FOLDER.name}: run  make {FOLDER.name}/.made"
        if os.environ.get(SERVICES):
            pytest.fail(reason)
        pytest.skip(reason)
    return str(path)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def call(url: str, body: dict[str, Any] | None = None) -> str:
    """GET, or POST of JSON."""
    with opened(url, body) as response:
        return str(response.read().decode())


def opened(url: str, body: dict[str, Any] | None = None) -> Any:
    """The answer, to be read piece by piece."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


class Process:
    """A server with its children.

    Args:
        command: its command line.
        folder: where it runs, and its output is in `log`.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        self.log = folder / "log"
        paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {"OMP_NUM_THREADS": "1", "LOG_LOCATION": str(folder / "logs")}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that children end with it
                env=os.environ | more | {"PYTHONPATH": os.pathsep.join(paths)},
            )

    def wait(self, ready: Callable[[], bool], timeout_s: float = 90.0) -> None:
        """Waits until it is ready; a refused connection is not yet."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if ready():
                    return
            except (urllib.error.URLError, ConnectionError, ValueError):
                pass
            time.sleep(0.3)
        raise AssertionError(self.log.read_text(errors="replace")[-3000:])

    def end(self) -> None:
        """Ends it with its children."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
