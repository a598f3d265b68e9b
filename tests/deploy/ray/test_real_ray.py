"""Replicas and a draft actor on a real local cluster, killed and slowed down."""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Callable
from time import monotonic, sleep

import pytest

from draftwood.errors import CapacityError
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from tests.deploy.ray.conftest import Front

PROMPTS = [f"{word} {i} once upon a time" for i in range(5) for word in ("a", "the", "no", "my")]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = GREEDY.but(temperature=0.9, seed=11)


def wanted(plain: LLM, prompts: list[str], params: SamplingParams) -> list[str]:
    """The texts of one process."""
    each = [params.but(seed=(params.seed or 0) + place) for place in range(len(prompts))]
    return [output.text for output in plain.generate(prompts, each)]


def until(true: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether something becomes true in time."""
    end = monotonic() + seconds
    while not true():
        if monotonic() > end:
            return False
        sleep(0.1)
    return True


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_those_of_one_process(front: Front, plain: LLM, params: SamplingParams) -> None:
    texts = front.texts(PROMPTS[:6], params)
    assert texts == wanted(plain, PROMPTS[:6], params)
    assert len(set(texts)) == 6


def test_the_draft_actor_drafts(front: Front, plain: LLM) -> None:
    before = front.drafts()
    front.texts(PROMPTS[:1], GREEDY.but(max_tokens=100))
    after = front.drafts()
    assert after["hit"] + after["waited"] > before["hit"] + before["waited"]


def test_every_stream_ends_right_when_a_replica_is_killed(front: Front, plain: LLM) -> None:
    params = SAMPLED.but(max_tokens=120)
    expected = wanted(plain, PROMPTS, params)
    assert until(lambda: len(front.fleet.names) >= 2)
    pids = {name: front.pid(name) for name in front.fleet.names}
    lock, killed, retries = threading.Lock(), list[str](), front.fleet.num_retries

    def kill(text: str) -> None:
        """When some text has been read, the replica that has most to do."""
        with lock:
            if len(text) > 20 and not killed:
                busiest = max(pids, key=front.fleet.router.requests)
                killed.append(busiest)
                os.kill(pids[busiest], signal.SIGKILL)

    texts = front.texts(PROMPTS, params, kill)
    assert killed
    assert front.fleet.num_retries > retries  # it was in the middle of some
    assert texts == expected
    assert until(lambda: len(front.fleet.names) >= 2)  # Serve has started another
    assert front.fleet.num_open == 0


def test_load_brings_another_replica_and_calm_takes_it_away(front: Front, plain: LLM) -> None:
    seen: set[int] = set()

    def count(text: str) -> None:
        seen.add(len(front.fleet.names))

    end, params = monotonic() + 40, GREEDY.but(max_tokens=200)
    while 3 not in seen and monotonic() < end:
        assert front.texts(PROMPTS[:12], params, count) == wanted(plain, PROMPTS[:12], params)
    assert 3 in seen
    assert until(lambda: len(front.fleet.names) == 2, 40)
    assert front.texts(PROMPTS[:2], GREEDY) == wanted(plain, PROMPTS[:2], GREEDY)


def test_a_draft_actor_that_is_killed_and_comes_back(front: Front, plain: LLM) -> None:
    import ray

    [actor] = front.application.actors
    pid, killed = ray.get(actor.pid.remote()), threading.Event()

    def kill(text: str) -> None:
        if len(text) > 20 and not killed.is_set():
            killed.set()
            os.kill(pid, signal.SIGKILL)

    params = SAMPLED.but(max_tokens=150)
    assert front.texts(PROMPTS[:4], params, kill) == wanted(plain, PROMPTS[:4], params)
    assert killed.is_set()
    assert until(lambda: _pid(actor) not in (None, pid))
    before = front.drafts()

    def rejoined() -> bool:
        assert front.texts(PROMPTS[4:6], SAMPLED) == wanted(plain, PROMPTS[4:6], SAMPLED)
        now = front.drafts()
        return now["hit"] + now["waited"] > before["hit"] + before["waited"]

    assert until(rejoined, 40)


def _pid(actor: object) -> int | None:
    import ray

    try:
        return int(ray.get(actor.pid.remote(), timeout=5))  # type: ignore[attr-defined]
    except ray.exceptions.RayError:
        return None


def test_a_slow_draft_actor_holds_nobody_up(front: Front, plain: LLM) -> None:
    import ray

    [actor] = front.application.actors
    paused = actor.pause.remote(6.0)
    begin = monotonic()
    texts = front.texts(PROMPTS[:2], GREEDY)
    assert texts == wanted(plain, PROMPTS[:2], GREEDY)
    done, _ = ray.wait([paused], timeout=0)
    assert not done, f"it took {monotonic() - begin} s"
    ray.get(paused)


def test_metrics_come_from_all_replicas(front: Front) -> None:
    def read() -> str:
        with urllib.request.urlopen(f"{front.url}/metrics") as response:
            return str(response.read().decode())

    def all_there() -> bool:
        body = read()
        return all(
            f'vllm:generation_tokens_total{{engine="{name}"' in body for name in front.fleet.names
        )

    assert until(all_there)


def test_what_the_cluster_has_not_is_said_at_once(front: Front) -> None:
    from draftwood.deploy.ray.cluster import Need

    with pytest.raises(CapacityError, match=r"2 GPUs are needed \(2 x 1 \(replica\)\) and 0 are"):
        front.cluster.check([Need("replica", 2, gpus=1.0)])
    with pytest.raises(CapacityError, match="900 processors are needed"):
        front.cluster.check([Need("replica", 1, 800), Need("draft actor", 1, 100)])
