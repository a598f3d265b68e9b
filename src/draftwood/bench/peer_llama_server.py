"""A `llama-server` of our own: started, asked over HTTP, and ended whatever happens."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import IO, Any, NoReturn

from draftwood.errors import ModelError

_HOST = "127.0.0.1"
_LOAD_S = 600
_ANSWER_S = 3600
_LEAVE_S = 10


class LlamaServer:
    """A llama-server of our own, from entering a `with` block to leaving it.

    Args:
        command: program and options; host and port are added.
        environment: variables beside ours.

    Raises:
        ModelError: entering: it ends or does not become ready; later: it does not answer.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._environment = {**os.environ, **environment}
        self._port = _free_port()
        self._command = [*command, "--host", _HOST, "--port", str(self._port)]
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> LlamaServer:
        self._log = tempfile.TemporaryFile()
        try:
            # Its own session: Ctrl-C is for us to handle, the server leaves when we are done.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )
            self._wait_until_ready()
        except OSError as error:
            self.stop()
            raise ModelError(f"llama-server does not start: {error}") from error
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the process, by force if it takes too long or we are in a hurry."""
        process, self._process = self._process, None
        try:
            if process is not None:
                _end(process)
        finally:
            if self._log is not None:
                self._log.close()
                self._log = None

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        return self._ask("POST", path, json.dumps(body), _ANSWER_S)

    def cpu_s(self) -> float:
        """Seconds its threads worked so far; 0 where it is not known."""
        if self._process is None:
            return 0.0
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
            fields = text.rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return 0.0

    def _wait_until_ready(self) -> None:
        deadline = monotonic() + _LOAD_S
        while monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise ModelError(f"llama-server ended at its start: {self._last_words()}")
            with suppress(ModelError):
                self._ask("GET", "/health", None, 10)
                return
            sleep(0.1)
        raise ModelError(f"llama-server was not ready after {_LOAD_S} s: {self._last_words()}")

    def _ask(self, method: str, path: str, body: str | None, seconds: float) -> dict[str, Any]:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=seconds)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            answer = json.loads(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            words = self._last_words()
            raise ModelError(f"llama-server does not answer: {error}; it said: {words}") from error
        finally:
            connection.close()
        if response.status != 200 or not isinstance(answer, dict):
            raise ModelError(f"llama-server answered {response.status}: {_one_line(text)}")
        return answer

    def _last_words(self) -> str:
        """The last line that it logged."""
        if self._log is None:
            return ""
        # Not through `seek`: the process writes at the same offset.
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), 4096, max(size - 4096, 0))
        lines = [line for line in tail.splitlines() if line.strip()]
        return _one_line(lines[-1]) if lines else ""


def _one_line(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())[:300]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_LEAVE_S)
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Lets `finally` run when the process is told to end: servers must not outlive it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {number: signal.signal(number, _leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
