"""The simulation behind `bench scale`: its traffic, its replicas, and what it finds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.bench.check import Records, check_document
from draftwood.bench.record_file import load_record
from draftwood.bench.report import make_report
from draftwood.bench.scale import POLICIES, ScalePlan, ScalePoint, make_traffic, measure
from draftwood.bench.scale_replica import BlockCache, Job, Replica, Service
from draftwood.bench.scale_sim import Events, Keys, Simulation
from draftwood.bench.scale_trace import Talk, TracePlan, make_trace
from draftwood.cli.app import run as run_command
from draftwood.errors import ConfigError
from draftwood.serve.router import Router

SERVICE = Service(round_s=0.02, row_s=0.005, prefill_s=0.001, chunk=64, slots=3, blocks=40)
PLAN = ScalePlan(replicas=12, trace=TracePlan(requests=1200))


def job(name: int, num_tokens: int, answer: int) -> Job:
    """A request that shares nothing with those of other names."""
    keys = [bytes([name, i]) for i in range((num_tokens + answer) // SERVICE.block_size)]
    return Job(keys[: num_tokens // SERVICE.block_size], keys, num_tokens, answer)


# --- traffic ----------------------------------------------------------------------------------


def test_traffic_is_drawn_from_its_seed() -> None:
    plan = TracePlan(requests=2000)
    assert make_trace(plan, 3, 10.0) == make_trace(plan, 3, 10.0)
    assert make_trace(plan, 3, 10.0) != make_trace(plan, 4, 10.0)


def test_traffic_is_what_was_asked_for() -> None:
    plan = TracePlan(requests=20_000)
    trace = make_trace(plan, 0, 50.0)
    assert trace.num_requests == pytest.approx(20_000, rel=0.1)
    assert trace.num_requests == sum(len(talk.messages) for talk in trace.talks)
    assert trace.span_s == 400.0
    assert all(a.start_s <= b.start_s for a, b in pairwise(trace.talks))
    assert max(talk.start_s for talk in trace.talks) <= 400.0 + plan.job_s
    assert len({talk.number for talk in trace.talks}) == len(trace.talks)
    apps = Counter(talk.shared[0][0] for talk in trace.talks).most_common()
    assert apps[0][1] > 5 * apps[20][1]
    for talk in trace.talks:
        turns = [talk.prompt_tokens(i) for i in range(len(talk.messages))]
        assert turns == sorted(turns)
        assert turns[-1] <= plan.context or len(turns) == 1
        assert len(talk.messages) == len(talk.answers) == len(talk.thinks_s) + 1


def test_arrivals_come_in_bursts() -> None:
    calm = replace(TracePlan(requests=20_000, job_share=0.0), busy=1.0)
    spread = []
    for plan in (calm, replace(calm, busy=4.0)):
        seconds = Counter(int(talk.start_s) for talk in make_trace(plan, 1, 20.0).talks)
        mean = sum(seconds.values()) / 1000
        spread.append(sum((seconds[i] - mean) ** 2 for i in range(1000)) / 1000 / mean)
    assert spread[0] < 1.5 < spread[1]  # variance over mean: 1 for a Poisson process


def test_keys_are_shared_as_far_as_prompts_are() -> None:
    keys = Keys(10)
    plain = Talk(0, 0.0, ((7, 35),), (5,), (5,), ())
    other = Talk(1, 0.0, ((7, 35),), (5,), (5,), ())
    template = Talk(2, 0.0, ((7, 35), (9, 80)), (5,), (5,), ())
    assert keys.of(plain, 40)[:3] == keys.of(other, 40)[:3] == keys.of(template, 85)[:3]
    assert len({*keys.of(plain, 40), *keys.of(other, 40)}) == 5  # block 3 has tokens of its own
    assert len(keys.of(template, 85)) == len(set(keys.of(template, 85))) == 8
    assert keys.of(plain, 45) == keys.of(plain, 40) == keys.of(plain, 60)[:4]
    assert len(keys.of(plain, 20)) == 2


# --- a replica --------------------------------------------------------------------------------


def served(jobs: list[tuple[float, Job]]) -> dict[int, tuple[float, float]]:
    """When each job got its first token, and ended."""
    replica, waiting = Replica(SERVICE), sorted(jobs, key=lambda pair: pair[0])
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    while len(last) < len(jobs):
        now = replica.next_s()
        if waiting and waiting[0][0] <= now:
            now, one = waiting.pop(0)
            got, ended = replica.submit(one, now)
        else:
            got, ended = replica.advance(now)
        first.update((id(one), now) for one in got)
        last.update((id(one), now) for one in ended)
    return {i: (first[id(one)], last[id(one)]) for i, (_, one) in enumerate(jobs)}


def test_a_request_alone() -> None:
    [(first, last)] = served([(1.0, job(0, 64 * 5, 11))]).values()
    assert first == pytest.approx(1.0 + 5 * (0.02 + 64 * 0.001))
    assert last == pytest.approx(first + 10 * 0.025)


def rounds(jobs: list[Job]) -> list[float]:
    """When each of some jobs that come together ends, counted round by round, without a cache."""
    now, waiting, reading = 0.0, list(range(len(jobs))), []
    writing: dict[int, float] = {}
    read = {i: float(one.num_tokens) for i, one in enumerate(jobs)}
    ends = [0.0] * len(jobs)
    while waiting or reading or writing:
        while waiting and len(reading) + len(writing) < SERVICE.slots:
            reading.append(waiting.pop(0))
        chunk = min(read[reading[0]], SERVICE.chunk) if reading else 0.0
        now += SERVICE.round_s + len(writing) * SERVICE.row_s + chunk * SERVICE.prefill_s
        for i in [*writing]:
            writing[i] -= 1
            if writing[i] <= 0:
                ends[i] = now
                del writing[i]
        if reading:
            read[reading[0]] -= chunk
            if read[reading[0]] <= 0:
                i = reading.pop(0)
                writing[i] = jobs[i].answer - 1
                if not writing[i]:
                    ends[i] = now
                    del writing[i]
    return ends


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(2, 40)), min_size=1, max_size=8))
def test_rates_are_those_of_rounds(sizes: list[tuple[int, int]]) -> None:
    """Prompts of whole chunks: then a stretch of constant rates is a number of whole rounds."""
    jobs = [job(i, 64 * chunks, answer) for i, (chunks, answer) in enumerate(sizes)]
    fluid = [end for _, end in served([(0.0, one) for one in jobs]).values()]
    assert fluid == pytest.approx(rounds(jobs), abs=2 * len(jobs) * (0.02 + 0.015 + 0.064))


def test_what_was_read_is_not_read_again() -> None:
    again = job(1, 320, 3)
    times = served([(0.0, job(1, 320, 3)), (10.0, again)])
    assert again.cached == 319
    assert times[1][0] - 10.0 < (times[0][0]) / 50


def test_slots_are_waited_for() -> None:
    times = served([(0.0, job(i, 64, 50)) for i in range(4)])
    assert times[3][0] > min(times[i][1] for i in range(3))


def test_a_cache_forgets_the_oldest_end_and_tells() -> None:
    cache = BlockCache(4)
    cache.publish([b"a0", b"a1", b"a2"])
    cache.publish([b"b0", b"b1"])
    assert cache.take_evicted() == [b"a2"]
    assert (cache.match([b"a0", b"a1", b"a2"]), cache.match([b"b0", b"b1", b"b2"])) == (2, 2)
    cache.publish([b"c0"])
    cache.publish([b"a0", b"a1"])
    assert b"a1" not in cache.take_evicted()
    assert cache.take_evicted() == []


# --- the fleet --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def points() -> dict[str, ScalePoint]:
    """One for each policy."""
    trace = make_traffic(PLAN)
    return {policy: measure(PLAN, policy, trace, lambda: None) for policy in POLICIES}


def test_prefixes_are_found_and_nobody_waits_for_it(points: dict[str, ScalePoint]) -> None:
    prefix, queue, turns = (points[name] for name in ("prefix", "least-queue", "round-robin"))
    assert prefix.hit_rate > 1.5 * max(queue.hit_rate, turns.hit_rate)
    assert prefix.ttft_p50_s < queue.ttft_p50_s / 3
    assert prefix.ttft_p99_s < min(queue.ttft_p99_s, turns.ttft_p99_s)
    assert prefix.latency_p99_s < min(queue.latency_p99_s, turns.latency_p99_s)
    assert prefix.balance < 2.5
    for point in points.values():
        assert point.hit_rate < point.possible_hit_rate
        assert point.hit_rate == pytest.approx(point.believed_hit_rate, abs=0.1)
        assert point.ttft_p50_s <= point.ttft_p95_s <= point.ttft_p99_s
        assert 0 < point.decision_us < 10_000


def timeless(point: ScalePoint) -> ScalePoint:
    return replace(point, decision_us=0.0, decision_p99_us=0.0)


def test_the_same_plan_gives_the_same_point(points: dict[str, ScalePoint]) -> None:
    ended = []
    trace = make_traffic(PLAN)
    point = measure(PLAN, "prefix", trace, lambda: ended.append(1))
    assert timeless(point) == timeless(points["prefix"])
    assert len(ended) == trace.num_requests


@pytest.mark.parametrize("policy", POLICIES)
def test_failures_are_survived_by_every_request(policy: str) -> None:
    plan = replace(PLAN, failures=4)
    trace = make_traffic(plan)
    router = POLICIES[policy](block_size=32, max_blocks=500)
    simulation = Simulation(router, plan.service, plan.replicas, plan.report_s)
    dead = Events((1, 3, 8, 9), trace.span_s / 2, plan.noticed_s, plan.restart_s)
    outcome = simulation.run(trace, dead)
    turns = {(request.talk.number, request.turn) for request in outcome.requests}
    assert len(turns) == len(outcome.requests) == trace.num_requests
    assert any(request.retried for request in outcome.requests)
    for request in outcome.requests:
        asked = request.talk.prompt_tokens(request.turn) + request.talk.answers[request.turn]
        assert request.num_tokens + request.answer == asked
        assert request.come_s < request.first_s <= request.end_s
    assert sorted(router.replicas) == sorted(f"replica-{i}" for i in range(plan.replicas))
    assert all(router.requests(name) == 0 for name in router.replicas)


def test_the_router_counts_on_what_is_there() -> None:
    """Without bursts to overtake it, belief and truth are the same but for what was evicted."""
    plan = replace(PLAN, load=0.1, trace=TracePlan(requests=600, job_share=0.0))
    point = measure(plan, "prefix", make_traffic(plan), lambda: None)
    assert point.believed_hit_rate == pytest.approx(point.hit_rate, abs=0.01)


# --- the command ------------------------------------------------------------------------------


def test_the_command_and_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scale.jsonl"
    size = ["--replicas", "8", "--requests", "300", "--failures", "1"]
    assert run_command(["bench", "scale", *size, "--out", str(path)]) == 0
    assert "round-robin" in capsys.readouterr().out
    record = load_record(path)
    rows = record.of("scale")
    assert [row["policy"] for row in rows] == list(POLICIES)
    assert record.fingerprint["plan"]["service"]["slots"] == 8
    assert rows[0]["hit_rate"] > rows[1]["hit_rate"]
    document = tmp_path / "doc.md"
    rate, p99 = rows[0]["hit_rate"], rows[0]["ttft_p99_s"]
    text = """# A

