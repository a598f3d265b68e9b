"""The router at a thousand replicas, against policies that do not look at what is cached.

Made-up traffic (`scale_trace`), simulated replicas (`scale_replica`), the real `Router`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from draftwood.bench.scale_replica import Service
from draftwood.bench.scale_sim import Events, Outcome, Simulation
from draftwood.bench.scale_trace import Trace, TracePlan, make_trace
from draftwood.errors import ConfigError
from draftwood.serve.router import Costs, LeastQueue, RoundRobin, Router

POLICIES: dict[str, type[Router]] = {
    "prefix": Router,
    "least-queue": LeastQueue,
    "round-robin": RoundRobin,
}
_PILOT = 20_000  # requests: enough for means


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    """What is simulated.

    Attributes:
        replicas: how many.
        load: work offered, with nothing cached, over what the replicas can do.
        seed: of the traffic and of who fails.
        failures: replicas that die in the middle of it.
        noticed_s: seconds until the router is told; what was sent there meanwhile starts again.
        restart_s: seconds until a dead one is back, with nothing cached.
        report_s: seconds between the reports of a replica.
        warm_up: share of the time, from the beginning, that does not count.
        trace: the traffic.
        service: the replicas.
    """

    replicas: int
    load: float = 0.7
    seed: int = 0
    failures: int = 0
    noticed_s: float = 1.0
    restart_s: float = 30.0
    report_s: float = 5.0
    warm_up: float = 0.2
    trace: TracePlan = field(default_factory=lambda: TracePlan(requests=100_000))
    service: Service = field(default_factory=Service)

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}: it must be at least 1")
        if not 0 <= self.failures < self.replicas:
            raise ConfigError(
                f"failures is {self.failures}: it must be fewer than the {self.replicas} replicas"
            )
        if not self.load > 0:
            raise ConfigError(f"load is {self.load}: it must be above 0")
        if self.trace.requests < 1:
            raise ConfigError(f"requests is {self.trace.requests}: it must be at least 1")

    def to_json(self) -> dict[str, Any]:
        """The fields, for the fingerprint."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint:
    """What one policy achieved, warm-up left out.

    Attributes:
        policy: its name.
        num_requests: that counted.
        num_retried: that were started again elsewhere after a failure.
        hit_rate: share of prompt tokens that the replica had.
        believed_hit_rate: share that the router counted on.
        possible_hit_rate: share that somebody had been sent before.
        balance: the busiest replica's seconds of work over the mean.
        work_s: mean seconds of work of a replica.
        ttft_p50_s, ttft_p95_s, ttft_p99_s: seconds to the first token.
        latency_p50_s, latency_p95_s, latency_p99_s: seconds to the last one.
        decision_us, decision_p99_us: microseconds of the router for a request, here and now.
    """

    policy: str
    num_requests: int
    num_retried: int
    hit_rate: float
    believed_hit_rate: float
    possible_hit_rate: float
    balance: float
    work_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    latency_p50_s: float
    latency_p95_s: float
    latency_p99_s: float
    decision_us: float
    decision_p99_us: float

    def to_json(self) -> dict[str, Any]:
        """The fields of a `scale` line."""
        return {"type": "scale", **asdict(self)}


def costs(plan: ScalePlan, trace: Trace) -> Costs:
    """What the router is told, from what a replica is."""
    service = plan.service
    full_s = service.round_s + service.slots * service.row_s
    answer = trace.answer_tokens / trace.num_requests
    return Costs(
        prefill_s=service.prefill_s + full_s / service.chunk,
        running_s=service.row_s * answer,
        slots=service.slots,
        turn_s=_work_s(service, trace) / 2,
    )


def _work_s(service: Service, trace: Trace) -> float:
    """A request's share of a replica's time, with nothing cached and all slots taken."""
    full_s = service.round_s + service.slots * service.row_s
    reading = trace.prompt_tokens * (service.prefill_s + full_s / service.chunk)
    writing = trace.answer_tokens * full_s / service.slots
    return (reading + writing) / trace.num_requests


def make_traffic(plan: ScalePlan) -> Trace:
    """The traffic of a plan, at the rate that makes its load."""
    pilot = make_trace(replace(plan.trace, requests=_PILOT), plan.seed, 1.0)
    rate = plan.load * plan.replicas / _work_s(plan.service, pilot)
    return make_trace(plan.trace, plan.seed, rate)


def measure(plan: ScalePlan, policy: str, trace: Trace, on_end: Callable[[], None]) -> ScalePoint:
    """Serves a plan's traffic with one policy; `on_end` is told after each request."""
    service = plan.service
    router = POLICIES[policy](
        costs(plan, trace), block_size=service.block_size, max_blocks=service.blocks
    )
    simulation = Simulation(router, service, plan.replicas, plan.report_s, on_end)
    rng = np.random.default_rng([plan.seed, 1])
    dying = rng.choice(plan.replicas, plan.failures, replace=False).tolist()
    failures = Events(dying, trace.span_s / 2, plan.noticed_s, plan.restart_s)
    outcome = simulation.run(trace, failures)
    return _point(policy, outcome, trace.span_s * plan.warm_up, trace.span_s)


def _point(policy: str, outcome: Outcome, begin_s: float, end_s: float) -> ScalePoint:
    counted = [request for request in outcome.requests if begin_s <= request.come_s <= end_s]
    tokens = sum(request.num_tokens for request in counted)
    first = _quantiles([request.first_s - request.come_s for request in counted])
    last = _quantiles([request.end_s - request.come_s for request in counted])
    busy = np.array(outcome.busy_s)
    return ScalePoint(
        policy=policy,
        num_requests=len(counted),
        num_retried=sum(request.retried for request in counted),
        hit_rate=sum(request.cached for request in counted) / tokens,
        believed_hit_rate=sum(request.believed for request in counted) / tokens,
        possible_hit_rate=sum(request.possible for request in counted) / tokens,
        balance=float(busy.max() / busy.mean()),
        work_s=float(busy.mean()),
        ttft_p50_s=first[0],
        ttft_p95_s=first[1],
        ttft_p99_s=first[2],
        latency_p50_s=last[0],
        latency_p95_s=last[1],
        latency_p99_s=last[2],
        decision_us=1e6 * float(np.mean(outcome.decisions_s)),
        decision_p99_us=1e6 * float(np.quantile(outcome.decisions_s, 0.99)),
    )


def _quantiles(values: Sequence[float]) -> list[float]:
    return [float(value) for value in np.quantile(values, (0.5, 0.95, 0.99))]
