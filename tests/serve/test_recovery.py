"""Clients that come back: the rest of their streams, answers that were asked for before."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from draftwood.cli.app import run
from draftwood.config import EngineConfig
from draftwood.engine.observers import Round
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from draftwood.serve.access import ApiKeys
from draftwood.serve.held import RecoveryOptions
from draftwood.serve.tickets import Ticket, file_name
from tests.serve.conftest import Live, serving, wait_until
from tests.serve.streams import Stream
from tests.tiny import save_tiny

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG: dict[str, Any] = {
    "prompt": "the quick brown fox " * 3,
    "max_tokens": 160,
    "ignore_eos": True,
    "temperature": 0,
}
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
    first = kept.ask("POST", TEXT, SAMPLED, headers).json  # without a seed
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


def test_without_an_id_a_request_ends_with_its_connection(kept: Live) -> None:
    one = Stream(kept.address, TEXT, LONG | {"stream": True}, {}).send(1)
    assert one.last_id
    kept.assert_idle()
    assert wait_until(lambda: not has_ticket(kept, "req_"))


def has_ticket(live: Live, prefix: str) -> bool:
    """Whether a request whose id begins so is kept."""
    recovery = live.recovery
    return any(request_id.startswith(prefix) for _, request_id in recovery._held)


@pytest.mark.usefixtures("slow")
def test_the_newest_reader_gets_the_stream(kept: Live) -> None:
    first = stream(kept, SAMPLED, "two")
    errors: list[Any] = []
    thread = threading.Thread(target=lambda: errors.append(first.send().events[-1]))
    thread.start()
    assert wait_until(lambda: len(first.ids) > 2)
    second = stream(kept, SAMPLED, "two").send()
    thread.join()
    assert errors[0]["error"]["code"] == "taken_over"
    assert second.done
    assert second.text().startswith(first.text())


@pytest.mark.usefixtures("slow")
def test_the_same_question_twice_at_once_is_asked_once(kept: Live) -> None:
    replies: list[Any] = []
    before = kept.llm.engine.num_requests
    ask = partial(kept.ask, "POST", TEXT, LONG, {"x-request-id": "twice"})
    threads = [threading.Thread(target=lambda: replies.append(ask())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept.llm.engine.num_requests == before + 1
    good = [reply for reply in replies if reply.status == 200]
    assert good
    assert all(reply.error["code"] == "taken_over" for reply in replies if reply not in good)
    assert len({reply.body for reply in good}) == 1


def test_a_reader_with_all_of_it_is_told_so(kept: Live) -> None:
    one = stream(kept, LONG | {"max_tokens": 4}, "all").send()
    assert one.done
    assert one.come_back("all").status == 204


@pytest.mark.parametrize("event_id", ["x", "1.2,3.4", "1.2;z", "-1.2", "9" * 12 + ".1"])
def test_a_wrong_event_id_is_refused(kept: Live, event_id: str) -> None:
    stream(kept, LONG | {"max_tokens": 4}, "wrong").send()
    reply = kept.ask("GET", "/v1/requests/wrong/events", headers={"last-event-id": event_id})
    assert (reply.status, reply.error["code"]) == (400, "invalid_event_id")


def test_what_is_not_known_is_404(kept: Live) -> None:
    for method, path in (("GET", ""), ("GET", "/events"), ("DELETE", "")):
        reply = kept.ask(method, f"/v1/requests/nobody{path}")
        assert (reply.status, reply.error["code"]) == (404, "request_not_found")
    headers = {"x-request-id": "nobody", "last-event-id": "3.9"}
    reply = kept.ask("POST", TEXT, LONG | {"stream": True}, headers)
    assert (reply.status, reply.error["code"]) == (404, "request_not_found")
    assert kept.ask("POST", TEXT, {"prompt": 3}, {"x-request-id": "bad"}).status == 400
    bad = {"prompt": "a", "max_tokens": 100_000}
    assert kept.ask("POST", TEXT, bad, {"x-request-id": "bad"}).status == 400
    assert kept.ask("POST", TEXT, LONG, {"x-request-id": "bad"}).status == 200


@pytest.mark.usefixtures("slow")
def test_a_request_can_be_deleted(kept: Live) -> None:
    one = stream(kept, LONG, "gone").send(2)
    assert kept.ask("DELETE", "/v1/requests/gone").json == {"id": "gone", "deleted": True}
    kept.assert_idle()
    assert one.come_back("gone").status == 404
    assert wait_until(lambda: not list(kept.recovery._folder._folder.glob("*.part")))
    other = kept.ask("POST", TEXT, LONG | {"max_tokens": 3}, {"x-request-id": "gone"})
    assert other.status == 200


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("path", "more"),
    [
        (TEXT, {"prompt": "the fox", "echo": True, "logprobs": 2, "n": 2}),
        (TEXT, {"prompt": ["a tree", "def add("], "stop": ["qq", "ee"]}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "hi"}],
                "tools": [TOOL],
                "tool_choice": "required",
                "ignore_eos": False,
            },
        ),
    ],
)
def test_every_kind_of_stream_goes_on(kept: Live, path: str, more: dict[str, Any]) -> None:
    """Cut at every few events, the choices are those of the whole answer."""
    body = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.9, "seed": 5, **more}
    if more.get("messages") and not more.get("logprobs"):
        pytest.importorskip("llguidance")
    expected = whole(kept, body, path)
    name = f"kind-{abs(hash(json.dumps(more)))}"
    one = stream(kept, {**body, "stream_options": {"include_usage": True}}, name, path)
    while not one.done:
        one = one.send(3)
        assert one.status == 200, one.events[-1]
    for choice in expected["choices"]:
        message = choice.get("message", {})
        assert one.text(choice["index"]) == (choice.get("text") or message.get("content") or "")
        assert one.tokens(choice["index"]) == tokens_of(choice)
        assert one.calls(choice["index"]) == [
            call["function"] for call in message.get("tool_calls", [])
        ]
    assert sorted(one.reasons()) == sorted(c["finish_reason"] for c in expected["choices"])
    counts = [event["usage"] for event in one.events if event.get("usage")]
    assert [count["completion_tokens"] for count in counts] == [
        expected["usage"]["completion_tokens"]
    ]


def tokens_of(choice: dict[str, Any]) -> list[str]:
    """Tokens of a choice's log-probabilities."""
    logprobs = choice.get("logprobs") or {}
    return logprobs.get("tokens") or [one["token"] for one in logprobs.get("content") or []]