8 replicas. Record: `scale.jsonl`.

| | cached | first token p99, s |
|---|---|---|
| `prefix` | {:.1%} | {:.2f} |
"""
    document.write_text(text.format(rate, p99))
    assert check_document(document, Records(tmp_path)) == []
    document.write_text(text.format(rows[1]["hit_rate"], rows[0]["ttft_p50_s"]))
    assert len(check_document(document, Records(tmp_path))) == 2
    make_report([record], tmp_path / "report.html")
    assert "least-queue" in (tmp_path / "report.html").read_text()


def test_json_and_chosen_policies(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--replicas", "4", "--requests", "100", "--policies", "round-robin", "--json"]
    assert run_command(["bench", "scale", *size]) == 0
    [point] = json.loads(capsys.readouterr().out)
    assert point["policy"] == "round-robin"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--replicas", "0"], "replicas is 0"),
        (["--requests", "0"], "requests is 0"),
        (["--load", "0"], "load is 0"),
        (["--replicas", "3", "--failures", "3"], "failures is 3"),
        (["--policies", "best"], "unknown policy 'best'"),
        (["--policies", ","], "policies is empty"),
    ],
)
def test_mistakes(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "scale", *options]) == 2
    assert words in capsys.readouterr().err


def test_plans_are_checked() -> None:
    with pytest.raises(ConfigError, match="load is nan"):
        ScalePlan(replicas=2, load=float("nan"))
    assert isinstance(POLICIES["prefix"](), Router)
