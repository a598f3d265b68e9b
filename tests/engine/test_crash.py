"""A process killed with SIGKILL at random moments: no answer is lost, changed or given twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from tests.tiny import save_tiny

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
NUM_MOMENTS = 10
SCHEMA = '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'


class Survivor:
    """The process that forks one worker after the other."""

    def __init__(self, model: str, cache: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.engine.survivor", model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "DRAFTWOOD_CACHE": str(cache)},
        )

    def run(self, order: dict[str, Any], kill_after_s: float | None) -> int:
        """Runs a worker, killed after so many seconds of work; returns its exit code."""
        log = Path(order["log"])
        num_begun = log.read_text().count('"began"') if log.exists() else 0
        pid = int(self._ask(order))
        if kill_after_s is not None:
            while not (log.exists() and log.read_text().count('"began"') > num_begun):
                time.sleep(0.005)
            time.sleep(kill_after_s)
            os.kill(pid, signal.SIGKILL)
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def _ask(self, order: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    def end(self) -> None:
        """Lets it go."""
        self._process.communicate()


@pytest.fixture(scope="module")
def survivor(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survivor]:
    """One for all tests: it takes seconds to start."""
    pytest.importorskip("llguidance")
    survivor = Survivor(model, tmp_path_factory.mktemp("cache"))
    yield survivor
    survivor.end()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model."""
    return str(save_tiny(tmp_path_factory.mktemp("model") / "llama"))


def requests(llm: LLM) -> list[dict[str, Any]]:
    """Greedy and seeded, long and short, with a stop string and with a grammar."""
    texts = ["the quick brown fox " * 3, "a tree of tokens", "def add(first", "user and system"]
    every: list[dict[str, Any]] = [
        {"max_tokens": 120, "ignore_eos": True},
        {"max_tokens": 90, "ignore_eos": True, "temperature": 0.9, "seed": 7},
        {"max_tokens": 100, "ignore_eos": True, "temperature": 1.2, "seed": 8, "stop": ["qq"]},
        {"max_tokens": 20, "logprobs": 2, "repetition_penalty": 1.3, "ignore_eos": True},
        {"max_tokens": 80, "structured": {"json": SCHEMA}, "temperature": 1.0, "seed": 9},
        {"max_tokens": 110, "ignore_eos": True, "temperature": 0.7, "seed": 1, "top_k": 20},
    ]
    return [
        {"id": f"r{i}", "prompt": llm.tokenizer.encode(texts[i % 4] + str(i)), "params": params}
        for i, params in enumerate(every)
    ]


def read(log: Path) -> tuple[dict[str, list[dict[str, Any]]], list[list[str]], bool]:
    """What readers got, by request; what each worker went on with; whether all came to an end."""
    pieces: dict[str, list[dict[str, Any]]] = {}
    begun: list[list[str]] = []
    done = False
    for line in log.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "began" in record:
            begun.append(record["began"])
        elif "done" in record:
            done = True
        else:
            pieces.setdefault(record["id"], []).append(record)
    return pieces, begun, done


def drop_torn_line(log: Path) -> None:
    """A line without an end was never received whole."""
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    log.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")


def received(log: Path) -> dict[str, Sequence[int]]:
    """How much of each output its reader has; nothing for those that have ended."""
    pieces, _, _ = read(log)
    return {name: of[-1]["end"] for name, of in pieces.items()}


def test_killed_at_random_moments_under_load(
    survivor: Survivor, model: str, tmp_path: Path
) -> None:
    """Every request gets the text of an undisturbed run: nothing twice, nothing missing."""
    with LLM(model) as llm:
        asked = requests(llm)
        params = [SamplingParams.from_dict(one["params"]) for one in asked]
        whole = llm.generate([one["prompt"] for one in asked], params)
    log = tmp_path / "log"
    rng = random.Random(20)
    order = {"model": model, "folder": str(tmp_path / "kept"), "log": str(log), "requests": asked}
    num_killed, done = 0, False
    for _ in range(NUM_MOMENTS):
        drop_torn_line(log)
        code = survivor.run(order | {"received": received(log)}, rng.uniform(0.0, 0.12))
        num_killed += code == -signal.SIGKILL
        if code == 0:
            break
    drop_torn_line(log)
    if not read(log)[2]:
        assert survivor.run(order | {"received": received(log)}, None) == 0
    pieces, begun, done = read(log)
    assert done
    assert num_killed >= 3
    assert any(begun[1:]), "no worker went on with anything"
    for one, output in zip(asked, whole, strict=True):
        got = pieces[one["id"]]
        assert_contiguous(got)
        assert [token for piece in got for token in piece["tokens"]] == list(output.token_ids)
        assert "".join(piece["text"] for piece in got) == output.text
        assert got[-1]["reason"] == output.finish_reason


def assert_contiguous(pieces: Sequence[dict[str, Any]]) -> None:
    """Each piece begins where the one before ended."""
    place = [0, 0]
    for piece in pieces:
        assert piece["start"] == place
        place = piece["end"]
