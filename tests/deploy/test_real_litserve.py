"""A real LitServe: batches of concurrent requests and wrong ones among them."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from tests.deploy.servers import Process, call, free_ports, need_server
from tests.tiny import save_tiny

PARAMS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.8}
PROMPTS = [f"a tree of tokens {i}" for i in range(6)]
# As in docs/deployment.md; it also says how many requests each batch had.
PROGRAM = """
import sys

from litserve import LitServer

from draftwood.deploy.litserve import DraftwoodAPI


class Counting(DraftwoodAPI):
    def predict(self, x):
        print("batch of", len(x), flush=True)
        return super().predict(x)


if __name__ == "__main__":
    api = Counting(sys.argv[1], max_batch_size=4, batch_timeout=0.3)
    LitServer(api, accelerator="cpu", workers_per_device=1).run(
        host="127.0.0.1", port=int(sys.argv[2]), num_api_servers=1, generate_client_file=False
    )
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model."""
    return str(save_tiny(tmp_path_factory.mktemp("model") / "llama"))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Its URL, and its log."""
    need_server("litserve")
    folder = tmp_path_factory.mktemp("litserve")
    (folder / "server.py").write_text(PROGRAM)
    [port] = free_ports(1)
    process = Process([need_server("python"), "server.py", model, str(port)], folder)
    url = f"http://127.0.0.1:{port}"
    try:
        process.wait(lambda: call(f"{url}/health") == "ok")
        yield f"{url}/predict", process.log
    finally:
        process.end()


def test_concurrent_requests_share_batches(server: tuple[str, Path], model: str) -> None:
    url, log = server
    bodies = [{"prompt": prompt, "seed": i, **PARAMS} for i, prompt in enumerate(PROMPTS)]
    bodies.insert(1, {"prompt": "a", "temperature": -1})

    def ask(body: dict[str, Any]) -> str:
        try:
            return str(json.loads(call(url, body))["text"])
        except urllib.error.HTTPError as error:
            with error:
                return f"{error.code}: {error.read().decode()}"

    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(ask, bodies))
    with LLM(model) as llm:
        params = [SamplingParams(seed=i, **PARAMS) for i in range(len(PROMPTS))]
        whole = llm.generate(PROMPTS, params)
    wrong = answers.pop(1)
    assert answers == [one.text for one in whole]
    assert wrong.startswith("400")
    assert "temperature" in wrong
    lines = log.read_text(errors="replace").splitlines()
    sizes = [int(line.removeprefix("batch of ")) for line in lines if line.startswith("batch of ")]
    assert sum(sizes) == 7
    assert 1 < max(sizes) <= 4
