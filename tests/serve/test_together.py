"""The text of a request is its own: whoever else is served beside it, and whoever goes away."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from draftwood.llm import LLM
from tests.serve.conftest import Live, serving

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "tree", "def", "naïve", "東京")


def _requests(count: int) -> list[dict[str, Any]]:
    chance = random.Random(3)
    requests = []
    for _ in range(count):
        words = [chance.choice(_WORDS) for _ in range(chance.randrange(1, 30))]
        body: dict[str, Any] = {
            "prompt": " ".join(words),
            "max_tokens": chance.randrange(1, 60),
            "temperature": chance.choice([0, 0.7, 1.3]),
            "seed": chance.randrange(1000),
            "ignore_eos": chance.random() < 0.5,
        }
        more: list[dict[str, Any]] = [
            {"top_k": 5},
            {"top_p": 0.8},
            {"min_p": 0.1},
            {"frequency_penalty": 1.0, "presence_penalty": 0.5},
            {"repetition_penalty": 1.3},
            {"n": 2},
            {"speculation": False},
            {"max_tree_nodes": 3},
            {"stop": ["e", "ab"]},
            {"logprobs": 2},
            {"cache_salt": "tenant"},
        ]
        body["priority"] = chance.randrange(-2, 3)
        requests.append(body | chance.choice(more))
    return requests


def _texts(live: Live, body: dict[str, Any]) -> list[tuple[str, str]]:
    reply = live.ask("POST", "/v1/completions", body)
    assert reply.status == 200, reply
    return [(choice["text"], choice["finish_reason"]) for choice in reply.json["choices"]]


def _hang_up(live: Live, body: dict[str, Any], seconds: float) -> None:
    """Asks, and is gone after so many seconds, in whatever phase that is."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(live.address) as sock:
        sock.sendall(head.encode() + content)
        time.sleep(seconds)


def test_each_of_32_gets_the_text_it_gets_alone(make_llm: Callable[..., LLM]) -> None:
    """Few places, small batches and little KV: they wait, are cut up, and are put back."""
    llm = make_llm(max_num_seqs=6, max_batch_tokens=48, kv_memory=24 * 16 * 512)
    requests = _requests(32)
    with serving(llm) as live:
        alone = [_texts(live, body) for body in requests]
        llm.engine.prefix.clear()
        stop, start = threading.Event(), threading.Barrier(40)

        def vanish(place: int) -> None:
            """A client that never reads what it asked for: its time is up, or it hangs up."""
            start.wait()
            chance = random.Random(place)
            while not stop.is_set():
                body = chance.choice(requests) | {"stream": chance.random() < 0.5}
                seconds = chance.random() * 0.2 + 0.01
                if place % 2:
                    live.ask("POST", "/v1/completions", body | {"timeout": seconds})
                else:
                    _hang_up(live, body, seconds)

        def ask(body: dict[str, Any]) -> list[tuple[str, str]]:
            start.wait()
            return _texts(live, body)

        with ThreadPoolExecutor(40) as pool:
            vanishing = [pool.submit(vanish, place) for place in range(8)]
            together = list(pool.map(ask, requests))
            stop.set()
            for one in vanishing:
                one.result()
        live.assert_idle()
    assert together == alone
    assert llm.engine.num_preemptions > 4  # for memory and for priority
    assert len({text for texts in alone for text, _ in texts}) > 25


def test_a_long_prompt_does_not_hold_up_who_decodes(make_llm: Callable[..., LLM]) -> None:
    """While its prompt is computed in chunks, another request gets a token every round."""
    llm = make_llm(max_batch_tokens=16)
    rounds: list[tuple[int, int]] = []

    class _Watch:
        def on_round(self, round_: Any) -> None:
            rounds.append((round_.num_prefill_rows, len(round_.request_ids)))

    with serving(llm) as live, live.client() as client:
        stream = client.completions.create(
            model="tiny",
            prompt="the",
            max_tokens=100,
            stream=True,
            extra_body={"ignore_eos": True, "speculation": False},
        )
        next(iter(stream))
        llm.engine.observers.append(_Watch())
        _texts(live, {"prompt": "the lazy dog jumps " * 12, "max_tokens": 1})
        list(stream)
    beside = [decoding for prefilled, decoding in rounds if prefilled]
    assert len(beside) > 5
    assert all(decoding >= 1 for decoding in beside[:5])
