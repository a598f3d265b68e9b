"""A real TorchServe, where DRAFTWOOD_TORCHSERVE names its program.

It needs Java and an environment of its own (torchserve, torch-model-archiver, pyyaml) in which
draftwood can be imported:

    DRAFTWOOD_TORCHSERVE=/path/to/torchserve pytest tests/deploy/test_real_torchserve.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from draftwood.deploy.torchserve import ArchiveOptions, write_archive
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from tests.tiny import save_tiny

PROGRAM = os.environ.get("DRAFTWOOD_TORCHSERVE", "")
NEEDS = pytest.mark.skipif(
    not PROGRAM or shutil.which("java") is None,
    reason="DRAFTWOOD_TORCHSERVE names no TorchServe, or there is no Java",
)
pytestmark = [NEEDS, pytest.mark.torchserve]
PARAMS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.8}


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
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


class Server:
    """TorchServe with one model called tiny."""

    def __init__(self, folder: Path, model: str) -> None:
        options = ArchiveOptions(batch_size=4, max_batch_delay_ms=300, llm={"device": "cpu"})
        write_archive(model, folder / "tiny.mar", options, include=True)
        ports = free_ports(3)
        self.inference, self.management, self.metrics = (
            f"http://127.0.0.1:{port}" for port in ports
        )
        config = folder / "config.properties"
        lines = [
            f"inference_address={self.inference}",
            f"management_address={self.management}",
            f"metrics_address={self.metrics}",
            "install_py_dep_per_model=false",
        ]
        config.write_text("\n".join(lines))
        arguments = ["--start", "--foreground", "--disable-token-auth", "--ncs"]
        arguments += ["--model-store", str(folder), "--models", "tiny=tiny.mar"]
        self.log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [PROGRAM, *arguments, "--ts-config", str(config)],
            cwd=folder,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it leaves children
            env=os.environ | {"OMP_NUM_THREADS": "1", "LOG_LOCATION": str(folder / "logs")},
        )

    def wait(self, timeout_s: float) -> None:
        """Waits for its worker: it says that it is healthy long before."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self._process.poll() is None:
            try:
                [state] = json.loads(call(f"{self.management}/models/tiny"))
                if [worker["status"] for worker in state["workers"]] == ["READY"]:
                    return
            except (urllib.error.URLError, ConnectionError, ValueError):
                pass
            time.sleep(0.3)
        raise AssertionError(Path(self.log.name).read_text(errors="replace")[-3000:])

    def end(self) -> None:
        """Ends it with its children."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.log.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model."""
    return str(save_tiny(tmp_path_factory.mktemp("model") / "llama"))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests."""
    server = Server(tmp_path_factory.mktemp("store"), model)
    try:
        server.wait(90.0)
        yield server
    finally:
        server.end()


def test_concurrent_requests_share_batches(server: Server, model: str) -> None:
    prompts = [f"a tree of tokens {i}" for i in range(8)]
    bodies = [{"prompt": prompt, "seed": i, **PARAMS} for i, prompt in enumerate(prompts)]
    url = f"{server.inference}/predictions/tiny"
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: json.loads(call(url, body)), bodies))
    with LLM(model) as llm:
        params = [SamplingParams(seed=i, **PARAMS) for i in range(8)]
        whole = llm.generate(prompts, params)
    assert [one["text"] for one in answers] == [one.text for one in whole]
    sizes = batch_sizes(server)
    assert sum(sizes) >= 8
    assert max(sizes) > 1, "requests that came together were answered one by one"


def batch_sizes(server: Server) -> list[int]:
    """How many requests each call of the handler had, from the model's metrics."""
    logs = "".join(
        path.read_text(errors="replace") for path in Path(server.log.name).parent.rglob("*.log")
    )
    console = Path(server.log.name).read_text(errors="replace")
    lines = [line for line in (logs + console).splitlines() if "DraftwoodBatchRequests" in line]
    marker = "DraftwoodBatchRequests.Count:"
    return [int(float(line.split(marker)[1].split("|")[0])) for line in lines if marker in line]


def test_a_wrong_request_gets_400(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        call(f"{server.inference}/predictions/tiny", {"prompt": "a", "temperature": -1})
    with caught.value as error:
        assert error.code == 400


def test_a_stream(server: Server) -> None:
    url = f"{server.inference}/predictions/tiny"
    body = {"prompt": "a tree", **PARAMS, "seed": 4}
    whole = json.loads(call(url, body))["text"]
    assert call(url, body | {"stream": True}) == whole
