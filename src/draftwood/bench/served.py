"""A server of our own for as long as a measurement takes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from draftwood.errors import ConfigError

_READY = " at http"


@contextmanager
def served(model: str, options: Sequence[str]) -> Iterator[str]:
    """Starts `draftwood serve` in a process of its own; the URL. Ends it afterwards.

    Raises:
        ConfigError: it did not start; the message is its own.
    """
    command = [sys.executable, "-m", "draftwood.cli", "serve", model, "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            if _READY not in line:
                child.wait()
                log.seek(0)
                last = (log.read().strip().splitlines() or ["the server did not start"])[-1]
                raise ConfigError(last.removeprefix("error: "))
            yield "http" + line.strip().partition(_READY)[2]
        finally:
            _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(60)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    assert child.stdout is not None
    child.stdout.close()
