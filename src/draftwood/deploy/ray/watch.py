"""Asks the replicas how they fare: for the router, and for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from draftwood.deploy.ray.fleet import Fleet
from draftwood.deploy.ray.messages import Status
from draftwood.serve.router import Report

_EVERY_S = 2.0

Ask = Callable[[str], Awaitable[Status]]
"""The status of the replica of that name."""


class Watch:
    """Keeps the last status of each replica.

    Args:
        fleet: whose replicas.
        ask: one of them.
        every_s: seconds between two rounds of questions.
    """

    def __init__(self, fleet: Fleet, ask: Ask, every_s: float = _EVERY_S) -> None:
        self.statuses: dict[str, Status] = {}
        self._fleet = fleet
        self._ask = ask
        self._every_s = every_s

    async def run(self) -> None:
        """Asks, until it is cancelled."""
        while True:
            await self.once()
            await asyncio.sleep(self._every_s)

    async def once(self) -> None:
        """Asks all replicas; one that does not answer keeps its last status while it is there."""
        names = sorted(self._fleet.names)
        await asyncio.gather(*(self._one(name) for name in names))
        self.statuses = {name: self.statuses[name] for name in names if name in self.statuses}

    def render(self) -> tuple[bytes, str]:
        """What Prometheus reads: the metrics of all replicas, told apart by the label `engine`."""
        texts = {name: status.metrics.decode() for name, status in self.statuses.items()}
        front = (
            f"# TYPE draftwood:replicas gauge\ndraftwood:replicas {len(self._fleet.names)}\n"
            "# TYPE draftwood:request_retries_total counter\n"
            f"draftwood:request_retries_total {self._fleet.num_retries}\n"
        )
        return (merged(texts) + front).encode(), CONTENT_TYPE_PLAIN_0_0_4

    async def _one(self, name: str) -> None:
        with suppress(Exception):  # a replica that is lost is found out elsewhere
            async with asyncio.timeout(self._every_s):
                status = await self._ask(name)
            self.statuses[name] = status
            report = Report(tokens=status.num_waiting_tokens, requests=status.num_open)
            self._fleet.router.report(name, report)


def merged(texts: Mapping[str, str]) -> str:
    """Expositions of several replicas as one; the label `engine` says whose a sample is."""
    families: dict[str, tuple[Metric, list[str]]] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            known = families.setdefault(family.name, (family, []))
            for sample in family.samples:
                labels = {**sample.labels, "engine": name}
                shown = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
                known[1].append(f"{sample.name}{{{shown}}} {sample.value}")
    lines: list[str] = []
    for family, samples in families.values():
        total = "_total" if family.type == "counter" else ""
        lines.append(f"# HELP {family.name}{total} {family.documentation}")
        lines.append(f"# TYPE {family.name}{total} {family.type}")
        lines += samples
    return "\n".join(lines) + "\n" if lines else ""


def _escaped(value: str) -> str:
    """A label's value as it is written."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
