"""Clients that vanish, readers that sleep, queues that fill, engines that fail. Nothing leaks."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from draftwood.llm import LLM
from tests.serve.conftest import MODEL, Live, serving, wait_until

LONG: dict[str, Any] = {"prompt": "the", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def small(make_llm: Callable[..., LLM]) -> Generator[Live]:
    """A server with two places and a queue of two."""
    with serving(make_llm(max_num_seqs=2, max_batch_tokens=8), max_queue=2) as live:
        yield live
        live.assert_idle()


@pytest.fixture
def slow(small: Live, monkeypatch: pytest.MonkeyPatch) -> Live:
    """The same, with rounds of 20 ms."""
    step = small.llm.engine.step

    def slowly() -> Any:
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(small.llm.engine, "step", slowly)
    return small


def _send(live: Live, body: dict[str, Any]) -> socket.socket:
    """A request of which nothing is read yet."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    sock = socket.create_connection(live.address)
    sock.sendall(head.encode() + content)
    return sock


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["the", "the quick brown fox jumps over the lazy dog " * 2])
def test_a_client_that_vanishes_is_gone_within_a_round(
    slow: Live, stream: bool, prompt: str
) -> None:
    """While it decodes, or, with eight rows a round, while its prompt is computed."""
    sock = _send(slow, LONG | {"stream": stream, "prompt": prompt, "max_tokens": 150})
    assert wait_until(lambda: slow.llm.engine.has_work)
    time.sleep(0.05)
    rounds = _Counter()
    slow.llm.engine.observers.append(rounds)
    sock.close()
    assert wait_until(lambda: slow.worker.num_open == 0)
    slow.llm.engine.observers.remove(rounds)
    assert rounds.count <= 3  # the round that runs, and one that begins before word arrives
    slow.assert_idle()


class _Counter:
    def __init__(self) -> None:
        self.count = 0

    def on_round(self, round_: object) -> None:
        self.count += 1


def test_a_client_that_vanishes_from_the_queue_frees_its_place(slow: Live) -> None:
    running = [_send(slow, LONG | {"stream": True}) for _ in range(2)]
    assert wait_until(lambda: slow.worker.num_open == 2)
    waiting = [_send(slow, LONG | {"stream": stream}) for stream in (True, False)]
    assert wait_until(lambda: slow.worker.queue_length == 2)
    for sock in waiting:
        sock.close()
    assert wait_until(lambda: slow.worker.queue_length == 0)
    assert slow.worker.num_open == 2
    for sock in running:
        sock.close()
    slow.assert_idle()


def test_clients_that_vanish_at_random_leave_nothing(live: Live) -> None:
    chance = random.Random(7)

    def visit(_: int) -> None:
        body = LONG | {"stream": chance.random() < 0.7, "n": chance.choice([1, 1, 3])}
        with _send(live, body | {"max_tokens": chance.randrange(1, 200)}) as sock:
            time.sleep(chance.random() * 0.1)
            if chance.random() < 0.5:
                sock.settimeout(5)
                sock.recv(chance.randrange(1, 4000))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(visit, range(60)))
    live.assert_idle()


def test_half_a_request_is_no_request(live: Live) -> None:
    with socket.create_connection(live.address) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    with socket.create_connection(live.address) as sock:
        sock.sendall(b"\x00\xff garbage \r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 400")
    assert live.ask("GET", "/health").status == 200


def test_a_reader_that_sleeps_holds_up_nobody(live: Live) -> None:
    sleeper = _send(live, LONG | {"stream": True, "n": 8, "logprobs": 20})
    with live.client() as client:
        text = client.completions.create(model=MODEL, prompt="the", max_tokens=20, temperature=0)
        assert text.choices[0].text
    assert wait_until(lambda: live.worker.num_open == 0)  # though nothing was read of it
    sleeper.settimeout(20)
    data = b""
    while b"[DONE]" not in data:
        data += sleeper.recv(1 << 16)
    sleeper.close()
    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert sum(len(c["logprobs"]["tokens"]) for e in events for c in e["choices"]) == 8 * 200


def test_a_full_queue_refuses_and_says_when_to_come_again(slow: Live) -> None:
    sockets = [_send(slow, LONG | {"stream": True}) for _ in range(4)]
    assert wait_until(lambda: slow.worker.num_open == 4)
    reply = slow.ask("POST", "/v1/completions", LONG)
    assert (reply.status, reply.error["code"]) == (429, "queue_full")
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    with slow.client() as client, pytest.raises(openai.RateLimitError):
        client.completions.create(model=MODEL, prompt="the")
    for sock in sockets:
        sock.close()
    slow.assert_idle()
    assert slow.ask("POST", "/v1/completions", LONG | {"max_tokens": 1}).status == 200


def test_who_waits_is_served_when_all_places_fall_free_at_once(small: Live) -> None:
    body = {"prompt": "the", "max_tokens": 30, "ignore_eos": True, "speculation": False}
    with ThreadPoolExecutor(4) as pool:
        begin = time.monotonic()
        replies = list(pool.map(lambda _: small.ask("POST", "/v1/completions", body), range(4)))
    assert [reply.status for reply in replies] == [200] * 4
    assert time.monotonic() - begin < 10


