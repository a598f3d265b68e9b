"""`draftwood serve` as a process: the line that says it is ready, signals, mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from draftwood.cli.app import run
from draftwood.serve.run import url_of


@pytest.fixture(scope="module")
def process(tiny_folder: Path) -> Generator[tuple[subprocess.Popen[str], int]]:
    """A server process and its port; the last test of this module ends it."""
    command = [sys.executable, "-m", "draftwood.cli", "serve", str(tiny_folder), "--port", "0"]
    options = ["--log-format", "json", "--kv-memory", "8M", "--no-speculation"]
    environment = os.environ | {"DRAFTWOOD_API_KEY": "one two", "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    match = re.fullmatch(r"serving llama at http://127\.0\.0\.1:(\d+)\n", line)
    assert match, (line, child.stderr and child.stderr.read())
    yield child, int(match[1])
    child.kill()
    child.wait()
    child.stdout.close()
    assert child.stderr is not None
    child.stderr.close()


def _post(port: int, body: dict[str, Any]) -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {
        "content-type": "application/json",
        "authorization": "Bearer two",
        "x-request-id": "mine",
    }
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


def test_a_port_in_use_is_one_line(
    process: tuple[subprocess.Popen[str], int], tiny_folder: Path, capsys: Any
) -> None:
    assert run(["serve", str(tiny_folder), "--port", str(process[1])]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: cannot listen on 127.0.0.1 port {process[1]} (Address already")
    assert "--port" in err
    assert err.count("\n") == 1


def test_sigterm_lets_what_runs_end_and_the_log_has_it(
    process: tuple[subprocess.Popen[str], int],
) -> None:
    child, port = process
    body = {"prompt": "the", "max_tokens": 240, "stream": True, "ignore_eos": True}
    connection = _post(port, body)
    response = connection.getresponse()
    first = response.readline()
    child.send_signal(signal.SIGTERM)
    text = (first + response.read()).decode()
    connection.close()
    assert '"finish_reason":"length"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert child.wait(20) == 0
    assert child.stderr is not None
    rows = [json.loads(line) for line in child.stderr.read().splitlines()]
    [row] = [row for row in rows if row.get("path") == "/v1/completions"]
    assert row["request_id"] == "mine"
    assert (row["status"], row["completion_tokens"], row["caller"]) == (200, 240, "key-1")
    assert row["finish_reasons"] == ["length"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], ["--port"]),
        (["--host", "no.such.host.invalid"], ["no.such.host.invalid", "resolved"]),
        (["--max-body", "much"], ["max-body", "512M"]),
        (["--api-key", ""], ["API key is empty"]),
        (["--api-key", "sha256:12"], ["64 digits"]),
        (["--request-timeout", "0"], ["request-timeout is 0.0"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs"]),
        (["--log-format", "xml"], ["--log-format"]),
    ],
)
def test_a_wrong_option_is_one_line(
    tiny_folder: Path, capsys: Any, options: list[str], words: list[str]
) -> None:
    assert run(["serve", str(tiny_folder), *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    for word in words:
        assert word in err


def test_a_missing_package_is_named(
    tiny_folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert run(["serve", str(tiny_folder)]) == 2
    assert "pip install 'draftwood[server]'" in capsys.readouterr().err


def test_addresses_of_both_families_become_urls() -> None:
    class _Bound:
        def __init__(self, *name: Any) -> None:
            self.getsockname = lambda: name

    assert url_of(_Bound("::1", 80, 0, 0)) == "http://[::1]:80"  # type: ignore[arg-type]
    assert url_of(_Bound("127.0.0.1", 8000)) == "http://127.0.0.1:8000"  # type: ignore[arg-type]
