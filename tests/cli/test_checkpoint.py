"""A batch job that survives: the same command again goes on and prints everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftwood.engine.engine import Engine
from tests.cli.conftest import Call


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """A file of prompts, the longest first, and the options of the job."""
    path = tmp_path / "job.jsonl"
    lines = [
        {"prompt": "the quick brown fox", "id": "fox", "params": {"max_tokens": 60}},
        {"prompt": "a tree", "params": {"max_tokens": 3, "temperature": 0.8}},
        {"prompt": "def add(", "params": {"max_tokens": 40, "temperature": 0.8, "seed": 4}},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return ["--prompt-file", str(path), "--ignore-eos"]


class _Crash(BaseException):
    """Where a process ends."""


def crash_after(monkeypatch: pytest.MonkeyPatch, rounds: int, error: type[BaseException]) -> None:
    """Lets the engine end so after so many rounds, once."""
    real, left = Engine.step, [rounds]

    def step(engine: Engine) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return real(engine)

    monkeypatch.setattr(Engine, "step", step)


@pytest.mark.parametrize("error", [_Crash, KeyboardInterrupt])
def test_the_same_command_goes_on(
    call: Call,
    tiny: str,
    job: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    saved = ["--checkpoint", str(tmp_path / "saved")]
    whole = call("generate", tiny, *job, "--json").json["outputs"]
    crash_after(monkeypatch, 7, error)
    if error is _Crash:
        with pytest.raises(_Crash):
            call("generate", tiny, *job, *saved)
    else:
        assert call("generate", tiny, *job, *saved).code == 130
    answer = call("generate", tiny, *job, *saved, "--json")
    assert answer.code == 0
    outputs = answer.json["outputs"]
    for i in (0, 2):
        assert outputs[i]["text"] == whole[i]["text"]
        assert outputs[i]["token_ids"] == whole[i]["token_ids"]
    assert len(outputs[1]["token_ids"]) == 3
    assert outputs[0]["id"] == "fox"
    assert outputs[0]["num_resumed_tokens"] > 0
    assert not list((tmp_path / "saved").glob("*.dwc")), "a job that is done leaves no checkpoint"


def test_another_job_is_refused(
    call: Call, tiny: str, job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = ["--checkpoint", str(tmp_path / "saved")]
    crash_after(monkeypatch, 5, KeyboardInterrupt)
    assert call("generate", tiny, *job, *saved).code == 130
    call("generate", tiny, "another", *saved).assert_mistake("other prompts", "another folder")
    call("generate", tiny, *job, "--top-k", "3", *saved).assert_mistake("other prompts")
    assert call("generate", tiny, *job, *saved).code == 0


def test_mistakes(
    call: Call,
    tiny: str,
    job: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call("generate", tiny, "a", "--checkpoint-every", "0").assert_mistake("checkpoint-every")
    file = tmp_path / "file"
    file.write_text("")
    call("generate", tiny, "a", "--checkpoint", str(file)).assert_mistake("checkpoint folder")
    saved = ["--checkpoint", str(tmp_path / "saved")]
    crash_after(monkeypatch, 5, KeyboardInterrupt)
    assert call("generate", tiny, *job, *saved).code == 130
    for other in (tmp_path / "saved").glob("*.dwc"):
        other.write_bytes(other.read_bytes()[:-2])
    call("generate", tiny, *job, *saved).assert_mistake("damaged")


def test_help_says_how(call: Call) -> None:
    answer = call("generate", "--help")
    assert "--checkpoint" in answer.out
    assert "--checkpoint-every" in answer.out
