"""A real Redis server on a socket of its own; the fixtures are in conftest.py."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.services import need

SERVER = "redis-server"


@dataclass(slots=True)
class Redis:
    """A server that tests may kill and start again.

    Attributes:
        folder: of its socket, which must have a short path.
        options: of its command line.
    """

    folder: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """For a client."""
        return f"unix://{self.folder / 's'}?db=0"

    def start(self) -> Redis:
        """Starts it and waits until it answers."""
        socket = self.folder / "s"
        # fmt: off
        command = [
            SERVER, "--port", "0", "--unixsocket", str(socket), "--dir", str(self.folder),
            "--save", "", "--appendonly", "no", *self.options,
        ]
        # fmt: on
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + 10
        while not socket.exists():
            assert self.process.poll() is None, "redis-server has ended"
            assert time.monotonic() < end, "redis-server does not start"
            time.sleep(0.01)
        return self

    def kill(self) -> None:
        """Ends it as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            (self.folder / "s").unlink(missing_ok=True)

    def client(self) -> Any:
        """A client that sees everything."""
        import redis

        return redis.Redis.from_url(self.url)


def need_redis() -> None:
    """Skips where there is no redis-server, or fails where services are required."""
    need(SERVER)