def test_another_keys_requests_are_not_there(tiny_folder: Path, tmp_path: Path) -> None:
    with kept_server(tiny_folder, tmp_path, keys=ApiKeys(["one", "two"])) as live:
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        first = live.ask("POST", TEXT, SAMPLED, {"x-request-id": "same", **mine})
        assert live.ask("GET", "/v1/requests/same", headers=theirs).status == 404
        assert live.ask("GET", "/v1/requests/same/events", headers=theirs).status == 404
        assert live.ask("DELETE", "/v1/requests/same", headers=theirs).status == 404
        assert live.ask("GET", "/v1/requests/same").status == 401
        other = live.ask("POST", TEXT, SAMPLED, {"x-request-id": "same", **theirs})
        assert other.json["choices"] != first.json["choices"]
    # Keys may come and go: what is theirs stays theirs.
    with kept_server(tiny_folder, tmp_path, keys=ApiKeys(["zero", "two", "one"])) as live:
        assert live.ask("GET", "/v1/requests/same", headers=mine).body == first.body
        assert live.ask("GET", "/v1/requests/same", headers=theirs).body == other.body


def test_what_nobody_comes_back_for_goes(tiny_folder: Path, tmp_path: Path) -> None:
    options = RecoveryOptions(grace_s=0.2, keep_s=0.5)
    with kept_server(tiny_folder, tmp_path, recovery=options) as live:
        slow_down(live)
        stream(live, LONG, "left").send(1)
        assert has_ticket(live, "left")
        live.assert_idle()
        assert not has_ticket(live, "left")
        live.ask("POST", TEXT, LONG | {"max_tokens": 3}, {"x-request-id": "answer"})
        assert live.ask("GET", "/v1/requests/answer").status == 200
        assert wait_until(lambda: live.ask("GET", "/v1/requests/answer").status == 404)
        assert wait_until(lambda: not list((tmp_path / "requests").iterdir()))
        assert live.recovery.counts.num_expired == 1


def test_kept_answers_are_bounded_in_size(tiny_folder: Path, tmp_path: Path) -> None:
    options = RecoveryOptions(keep_bytes=20_000)
    with kept_server(tiny_folder, tmp_path, recovery=options) as live:
        for i in range(20):
            live.ask("POST", TEXT, LONG, {"x-request-id": f"r{i}"})
        assert wait_until(lambda: 0 < live.recovery.size()[1] <= 20_000)
        assert live.ask("GET", "/v1/requests/r19").status == 200
        assert live.ask("GET", "/v1/requests/r0").status == 404
        files = tmp_path / "requests"
        assert wait_until(
            lambda: sum(path.stat().st_size for path in files.glob("*.dwr")) <= 20_000
        )


def slow_down(live: Live) -> None:
    """Rounds take long enough to lose a connection between them."""
    real = live.llm.engine.step
    live.llm.engine.step = lambda: (time.sleep(0.004), real())[1]  # type: ignore[method-assign]


@pytest.mark.parametrize("rounds", [3, 40])
def test_a_server_that_ends_leaves_its_requests_to_the_next(
    tiny_folder: Path, tmp_path: Path, rounds: int
) -> None:
    """No prompt is read again: only what did not fill a block is."""
    body = SAMPLED | {"seed": 6, "n": 2}
    with kept_server(tiny_folder, tmp_path, drain_timeout_s=0.0) as live:
        expected = whole(live, body)["choices"]
        slow_down(live)
        one = stream(live, body, "rest").send(rounds)
    assert not one.done
    with kept_server(tiny_folder, tmp_path) as live:
        counter = Prefill()
        live.llm.engine.observers.append(counter)
        one.address = live.address
        one.come_back("rest")
        assert live.recovery.counts.num_resumed == 1
        text = live.ask("GET", "/metrics").body.decode()
        live.llm.engine.observers.remove(counter)
    assert 'draftwood:resumed_requests_total{engine="0",model_name="tiny"} 1.0' in text
    assert [one.text(i) for i in range(2)] == [choice["text"] for choice in expected]
    assert counter.num_rows <= 2 * 16


