"""What Prometheus reads of checkpoints and of clients that came back."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from draftwood.serve.families import ENGINE, LABELS
from draftwood.serve.recovery import Recovery


class RecoveryCollector(Collector):
    """Counters of one server's checkpoints.

    Args:
        model_name: the label's value.
        recovery: whose.
    """

    def __init__(self, model_name: str, recovery: Recovery) -> None:
        self._values = (model_name, ENGINE)
        self._recovery = recovery

    def describe(self) -> list[Metric]:
        """Nothing: names are checked when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of them, as they are now."""
        yield from self._checkpoints()
        counts = self._recovery.counts
        for name, text, value in (
            ("resumed_requests", "Requests of an earlier process that went on.", "num_resumed"),
            ("resume_refused", "Requests of an earlier process that could not.", "num_lost"),
            ("reconnects", "Readers that came back for a request.", "num_reconnects"),
            ("reconnects_refused", "Readers that asked for what is not there.", "num_refused"),
            ("requests_expired", "Kept requests that nobody came back for.", "num_expired"),
        ):
            yield self._counter(name, text, getattr(counts, value))
        held, num_bytes = self._recovery.size()
        yield self._gauge("kept_requests", "Requests that clients may come back for.", held)
        yield self._gauge("kept_answer_bytes", "Bytes of answers that are kept.", num_bytes)

    def _checkpoints(self) -> Iterator[Metric]:
        stats = self._recovery.stats
        yield self._counter("checkpoints_written", "Checkpoints written.", stats.num_written)
        yield self._counter("checkpoints_failed", "Checkpoints not written.", stats.num_failed)
        yield self._counter("checkpoint_bytes", "Bytes of checkpoints.", stats.num_bytes)
        yield self._gauge(
            "checkpoint_left_out", "Requests without room in the last one.", stats.num_left_out
        )
        seconds = CounterMetricFamily(
            "draftwood:checkpoint_seconds",
            "Seconds for checkpoints, by thread; decoding waits for the engine's only.",
            labels=(*LABELS, "thread"),
        )
        seconds.add_metric((*self._values, "engine"), stats.engine_s)
        seconds.add_metric((*self._values, "writer"), stats.write_s)
        yield seconds

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"draftwood:{name}", text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"draftwood:{name}", text, labels=LABELS)
        family.add_metric(self._values, value)
        return family
