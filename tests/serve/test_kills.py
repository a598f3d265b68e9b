"""A server killed with SIGKILL at random moments under load: every stream ends as undisturbed.

By default with few kills; DRAFTWOOD_KILLS=30 sets how many.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

from draftwood.llm import LLM
from tests.serve.conftest import serving, wait_until
from tests.serve.streams import Stream
from tests.serve.test_recovery import CHAT, TEXT, whole

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
NUM_KILLS = int(os.environ.get("DRAFTWOOD_KILLS", "6"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FOX = "the quick brown fox jumps over the lazy dog " * 3
LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    (TEXT, LONG | {"prompt": FOX, "temperature": 0}),
    (TEXT, LONG | {"prompt": FOX + "a", "temperature": 0.9, "seed": 7, "n": 2}),
    (TEXT, LONG | {"prompt": ["a tree of tokens", "def add("], "temperature": 1.1, "seed": 8}),
    (CHAT, LONG | {"messages": [{"role": "user", "content": FOX}], "temperature": 0.7, "seed": 1}),
    (TEXT, {"prompt": "user", "max_tokens": 120, "temperature": 1.0, "seed": 9}
     | {"guided_json": SCHEMA, "logprobs": 1}),
    (TEXT, LONG | {"prompt": "naïve café", "temperature": 1.3, "seed": 4, "stop": ["qq"]}),
    (TEXT, LONG | {"prompt": "no seed"}),
]  # fmt: skip


class Phoenix:
    """A server on one port that is killed and started again."""

    def __init__(self, model: Path, saved: Path, cache: Path) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.address: tuple[str, int] = sock.getsockname()
        self.log = saved.parent / "log"
        self._command = [
            *("serve", str(model), "--port", str(self.address[1]), "--kv-memory", "8M"),
            *("--checkpoint", str(saved), "--checkpoint-every", "0.05"),
        ]
        self._forker = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.serve.phoenix", model, self.log],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "DRAFTWOOD_CACHE": str(cache)},
        )
        self.pid = 0

    def start(self) -> None:
        """Starts a server, which is ready some time later."""
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        print(json.dumps(self._command), file=self._forker.stdin, flush=True)
        self._num_before = self._num_ready()
        self.pid = int(self._forker.stdout.readline())

    def wait_ready(self) -> None:
        """Waits until the server says that it is ready."""
        assert wait_until(lambda: self._num_ready() > self._num_before, 30), self.log.read_text()

    def _num_ready(self) -> int:
        return self.log.read_text().count("serving llama at") if self.log.exists() else 0

    def get(self, path: str) -> Any:
        """What it answers."""
        connection = HTTPConnection(*self.address, timeout=120)
        with closing(connection):
            connection.request("GET", path)
            return json.load(connection.getresponse())

    def end(self, number: int = signal.SIGKILL) -> int:
        """Sends the server a signal; returns its exit code."""
        assert self._forker.stdout is not None
        os.kill(self.pid, number)
        return int(self._forker.stdout.readline())

    def close(self) -> None:
        """Lets go of all."""
        self._forker.communicate()


@pytest.fixture(scope="module")
def phoenix(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Phoenix]:
    """One for all tests: it takes seconds to start."""
    pytest.importorskip("llguidance")
    folder = tmp_path_factory.mktemp("phoenix")
    phoenix = Phoenix(tiny_folder, folder / "saved", folder / "cache")
    yield phoenix
    phoenix.close()


class Client(threading.Thread):
    """Asks one question after the other, and comes back until it has all of each answer."""

    def __init__(self, address: tuple[str, int], number: int, ends: threading.Event) -> None:
        super().__init__()
        self._address, self._number, self._ends = address, number, ends
        self._rng = random.Random(number)
        self.streams: list[tuple[int, Stream]] = []
        self.num_cuts = 0
        self.failure = ""

    def run(self) -> None:
        """Asks until it is told to end; what it has begun it ends."""
        while not self._ends.is_set() and not self.failure:
            which = (self._number + len(self.streams)) % len(QUESTIONS)
            path, body = QUESTIONS[which]
            name = f"client-{self._number}-{len(self.streams)}"
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
            stream = Stream(self._address, path, body, {"x-request-id": name})
            self.streams.append((which, stream))
            self._finish(stream, name)

    def _finish(self, stream: Stream, name: str) -> None:
        deadline = time.monotonic() + 60
        while not stream.done and time.monotonic() < deadline:
            count = len(stream.ids)
            try:
                if self._rng.random() < 0.5 or not stream.ids:
                    stream.send()
                else:
                    stream.come_back(name)
            except (OSError, HTTPException):
                time.sleep(0.01)
            self.num_cuts += not stream.done and len(stream.ids) > count
            error = stream.events[-1].get("error") if stream.events else None
            if error:
                self.failure = f"{name}: {error}"
                return
        if not stream.done:
            self.failure = f"{name} never ended"


def test_killed_at_random_moments_under_load(phoenix: Phoenix, tiny_folder: Path) -> None:
    with LLM(str(tiny_folder)) as llm, serving(llm) as live:
        expected = [whole(live, body, path)["choices"] for path, body in QUESTIONS]
    assert all("seed" in body or not body["temperature"] for _, body in QUESTIONS[:-1])
    ends = threading.Event()
    clients = [Client(phoenix.address, number, ends) for number in range(4)]
    rng = random.Random(30)
    phoenix.start()
    phoenix.wait_ready()
    for client in clients:
        client.start()
    for number in range(NUM_KILLS):
        time.sleep(rng.uniform(0.0, 0.6))
        assert phoenix.end() == -signal.SIGKILL
        phoenix.start()
        if number % 3:  # else it is perhaps killed before it is ready
            phoenix.wait_ready()
    ends.set()
    for client in clients:
        client.join()
    assert not any(client.failure for client in clients), [client.failure for client in clients]
    for which, stream in [item for client in clients for item in client.streams]:
        kept = phoenix.get(f"/v1/requests/{stream.headers['x-request-id']}")["choices"]
        assert_same(stream, kept)
        if which < len(expected) - 1:  # nobody knows what the last one says without its seed
            assert_same(stream, expected[which])
    assert phoenix.end(signal.SIGTERM) == 0
    assert sum(client.num_cuts for client in clients) >= NUM_KILLS // 2


def assert_same(stream: Stream, choices: list[dict[str, Any]]) -> None:
    """What came is what an undisturbed run gives: nothing twice, nothing missing."""
    for choice in choices:
        text = choice.get("text") or choice.get("message", {}).get("content")
        assert stream.text(choice["index"]) == text
    assert sorted(stream.reasons()) == sorted(choice["finish_reason"] for choice in choices)
    assert len(set(stream.ids)) == len(stream.ids)
    assert sum(event.get("usage") is not None for event in stream.events) == 1