class Prefill:
    """Counts rows that compute known tokens."""

    num_rows = 0

    def on_round(self, round_: Round) -> None:
        """Adds a round's."""
        self.num_rows += round_.num_prefill_rows


def test_a_request_that_ends_processes_is_given_up(tiny_folder: Path, tmp_path: Path) -> None:
    with kept_server(tiny_folder, tmp_path, drain_timeout_s=0.0) as live:
        slow_down(live)
        stream(live, LONG, "bad").send(1)
    [path] = (tmp_path / "requests").glob("*.dwr")
    ticket = Ticket.decode(path.read_bytes())
    path.write_bytes(replace(ticket, num_tokens=10**6, num_starts=5).encode())
    with kept_server(tiny_folder, tmp_path) as live:
        assert live.ask("GET", "/v1/requests/bad").status == 404
        assert live.recovery.counts.num_lost == 1
        live.assert_idle()


def test_a_damaged_ticket_is_forgotten(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kept_server(tiny_folder, tmp_path) as live:
        for name in ("one", "two"):
            live.ask("POST", TEXT, LONG | {"max_tokens": 3}, {"x-request-id": name})
            assert wait_until(lambda: live.recovery.size()[1] > 0)
    path = tmp_path / "requests" / f"{file_name('', 'one')}.dwr"
    path.write_bytes(path.read_bytes()[:-1])
    with kept_server(tiny_folder, tmp_path) as live:
        assert "damaged" in caplog.text
        assert live.ask("GET", "/v1/requests/one").status == 404
        assert live.ask("GET", "/v1/requests/two").status == 200


def test_a_disk_that_does_not_work_costs_no_answer(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept_server(tiny_folder, tmp_path) as live:
        monkeypatch.setattr(os, "fsync", _full)
        one = stream(live, LONG, "full").send()
        assert one.done
        again = stream(live, LONG, "full").send()
        assert again.text() == one.text()
        monkeypatch.undo()


def _full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def left_behind(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a server leaves that has ended in the middle of a stream."""
    saved = tmp_path_factory.mktemp("left")
    with kept_server(tiny_folder, saved, drain_timeout_s=0.0) as live:
        live.ask("POST", TEXT, LONG | {"max_tokens": 3}, {"x-request-id": "done"})
        slow_down(live)
        stream(live, LONG, "half").send(60)
        assert live.llm.checkpoints is not None
        assert wait_until(lambda: live.recovery.stats.num_written > 2)
    return saved


@pytest.mark.parametrize(
    ("options", "what", "words"),
    [
        (["--dtype", "bfloat16"], "*", ["another dtype", "float32 there, bfloat16 here"]),
        ([], "requests/*", ["a model with other weights"]),
        ([], "checkpoint-*", ["a model with other weights"]),
    ],
)
def test_what_another_model_made_is_refused(
    left_behind: Path,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    what: str,
    words: list[str],
) -> None:
    """Checkpoints and tickets, each for itself."""
    saved = tmp_path / "saved"
    shutil.copytree(left_behind, saved)
    if "/" in what:
        for path in saved.glob("*.dwc"):
            path.unlink()
    elif what != "*":
        shutil.rmtree(saved / "requests")
    model = tiny_folder if options else save_tiny(tmp_path / "other", seed=77)
    arguments = ["serve", str(model), "--port", "0", "--checkpoint", str(saved), *options]
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    for word in words:
        assert word in err


def test_a_batch_jobs_checkpoint_is_refused(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(str(tiny_folder), checkpoint=tmp_path) as llm:
        assert llm.checkpoints is not None
        llm.engine.add([1, 2, 3], SamplingParams(max_tokens=9), "1-abc")
        llm.checkpoints.save()
    arguments = ["serve", str(tiny_folder), "--port", "0", "--checkpoint", str(tmp_path)]
    assert run(arguments) == 2
    assert "batch job" in capsys.readouterr().err


def test_the_checkpoint_before_is_used_where_the_newest_is_torn(
    left_behind: Path, tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = tmp_path / "saved"
    shutil.copytree(left_behind, saved)
    *_, newest = sorted(saved.glob("*.dwc"))
    newest.write_bytes(newest.read_bytes()[:-9])
    with kept_server(tiny_folder, saved) as live:
        assert "the one before is used" in caplog.text
        expected = whole(live, LONG)["choices"][0]["text"]
        assert live.ask("GET", "/v1/requests/half").json["choices"][0]["text"] == expected


def test_wrong_options_are_one_line(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (
        ("--checkpoint-every", "0"),
        ("--keep-bytes", "much"),
        ("--reconnect-grace", "-1"),
    ):
        assert run(["serve", str(tiny_folder), option, value]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert option.removeprefix("--") in err
