"""`draftwood bench scale`: the router of replicas at a size that no test machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.bench.options import Out
from draftwood.bench.output import print_json, progress_bar
from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from draftwood.bench.scale import ScalePlan

_STEPS = 50  # of the bar, for each policy


def scale(
    replicas: Annotated[int, typer.Option(help="How many.")] = 1000,
    requests: Annotated[int, typer.Option(help="Turns of all conversations, about.")] = 60_000,
    load: Annotated[
        float, typer.Option(help="Work offered, with nothing cached, over what they can do.")
    ] = 0.7,
    failures: Annotated[int, typer.Option(help="Replicas that die in the middle.")] = 0,
    policies: Annotated[
        str, typer.Option(help="Comma-separated: prefix, least-queue, round-robin.")
    ] = "prefix,least-queue,round-robin",
    seed: Annotated[int, typer.Option(help="Of the traffic and the failures.", min=0)] = 0,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the points as JSON.")] = False,
) -> None:
    """Simulate the router of `serve --ray`: hit rate, balance and waits, by policy.

    The router is the real one; replicas are service times of the 1.5B model on two cores, and the traffic is made up: conversations that come back, system prompts and templates of unequal popularity, jobs, bursts. The same seed gives the same traffic to every policy.
    """  # noqa: E501
    from draftwood.bench import scale as measuring
    from draftwood.bench.records import open_writer
    from draftwood.bench.scale_trace import TracePlan
    from draftwood.bench.tables import console, scale_table

    plan = measuring.ScalePlan(
        replicas=replicas,
        load=load,
        failures=failures,
        seed=seed,
        trace=TracePlan(requests=requests),
    )
    names = _policies(policies)
    points = []
    with open_writer(out) as writer:
        writer.write(_fingerprint(plan))
        trace = measuring.make_traffic(plan)
        with _progress(trace.num_requests, names) as ended:
            for name in names:
                points.append(measuring.measure(plan, name, trace, ended(name)))
                writer.write(points[-1].to_json())
    if as_json:
        print_json([point.to_json() for point in points])
    else:
        console().print(scale_table(points))


def _policies(text: str) -> list[str]:
    from draftwood.bench.scale import POLICIES

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"unknown policy {name!r}: known are {', '.join(POLICIES)}")
    if not names:
        raise ConfigError(f"policies is empty: known are {', '.join(POLICIES)}")
    return list(dict.fromkeys(names))


def _fingerprint(plan: ScalePlan) -> dict[str, Any]:
    from draftwood.bench.fingerprint import environment

    return {
        "type": "fingerprint",
        "command": "scale",
        "model": {"name": "simulated replicas", "dtype": "service times"},
        "replicas": plan.replicas,
        "requests": plan.trace.requests,
        "load": plan.load,
        "failures": plan.failures,
        "seed": plan.seed,
        "plan": plan.to_json(),
        "environment": environment(),
    }


@contextmanager
def _progress(
    num_requests: int, policies: list[str]
) -> Iterator[Callable[[str], Callable[[], None]]]:
    """Gives what is to be called after each request of a policy; a bar while that is a terminal."""
    step = max(1, num_requests // _STEPS)
    with progress_bar(len(policies) * (num_requests // step)) as watch:

        def ended(policy: str) -> Callable[[], None]:
            count = 0

            def one() -> None:
                nonlocal count
                count += 1
                if count % step == 0:
                    watch(policy, f"{count} requests")

            return one

        yield ended
