"""One Ray cluster for all tests: two replicas, or three under load, and a draft actor."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from draftwood.config import EngineConfig
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from draftwood.serve.access import ApiKeys
from draftwood.serve.run import bind, url_of
from draftwood.serve.start import ServeOptions
from draftwood.text import Tokenizer
from tests.tiny import save_tiny

MODEL = "tiny"


@dataclass(slots=True)
class Front:
    """A server whose engine is on Ray."""

    folder: Path
    url: str
    application: Any
    fleet: Any
    cluster: Any

    def client(self) -> openai.OpenAI:
        """The official client; close it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def texts(self, prompts: list[str], params: SamplingParams, on_token: Any = None) -> list[str]:
        """What the server makes of prompts, all at once, in streams; `on_token` hears each piece.

        Each one's seed is the parameters' plus its place.
        """
        with self.client() as client, ThreadPoolExecutor(len(prompts)) as pool:

            def one(place: int) -> str:
                text = ""
                for chunk in client.completions.create(
                    model=MODEL,
                    prompt=prompts[place],
                    max_tokens=params.max_tokens,
                    temperature=params.temperature,
                    seed=(params.seed or 0) + place,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    text += chunk.choices[0].text
                    if on_token is not None:
                        on_token(text)
                return text

            return list(pool.map(one, range(len(prompts))))

    def pid(self, name: str) -> int:
        """Of a replica's process."""
        return asyncio.run(self.application.pid(name))

    def kill(self, name: str) -> None:
        """Kills a replica as the kernel does when memory is short."""
        os.kill(self.pid(name), signal.SIGKILL)

    def drafts(self) -> dict[str, int]:
        """What all replicas counted of their drafts."""
        total: dict[str, int] = {}
        for name in self.fleet.names:
            for key, count in asyncio.run(self.application.status(name)).drafts.items():
                total[key] = total.get(key, 0) + count
        return total


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose context is 256 tokens."""
    return save_tiny(tmp_path_factory.mktemp("ray") / "llama")


@pytest.fixture(scope="session")
def plain(tiny_folder: Path) -> LLM:
    """The same model in this process, decoding plainly."""
    config = EngineConfig(adaptive=False, kv_memory=8 << 20)
    return LLM(str(tiny_folder), drafter="none", config=config)


@pytest.fixture(scope="session")
def front(tiny_folder: Path) -> Generator[Front]:
    """The server, until the end of the session."""
    pytest.importorskip("ray", reason="pip install 'draftwood[ray]'")
    from draftwood.deploy.ray.application import Application, Layout
    from draftwood.deploy.ray.cluster import Cluster, Need
    from draftwood.deploy.ray.draft_actor import DraftSettings
    from draftwood.deploy.ray.replica import ReplicaSettings
    from draftwood.deploy.ray.start import make_front

    settings = ReplicaSettings(
        model=str(tiny_folder),
        drafter="model",
        name=MODEL,
        config=EngineConfig(adaptive=False, debug_kv=True, kv_memory=8 << 20, max_num_seqs=4),
        deadline_s=0.2,
    )
    draft = DraftSettings(model=str(tiny_folder), target=str(tiny_folder), debug_kv=True)
    layout = Layout(
        replicas=2,
        max_replicas=3,
        draft_actors=1,
        replica=Need("replica", 2),
        draft=Need("draft actor", 1),
        drain_s=5.0,
        upscale_s=0.5,
        downscale_s=1.0,
    )
    options = ServeOptions(names=(MODEL,), keys=ApiKeys(()), drain_timeout_s=5.0)
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(num_cpus=6))
        cluster.check([layout.replica, layout.draft])
        application = Application(settings, draft, layout)
        stack.callback(application.close)
        application.start(120)
        sock = stack.enter_context(bind("127.0.0.1", 0))
        ready = threading.Event()
        tokenizer = Tokenizer.load(tiny_folder)
        server, fleet = make_front(application, tokenizer, options, sock, ready.set)
        thread = threading.Thread(target=server.run)
        thread.start()
        assert ready.wait(20)
        yield Front(tiny_folder, url_of(sock), application, fleet, cluster)
        server.ask_to_stop(0)
        thread.join(30)
        assert not thread.is_alive()
