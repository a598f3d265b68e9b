"""Clients that come back: the rest of their streams, answers that were asked for before."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftwood.config import EngineConfig
from draftwood.llm import LLM
from draftwood.serve.access import ApiKeys
from draftwood.serve.held import RecoveryOptions
from tests.serve.conftest import Live, serving, wait_until
from tests.serve.streams import Stream

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "the quick brown fox " * 3, "max_tokens": 160, "ignore_eos": True}
SAMPLED = LONG | {"temperature": 0.9}


@contextmanager
def kept_server(folder: Path, saved: Path, **options: Any) -> Iterator[Live]:
    """A server with checkpoints in `saved`."""
    config = EngineConfig(adaptive=False, debug_kv=True, kv_memory=8 << 20, kv_timeout_s=5.0)
    with (
        LLM(str(folder), config=config, checkpoint=saved, checkpoint_every_s=0.05) as llm,
        serving(llm, **options) as live,
    ):
        yield live


@pytest.fixture(scope="module")
def kept(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Live]:
    """A server with checkpoints that this module's tests share."""
    with kept_server(tiny_folder, tmp_path_factory.mktemp("saved")) as live:
        yield live


@pytest.fixture
def slow(kept: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that take long enough to lose a connection between them."""
    import time

    real = kept.llm.engine.step
    monkeypatch.setattr(kept.llm.engine, "step", lambda: (time.sleep(0.004), real())[1])


def stream(live: Live, body: dict[str, Any], request_id: str, path: str = TEXT) -> Stream:
    """A streamed request with an id of the client's."""
    headers = {"x-request-id": request_id}
    return Stream(live.address, path, {**body, "stream": True}, headers)


def whole(live: Live, body: dict[str, Any], path: str = TEXT) -> Any:
    """The answer of a request that nothing happens to."""
    reply = live.ask("POST", path, body)
    assert reply.status == 200, reply
    return reply.json


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("again", ["get", "post"])
@pytest.mark.parametrize("most", [1, 7])
def test_a_lost_stream_goes_on(kept: Live, again: str, most: int) -> None:
    body = SAMPLED | {"seed": 3}
    expected = whole(kept, body)["choices"][0]
    one = stream(kept, body, f"lost-{again}-{most}").send(most)
    assert not one.done
    while not one.done:
        one = one.come_back(f"lost-{again}-{most}", 20) if again == "get" else one.send(20)
        assert one.status == 200, one.events[-1]
    assert one.text() == expected["text"]
    assert one.reasons() == ["length"]
    assert len(set(one.ids)) == len(one.ids)
    assert len({event["id"] for event in one.events}) == 1


def test_an_answer_is_given_again(kept: Live) -> None:
    headers = {"x-request-id": "again"}
    first = kept.ask("POST", TEXT, SAMPLED, headers).json
    second = kept.ask("POST", TEXT, SAMPLED, headers).json
    third = kept.ask("GET", "/v1/requests/again").json
    assert first == second == third
    assert len(first["choices"][0]["text"]) > 20
    streamed = stream(kept, SAMPLED, "again").send()
    assert streamed.text() == first["choices"][0]["text"]
    assert streamed.events[0]["id"] == first["id"]


def test_another_question_under_the_same_id_is_refused(kept: Live) -> None:
    headers = {"x-request-id": "mine"}
    assert kept.ask("POST", TEXT, LONG, headers).status == 200
    reply = kept.ask("POST", TEXT, LONG | {"max_tokens": 3}, headers)
    assert reply.status == 409
    assert reply.error["code"] == "request_id_in_use"
