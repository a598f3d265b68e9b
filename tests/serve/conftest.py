"""A server over a tiny model, alive in a thread of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import pytest

from draftwood.config import EngineConfig
from draftwood.llm import LLM
from draftwood.serve.access import ApiKeys
from draftwood.serve.recovery import Recovery
from draftwood.serve.run import Server, bind, url_of
from draftwood.serve.start import ServeOptions, make_server
from draftwood.serve.worker import Worker
from tests.tiny import save_tiny

MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a plain HTTP request got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The body of an error, which must have OpenAI's form."""
        assert self.headers["content-type"] == "application/json", self
        [(name, error)] = self.json.items()
        assert name == "error"
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"], error
        return dict(error)


@dataclass(slots=True)
class Live:
    """A server in a thread."""

    llm: LLM
    server: Server
    worker: Worker
    address: tuple[str, int]
    url: str
    codes: list[int] = field(default_factory=list)

    @property
    def recovery(self) -> Recovery:
        """Where its requests are kept."""
        assert self.server.recovery is not None
        return self.server.recovery

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client; close it."""
        settings: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """A plain request; a body that is no bytes is sent as JSON."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json"} if body is not None else {}
        connection = HTTPConnection(*self.address, timeout=60)
        try:
            connection.request(method, path, content, sent | (headers or {}))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())
        finally:
            connection.close()

    def _rests(self) -> bool:
        """Whether the engine has nothing to do; while it is being replaced there is none."""
        engine = getattr(self.llm, "engine", None)
        return engine is not None and not engine.has_work

    def assert_idle(self) -> None:
        """Nothing waits or runs, and every block of KV is free or kept for reuse only."""
        assert wait_until(lambda: self.worker.num_open == 0 and self._rests())
        held = self.llm.pool.num_blocks - self.llm.pool.num_free
        assert held == len(self.llm.engine.prefix)
        self.llm.pool.check()


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something becomes true in time."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if true():
            return True
        pause.wait(0.005)
    return true()


@contextmanager
def serving(llm: LLM, **options: Any) -> Iterator[Live]:
    """A server for this model, until the end of the block."""
    given = {"names": (MODEL,), "keys": ApiKeys(()), "drain_timeout_s": 5.0} | options
    sock, ready = bind("127.0.0.1", 0), threading.Event()
    with sock:
        server = make_server(llm, ServeOptions(**given), sock, ready.set)
        live = Live(llm, server, server.worker, sock.getsockname(), url_of(sock))
        thread = threading.Thread(target=lambda: live.codes.append(server.run()))
        thread.start()
        assert ready.wait(20)
        try:
            yield live
        finally:
            server.ask_to_stop(0)
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template; its context is 256 tokens."""
    return save_tiny(tmp_path_factory.mktemp("serve") / "llama")


@pytest.fixture(scope="session")
def make_llm(tiny_folder: Path) -> Generator[Callable[..., LLM]]:
    """Loads the tiny model; keywords are those of `EngineConfig`."""
    with ExitStack() as stack:

        def load(**config: Any) -> LLM:
            settings = {"adaptive": False, "debug_kv": True, "kv_memory": 8 << 20} | config
            return stack.enter_context(LLM(str(tiny_folder), config=EngineConfig(**settings)))

        yield load


@pytest.fixture(scope="module")
def live(make_llm: Callable[..., LLM]) -> Generator[Live]:
    """A server that a module's tests share; at the end nothing of them is left in it."""
    with serving(make_llm(), cors=("https://page.example",), max_body=100_000) as live:
        yield live
        live.assert_idle()


@pytest.fixture
def client(live: Live) -> Generator[openai.OpenAI]:
    """The official client of the shared server."""
    with live.client() as client:
        yield client
