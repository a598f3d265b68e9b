"""After a storm of clients that do everything wrong, nothing is left of them in the process."""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from draftwood.engine.sequence import Sequence
from draftwood.llm import LLM
from draftwood.serve.generation import Generation, Outbox
from tests.serve.conftest import Live, serving, wait_until

_GOOD = {"prompt": "the quick brown fox", "max_tokens": 30, "ignore_eos": True}


def _request(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {size}\r\n\r\n".encode() + body


def _sent(chance: random.Random) -> bytes:
    """A request of some kind, good or not."""
    good = json.dumps(_GOOD | {"stream": chance.random() < 0.6, "n": chance.choice([1, 1, 4])})
    return chance.choice(
        [
            *[_request(good.encode())] * 4,
            _request(good.encode()[:-5]),
            _request(good.encode(), len(good) + 100),  # the rest never comes
            _request(b'{"prompt": "\xff\xfe"}'),
            _request(b'{"prompt": "\\ud800"}'),
            _request(b"[" * 10_000),
            _request(b"x" * 200_000),
            b"GET / HTTP/1.1\r\n",
            b"\x16\x03\x01 this is no HTTP\r\n\r\n",
        ]
    )


def _visit(live: Live, seed: int) -> None:
    """Sends it, perhaps in two parts, reads as much as it likes, and is gone."""
    chance = random.Random(seed)
    data = _sent(chance)
    cut = chance.randrange(len(data)) if chance.random() < 0.3 else len(data)
    with socket.create_connection(live.address, timeout=20) as sock:
        try:
            sock.sendall(data[:cut])
            time.sleep(chance.random() * 0.03)
            sock.sendall(data[cut:])
            if chance.random() < 0.5:
                sock.settimeout(0.3)
                sock.recv(chance.randrange(1, 5000))
        except OSError:
            pass  # the server has hung up, or has nothing to say to this


def _alive() -> int:
    """Objects of requests that anything still refers to."""
    gc.collect()
    kinds = (Generation, Outbox, Sequence)
    return sum(type(one) in kinds for one in gc.get_objects())


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted in /proc")
def test_a_storm_leaves_nothing(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=4)
    with serving(llm, max_body=100_000, max_queue=8) as live:
        assert live.ask("POST", "/v1/completions", _GOOD).status == 200
        live.assert_idle()
        files, threads, objects = _num_files(), threading.active_count(), _alive()
        for turn in range(2):
            with ThreadPoolExecutor(12) as pool:
                visits = [pool.submit(_visit, live, 1000 * turn + i) for i in range(150)]
                if turn:  # and in the middle of it the engine fails
                    engine = llm.engine
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(engine, "step", _broken)
                        assert wait_until(lambda: getattr(llm, "engine", engine) is not engine)  # noqa: B023
                    del engine  # the broken one has its requests still
                for visit in visits:
                    visit.result()
            live.assert_idle()
        assert wait_until(lambda: _num_files() <= files, 5)
        assert threading.active_count() <= threads
        assert wait_until(lambda: _alive() <= objects, 5)
        replies = [live.ask("POST", "/v1/completions", _GOOD | {"seed": 3}) for _ in range(2)]
        assert [reply.status for reply in replies] == [200, 200]
        assert replies[0].json["choices"] == replies[1].json["choices"]


def _broken() -> None:
    raise RuntimeError("broken on purpose")
