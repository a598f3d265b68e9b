"""Prometheus metrics with the labels that vLLM gives its own: `model_name` and `engine`."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.errors import MissingExtraError

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram
except ImportError as error:
    raise MissingExtraError("prometheus-client", "server") from error

ENGINE = "0"  # a server has one
LABELS = ("model_name", "engine")

# Buckets of vLLM's, so that its dashboards and recorded quantiles compare.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
    *(1920, 7680),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
OUTPUTS = (1, 2, 5, 10, 20)
TREE_NODES = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)


def round_buckets(highest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `highest`: vLLM's buckets for numbers of tokens."""
    powers = (10**i for i in range(len(str(highest))))
    return [float(m * power) for power in powers for m in (1, 2, 5) if m * power <= highest]


class ByLabel:
    """A counter with one more label; its children are made when they are first asked for.

    Args:
        counter: with the labels of `LABELS` and one more.
        model_name: the value of the first.
        most: how many children there may be; values beyond count as "other". None for no limit.
    """

    def __init__(self, counter: Counter, model_name: str, most: int | None = None) -> None:
        self._counter = counter
        self._model_name = model_name
        self._most = most
        self._children: dict[str, Counter] = {}

    def __getitem__(self, value: str) -> Counter:
        child = self._children.get(value)
        if child is None:
            if self._most is not None and len(self._children) >= self._most:
                value = "other"
            child = self._counter.labels(self._model_name, ENGINE, value)
            self._children[value] = child
        return child


class Families:
    """Makes metrics of one model in one registry."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name

    def counter(self, name: str, text: str) -> Counter:
        """A counter; `_total` is added to its name on the wire."""
        counter = Counter(name, text, LABELS, registry=self._registry)
        return counter.labels(self._model_name, ENGINE)

    def counters(
        self, name: str, text: str, label: str, known: Sequence[str] = (), most: int | None = None
    ) -> ByLabel:
        """A counter for each value of a label; those `known` are shown from the start, at 0."""
        family = Counter(name, text, (*LABELS, label), registry=self._registry)
        counters = ByLabel(family, self._model_name, most)
        for value in known:
            counters[value]
        return counters

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        """A histogram with the given upper bounds, infinity besides."""
        histogram = Histogram(name, text, LABELS, registry=self._registry, buckets=buckets)
        return histogram.labels(self._model_name, ENGINE)