def test_who_is_more_urgent_goes_first(slow: Live) -> None:
    running = [_send(slow, LONG | {"stream": True}) for _ in range(2)]
    assert wait_until(lambda: slow.worker.num_open == 2)
    ended: list[str] = []

    def ask(name: str, priority: int) -> None:
        slow.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2, "priority": priority})
        ended.append(name)

    threads = []
    for place, (name, priority) in enumerate((("later", 2), ("sooner", 1)), start=1):
        threads.append(threading.Thread(target=ask, args=(name, priority)))
        threads[-1].start()
        assert wait_until(lambda place=place: slow.worker.queue_length == place)  # type: ignore[misc]
    running[0].close()
    for thread in threads:
        thread.join(20)
    running[1].close()
    assert ended == ["sooner", "later"]
    slow.assert_idle()


def test_who_is_more_urgent_takes_a_place_and_changes_no_text(slow: Live) -> None:
    """Two long texts run; one is put back for a short one, and then goes on where it was."""
    body = LONG | {"max_tokens": 60, "temperature": 1, "seed": 4}
    alone = slow.ask("POST", "/v1/completions", body).json["choices"][0]["text"]
    before = slow.llm.engine.num_preemptions
    with ThreadPoolExecutor(2) as pool:
        long = [pool.submit(slow.ask, "POST", "/v1/completions", body) for _ in range(2)]
        assert wait_until(lambda: len(slow.llm.engine.unfinished) == 2)
        urgent = body | {"max_tokens": 2, "priority": -1}
        assert slow.ask("POST", "/v1/completions", urgent).status == 200
        assert not any(one.done() for one in long)
        assert slow.llm.engine.num_preemptions > before
        texts = [one.result().json["choices"][0]["text"] for one in long]
    assert texts == [alone, alone]
    slow.assert_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_time_is_up_ends(slow: Live, stream: bool) -> None:
    reply = slow.ask("POST", "/v1/completions", LONG | {"timeout": 0.2, "stream": stream})
    if stream:
        events = [line for line in reply.body.split(b"\n\n") if line]
        assert len(events) > 1
        assert json.loads(events[-1][6:])["error"]["code"] == "timeout"
    else:
        assert (reply.status, reply.error["code"]) == (408, "timeout")
        assert reply.headers["x-should-retry"] == "false"
    slow.assert_idle()


def test_an_engine_that_fails_tells_all_and_is_replaced(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(max_num_seqs=2)
    with serving(llm) as live, live.client() as client:
        good: dict[str, Any] = {"model": MODEL, "prompt": "the", "max_tokens": 12, "temperature": 0}
        before = client.completions.create(**good).choices[0].text
        failed, fail = llm.engine, threading.Event()
        step = failed.step

        def broken() -> Any:
            time.sleep(0.01)
            if fail.is_set():
                raise RuntimeError("a bit has flipped")
            return step()

        monkeypatch.setattr(failed, "step", broken)
        stream = client.completions.create(
            model=MODEL, prompt="the", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(live.ask, "POST", "/v1/completions", LONG) for _ in range(3)]
            assert wait_until(lambda: live.worker.queue_length == 2)
            fail.set()
            with pytest.raises(openai.APIError, match="the engine failed"):
                list(stream)
            for other in others:
                reply = other.result()
                assert (reply.status, reply.error["code"]) == (500, "engine_failed")
                assert "bit" not in reply.error["message"]
        assert wait_until(lambda: getattr(llm, "engine", failed) is not failed)
        assert client.completions.create(**good).choices[0].text == before
        live.assert_idle()
    assert live.codes == [0]


def test_an_engine_that_cannot_be_replaced_ends_the_server(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()

    def broken() -> Any:
        raise RuntimeError("a bit has flipped")

    with serving(llm) as live:
        monkeypatch.setattr(llm.engine, "step", broken)
        monkeypatch.setattr(llm, "restart", broken)
        reply = live.ask("POST", "/v1/completions", LONG)
        assert reply.status == 500
        assert wait_until(lambda: live.codes == [1])


def test_a_thousand_connections_are_served(live: Live) -> None:
    sockets: list[socket.socket] = []
    try:
        for _ in range(1000):
            sockets.append(socket.create_connection(live.address, timeout=10))
        assert live.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200
        for sock in sockets[::50]:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for sock in sockets[::50]:
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
    finally:
        for sock in sockets:
            sock.close()


def test_the_end_of_a_server_lets_running_requests_end(make_llm: Callable[..., LLM]) -> None:
    with serving(make_llm()) as live, live.client() as client:
        stream = client.completions.create(
            model=MODEL, prompt="the", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(iter(stream))
        live.server.ask_to_stop(0)
        rest = list(stream)
        assert first.choices[0].text is not None
        assert rest[-1].choices[0].finish_reason == "length"
        assert wait_until(lambda: live.codes == [0])
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(live.address)


def test_the_end_of_a_server_does_not_wait_for_ever(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    step = llm.engine.step

    def slowly() -> Any:
        time.sleep(0.05)
        return step()

    with serving(llm, drain_timeout_s=0.2) as live:
        monkeypatch.setattr(llm.engine, "step", slowly)
        sock = _send(live, LONG | {"stream": True})
        assert wait_until(lambda: llm.engine.has_work)
        live.server.ask_to_stop(0)
        sock.settimeout(10)
        data = b""
        while chunk := sock.recv(1 << 16):
            data += chunk
        sock.close()
        assert b"shutting_down" in data
        assert wait_until(lambda: live.codes == [0])
