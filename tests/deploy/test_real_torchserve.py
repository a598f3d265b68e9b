"""A real TorchServe: batches of concurrent requests, streams, wrong requests, metrics."""

from __future__ import annotations

import json
import re
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from draftwood.deploy.torchserve import ArchiveOptions, write_archive
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from tests.deploy.servers import Process, call, free_ports, need_server, opened
from tests.services import need
from tests.tiny import save_tiny

PARAMS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.8}
PROMPTS = [f"a tree of tokens {i}" for i in range(8)]


class Server:
    """TorchServe with one model called tiny."""

    def __init__(self, program: str, folder: Path, model: str) -> None:
        options = ArchiveOptions(batch_size=4, max_batch_delay_ms=300, llm={"device": "cpu"})
        write_archive(model, folder / "tiny.mar", options, include=True)
        inference, self.management, self.metrics = (
            f"http://127.0.0.1:{port}" for port in free_ports(3)
        )
        config = folder / "config.properties"
        lines = [
            f"inference_address={inference}",
            f"management_address={self.management}",
            f"metrics_address={self.metrics}",
            "metrics_mode=prometheus",
            "model_metrics_auto_detect=true",
            "install_py_dep_per_model=false",
        ]
        config.write_text("\n".join(lines))
        command = [program, "--start", "--foreground", "--disable-token-auth", "--ncs"]
        command += ["--model-store", str(folder), "--models", "tiny=tiny.mar"]
        self.url = f"{inference}/predictions/tiny"
        self.process = Process([*command, "--ts-config", str(config)], folder)

    def ready(self) -> bool:
        """Whether its worker is: it says that it is healthy long before."""
        [state] = json.loads(call(f"{self.management}/models/tiny"))
        return [worker["status"] for worker in state["workers"]] == ["READY"]

    def batches(self) -> list[int]:
        """How many requests each call of the handler had, from what it printed."""
        text = self.process.log.read_text(errors="replace")
        found = re.findall(r"result=\[METRICS\]DraftwoodBatchRequests\.\w+:([\d.]+)", text)
        return [int(float(size)) for size in found]

    def metric(self, name: str) -> float:
        """A counter of the handler's, as Prometheus sees it; 0 before it counted anything."""
        found = re.search(
            rf"^{name}{{.*}} ([\d.]+)$", call(f"{self.metrics}/metrics"), re.MULTILINE
        )
        return float(found[1]) if found else 0.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model."""
    return str(save_tiny(tmp_path_factory.mktemp("model") / "llama"))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests."""
    need("java", "default-jre-headless")
    server = Server(need_server("torchserve"), tmp_path_factory.mktemp("store"), model)
    try:
        server.process.wait(server.ready)
        yield server
    finally:
        server.process.end()


@pytest.fixture(scope="module")
def texts(model: str) -> list[str]:
    """What the prompts' texts are."""
    with LLM(model) as llm:
        params = [SamplingParams(seed=i, **PARAMS) for i in range(len(PROMPTS))]
        return [one.text for one in llm.generate(PROMPTS, params)]


def at_once(bodies: list[dict[str, Any]], server: Server) -> list[str]:
    """The answers to requests that come together; a refusal is its status."""

    def ask(body: dict[str, Any]) -> str:
        try:
            return call(server.url, body)
        except urllib.error.HTTPError as error:
            with error:
                return str(error.code)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))


def body(i: int, **more: object) -> dict[str, Any]:
    """A request for the i-th prompt."""
    return {"prompt": PROMPTS[i], "seed": i, **PARAMS, **more}


def test_concurrent_requests_share_batches_and_are_counted(
    server: Server, texts: list[str]
) -> None:
    before = server.metric("DraftwoodTokens")
    answers = at_once([body(i) for i in range(8)], server)
    assert [json.loads(one)["text"] for one in answers] == texts
    end = time.monotonic() + 10  # they come on another way than the answers
    while server.metric("DraftwoodBatchRequests") < 8 and time.monotonic() < end:
        time.sleep(0.1)
    assert server.metric("DraftwoodBatchRequests") == 8
    assert server.metric("DraftwoodTokens") - before == 8 * PARAMS["max_tokens"]
    sizes = server.batches()
    assert 1 < max(sizes) <= 4, "requests that came together were answered one by one"


def test_a_wrong_request_gets_400_and_the_others_of_its_batch_their_answers(
    server: Server, texts: list[str]
) -> None:
    answers = at_once([body(0), body(1, temperature=-1), body(2)], server)
    assert answers[1] == "400"
    assert [json.loads(answers[i])["text"] for i in (0, 2)] == [texts[0], texts[2]]


def test_streams_and_others_share_a_batch(server: Server, texts: list[str]) -> None:
    streams = [body(0, stream=True), body(1), body(2, stream=True)]
    answers = at_once(streams, server)
    assert [answers[0], json.loads(answers[1])["text"], answers[2]] == texts[:3]


def test_a_stream_comes_in_pieces(server: Server, texts: list[str]) -> None:
    # Token by token: the text is known by now, and could come in one round.
    with opened(server.url, body(4, stream=True, speculation=False)) as answer:
        pieces = list(iter(lambda: answer.read1(1 << 16), b""))
    assert b"".join(pieces).decode() == texts[4]
    assert len(pieces) > 1
