"""What Prometheus reads from the engine at the moment it asks: queues, KV, the controller, tiers.

A scrape runs beside the engine's thread. It reads counts and copies, and changes nothing; a number
may be one round old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from draftwood import __version__
from draftwood.engine.engine import Engine
from draftwood.engine.sequence import Status
from draftwood.kv.tiers import TierCounters
from draftwood.serve.families import ENGINE, LABELS

_TIER_TEXTS = {
    "num_hits": ("hits", "KV blocks that the tier had, by tier."),
    "num_misses": ("misses", "KV blocks that were asked for and not had, by tier."),
    "num_stored": ("stored", "KV blocks written, by tier."),
    "num_dropped": ("dropped", "KV blocks not written: queue full, or the store does not work."),
    "num_corrupt": ("corrupt", "KV blocks found damaged, and so deleted and computed again."),
    "num_late": ("late", "Answers of the tier that came after the limit."),
    "num_failures": ("failures", "Calls of the tier that failed."),
    "bytes_read": ("read_bytes", "Bytes of KV records read, by tier."),
    "bytes_written": ("written_bytes", "Bytes of KV records written, by tier."),
}


class EngineCollector(Collector):
    """Gauges and counters of one engine.

    Args:
        model_name: the label's value.
        engine: whose.
        num_queued: how many requests wait that the engine does not know yet.
    """

    def __init__(self, model_name: str, engine: Engine, num_queued: Callable[[], int]) -> None:
        self._values = (model_name, ENGINE)
        self._engine = engine
        self._num_queued = num_queued

    def describe(self) -> list[Metric]:
        """Nothing: names are checked when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of them, as they are now."""
        yield from self._requests()
        yield from self._blocks()
        yield from self._drafting()
        yield from self._store_counters()
        yield self._cache_config()
        yield self._info()

    def _requests(self) -> Iterator[Metric]:
        seqs = self._engine.unfinished
        running = sum(seq.status is Status.RUNNING for seq in seqs)
        waiting = sum(seq.status is Status.WAITING for seq in seqs) + self._num_queued()
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a place.", waiting)
        yield self._counter(
            "vllm:num_preemptions",
            "Running requests that were put back for others: for memory, or for a place.",
            self._engine.num_preemptions,
        )

    def _blocks(self) -> Iterator[Metric]:
        pool = self._engine.pool
        used: set[int] = set()
        for seq in self._engine.unfinished:
            used.update(seq.lease.block_table)
        free = pool.num_free
        cached = max(pool.num_blocks - free - len(used), 0)
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of KV blocks that requests hold; 1 means all.",
            len(used) / pool.num_blocks,
        )
        blocks = GaugeMetricFamily(
            "draftwood:kv_blocks",
            "KV blocks: held by requests, kept for reuse, free.",
            labels=(*LABELS, "state"),
        )
        for state, count in (("used", len(used)), ("cached", cached), ("free", free)):
            blocks.add_metric((*self._values, state), count)
        yield blocks

    def _drafting(self) -> Iterator[Metric]:
        controller, drafter = self._engine.controller, self._engine.drafter
        yield self._gauge(
            "draftwood:trust",
            "Accepted draft tokens over promised ones, as a moving average.",
            controller.trust,
        )
        yield self._gauge(
            "draftwood:round_draft_seconds",
            "Seconds of drafting a round, as a moving average.",
            controller.draft_s,
        )
        yield self._counter(
            "draftwood:drafter_failures",
            "Calls of the drafter that failed; such rounds go on without a draft.",
            drafter.num_failures,
        )

    def _store_counters(self) -> Iterator[Metric]:
        counters = self._engine.tiers.counters if self._engine.tiers else {}
        for field, (name, text) in _TIER_TEXTS.items():
            yield self._by_tier(field, f"draftwood:cache_tier_{name}", text, counters)

    def _by_tier(
        self, field: str, name: str, text: str, counters: dict[str, TierCounters]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=(*LABELS, "tier"))
        for tier, counts in counters.items():
            family.add_metric((*self._values, tier), asdict(counts)[field])
        return family

    def _cache_config(self) -> Metric:
        pool, spec = self._engine.pool, self._engine.model.spec.kv
        facts = {
            "engine": ENGINE,
            "block_size": str(pool.block_size),
            "num_gpu_blocks": str(pool.num_blocks),
            "cache_dtype": str(spec.dtype).removeprefix("torch."),
            "enable_prefix_caching": "True",
        }
        text = "How the KV memory is set up; vLLM's name for blocks is num_gpu_blocks."
        family = GaugeMetricFamily("vllm:cache_config_info", text, labels=tuple(facts))
        family.add_metric(tuple(facts.values()), 1)
        return family

    def _info(self) -> Metric:
        facts = {
            "version": __version__,
            "drafter": self._engine.drafter.name,
            "device": str(self._engine.pool.device),
        }
        family = GaugeMetricFamily(
            "draftwood:info", "What is running.", labels=(*LABELS, *facts.keys())
        )
        family.add_metric((*self._values, *facts.values()), 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family
