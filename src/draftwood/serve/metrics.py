"""Prometheus metrics of a server: vLLM's names, so that its dashboards work, and our own.

`Metrics` is an observer of the engine: it counts rounds as they happen and requests as they end.
What is read only when Prometheus asks is in `gauges.py`. docs/metrics.md says what each one means.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from draftwood.draft.base import Outcome
from draftwood.engine.engine import Engine
from draftwood.engine.observers import Round
from draftwood.engine.sequence import Sequence
from draftwood.errors import MissingExtraError
from draftwood.serve import families
from draftwood.serve.families import Families
from draftwood.serve.gauges import EngineCollector

try:
    import prometheus_client as prometheus
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtraError("prometheus-client", "server") from error

_PHASES = ("draft", "target", "verify", "commit")
_REASONS = ("stop", "length", "abort", "error")
_TIERS = ("ram", "disk", "redis")
_COMPUTED, _LOCAL, _EXTERNAL = "local_compute", "local_cache_hit", "external_kv_transfer"
_MAX_SOURCES = 16  # drafters name them: a label must not grow without end


class Metrics:
    """An observer that counts, and gives what it counted to Prometheus.

    Everything but `render` belongs to the engine's thread.

    Args:
        model_name: value of the label on every metric.
        registry: where the metrics are kept; None makes one, with the process's own facts in it.
    """

    def __init__(
        self, model_name: str, registry: prometheus.CollectorRegistry | None = None
    ) -> None:
        self._model_name = model_name
        self._registry = registry or _registry()
        make = Families(self._registry, model_name)
        self._rounds = _RoundMetrics(make)
        self._prompts = _PromptMetrics(make)
        self._make = make
        self._requests: _RequestMetrics | None = None
        self._engine: Engine | None = None
        self._collector: EngineCollector | None = None
        self._last_s: dict[str, float] = {}  # of requests that got a token: when they last did

    def bind(self, engine: Engine, queue_length: Callable[[], int] = lambda: 0) -> None:
        """Watches an engine from now on, and no other; adds itself to its observers.

        Args:
            engine: whose rounds are counted and whose state is shown.
            queue_length: requests that wait in front of the engine, which it does not know yet.
        """
        if self._requests is None:
            self._requests = _RequestMetrics(self._make, engine.model.spec.max_model_len)
        if self._collector is not None:
            self._registry.unregister(self._collector)
        self._collector = EngineCollector(self._model_name, engine, queue_length)
        self._registry.register(self._collector)
        self._engine = engine
        self._last_s.clear()
        if self not in engine.observers:
            engine.observers.append(self)

    def add(self, collector: Collector) -> None:
        """Shows what another part of the server counts as well."""
        self._registry.register(collector)

    def render(self) -> tuple[bytes, str]:
        """What Prometheus reads, and its content type. From any thread."""
        return prometheus.generate_latest(self._registry), prometheus.CONTENT_TYPE_PLAIN_0_0_4

    def on_round(self, round_: Round) -> None:
        """Counts a round."""
        now = perf_counter()
        num_tokens = 0
        for request_id, outcome in zip(round_.request_ids, round_.outcomes, strict=True):
            num_tokens += len(outcome.tokens)
            last_s = self._last_s.get(request_id)
            if last_s is None:
                self._begin(request_id)
            else:
                self._rounds.between_tokens.observe(now - last_s)
            self._last_s[request_id] = now
            if last_s is not None or outcome.verdict.num_drafted:
                self._rounds.count_tree(outcome)
        self._rounds.count(round_, num_tokens)

    def on_finished(self, seq: Sequence) -> None:
        """Counts a request that has ended, in whatever way. Call it once for each."""
        self._last_s.pop(seq.request_id, None)
        if seq.params.num_beams > 1 and seq.finish_reason != "abort":  # no tree of it was walked
            self._count_prompt(seq)
            self._rounds.tokens.inc(sum(len(s.output_ids) for s in (seq, *seq.others)))
        if self._requests is not None:
            self._requests.count(seq)

    def _begin(self, request_id: str) -> None:
        """A request got its first tokens."""
        for seq in self._engine.unfinished if self._engine else ():
            if seq.request_id == request_id:
                self._count_prompt(seq)

    def _count_prompt(self, seq: Sequence) -> None:
        self._prompts.count(seq, has_stores=bool(self._engine and self._engine.tiers))


class _RoundMetrics:
    """What every round adds to."""

    def __init__(self, make: Families) -> None:
        self.tokens = make.counter("vllm:generation_tokens", "Tokens generated.")
        self.between_tokens = make.histogram(
            "vllm:inter_token_latency_seconds",
            "Seconds between a request's tokens; those of one round come together.",
            families.TOKEN_S,
        )
        self._step = make.histogram(
            "vllm:iteration_tokens_total",
            "Prompt tokens computed and tokens generated in one round.",
            families.STEP_TOKENS,
        )
        self._rounds = make.counter("draftwood:rounds", "Target forwards.")
        self._picks = make.counter(
            "draftwood:request_rounds", "Rounds in which a request got tokens."
        )
        self._rows = make.counter("draftwood:rows", "Rows of target forwards, prompts included.")
        self._seconds = make.counters(
            "draftwood:phase_seconds", "Seconds of rounds by phase.", "phase", _PHASES
        )
        self._make_draft_metrics(make)

    def _make_draft_metrics(self, make: Families) -> None:
        spec = "vllm:spec_decode_num"
        self._drafts = make.counter(f"{spec}_drafts", "Trees verified that held a draft token.")
        self._drafted = make.counter(f"{spec}_draft_tokens", "Draft tokens verified.")
        self._accepted = make.counter(f"{spec}_accepted_tokens", "Draft tokens that were right.")
        self._by_position = make.counters(
            f"{spec}_accepted_tokens_per_pos",
            "Draft tokens that were right, by depth in the tree; 0 is the first.",
            "position",
        )
        self._nodes = make.histogram(
            "draftwood:tree_nodes",
            "Draft tokens verified for a request in a round; 0 is plain decoding.",
            families.TREE_NODES,
        )
        text = "Draft tokens %s, by who proposed them."
        self._drafted_by = make.counters(
            "draftwood:draft_tokens", text % "verified", "source", most=_MAX_SOURCES
        )
        self._accepted_by = make.counters(
            "draftwood:accepted_tokens", text % "that were right", "source", most=_MAX_SOURCES
        )

    def count(self, round_: Round, num_tokens: int) -> None:
        """Adds a round that gave so many tokens."""
        if round_.num_rows:
            self._rounds.inc()
            self._rows.inc(round_.num_rows)
            self._step.observe(round_.num_prefill_rows + num_tokens)
        self._picks.inc(len(round_.outcomes))
        self.tokens.inc(num_tokens)
        seconds = (round_.draft_s, round_.target_s, round_.verify_s, round_.commit_s)
        for phase, spent in zip(_PHASES, seconds, strict=True):
            self._seconds[phase].inc(spent)

    def count_tree(self, outcome: Outcome) -> None:
        """Adds a tree. Accepted is what a stop rule has not cut off again."""
        tree, verdict = outcome.tree, outcome.verdict
        self._nodes.observe(verdict.num_drafted)
        if not verdict.num_drafted:
            return
        num_accepted = min(verdict.num_accepted, len(outcome.tokens))
        self._drafts.inc()
        self._drafted.inc(verdict.num_drafted)
        self._accepted.inc(num_accepted)
        for position in range(num_accepted):
            self._by_position[str(position)].inc()
        for source in tree.sources[1:]:
            self._drafted_by[_drafter(source)].inc()
        for node in verdict.path[1 : num_accepted + 1]:
            self._accepted_by[_drafter(tree.sources[node])].inc()


class _PromptMetrics:
    """What a request adds to when its prompt is computed."""

    def __init__(self, make: Families) -> None:
        self._first_token = make.histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            families.FIRST_TOKEN_S,
        )
        self._tokens = make.counter("vllm:prompt_tokens", "Prompt tokens, cached ones included.")
        self._cached = make.counter("vllm:prompt_tokens_cached", "Prompt tokens that were cached.")
        self._by_source = make.counters(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens: computed, cached in RAM, cached on disk or in Redis.",
            "source",
            (_COMPUTED, _LOCAL, _EXTERNAL),
        )
        self._by_tier = make.counters(
            "draftwood:cached_tokens", "Prompt tokens by the tier that had them.", "tier", _TIERS
        )
        cache = "prefix_cache"
        self._asked = make.counter(f"vllm:{cache}_queries", "Prompt tokens looked for in RAM.")
        self._hits = make.counter(f"vllm:{cache}_hits", "Prompt tokens found in RAM.")
        self._asked_outside = make.counter(
            f"vllm:external_{cache}_queries", "Prompt tokens that RAM lacked."
        )
        self._hits_outside = make.counter(
            f"vllm:external_{cache}_hits", "Prompt tokens restored from disk or Redis."
        )

    def count(self, seq: Sequence, has_stores: bool) -> None:
        """Adds a request's prompt; `has_stores` says whether disk or Redis was asked for it."""
        metrics, length = seq.metrics, seq.num_prompt_tokens
        if metrics.first_token_s is not None:
            self._first_token.observe(metrics.first_token_s - metrics.arrival_s)
        cached = metrics.num_cached_tokens
        local = metrics.cached_by_tier.get("ram", 0)
        self._tokens.inc(length)
        self._cached.inc(cached)
        self._asked.inc(length)
        self._hits.inc(local)
        self._asked_outside.inc(length - local if has_stores else 0)
        self._hits_outside.inc(cached - local)
        for source, count in (
            (_COMPUTED, length - cached),
            (_LOCAL, local),
            (_EXTERNAL, cached - local),
        ):
            self._by_source[source].inc(count)
        for tier, count in metrics.cached_by_tier.items():
            self._by_tier[tier].inc(count)


class _RequestMetrics:
    """What a request adds to when it ends."""

    def __init__(self, make: Families, max_model_len: int) -> None:
        self._success = make.counters(
            "vllm:request_success", "Requests that ended, by why.", "finished_reason", _REASONS
        )
        sizes = families.round_buckets(max_model_len)
        self._prompt = make.histogram("vllm:request_prompt_tokens", "Prompt tokens.", sizes)
        self._computed = make.histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", sizes
        )
        self._output = make.histogram("vllm:request_generation_tokens", "Tokens generated.", sizes)
        self._longest = make.histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of each output.", sizes
        )
        self._limit = make.histogram("vllm:request_params_max_tokens", "max_tokens.", sizes)
        self._n = make.histogram("vllm:request_params_n", "n.", families.OUTPUTS)
        self._per_token = make.histogram(
            "vllm:request_time_per_output_token_seconds",
            "Seconds a token after the first, averaged over a request.",
            families.TOKEN_S,
        )
        self._make_times(make)

    def _make_times(self, make: Families) -> None:
        def seconds(name: str, text: str) -> prometheus.Histogram:
            return make.histogram(f"vllm:{name}_seconds", text, families.REQUEST_S)

        self._whole = seconds("e2e_request_latency", "Seconds from arrival to end.")
        self._queue = seconds("request_queue_time", "Seconds from arrival to admission.")
        self._inference = seconds("request_inference_time", "Seconds from admission to end.")
        self._prefill = seconds("request_prefill_time", "Seconds from admission to first token.")
        self._decode = seconds("request_decode_time", "Seconds from first token to end.")

    def count(self, seq: Sequence) -> None:
        """Adds a request that has ended."""
        outputs = (seq, *seq.others)
        length = sum(len(one.output_ids) for one in outputs)
        self._success[seq.finish_reason or "error"].inc()
        self._prompt.observe(seq.num_prompt_tokens)
        self._output.observe(length)
        for one in outputs:
            self._longest.observe(len(one.output_ids))
        if seq.params.max_tokens is not None:
            self._limit.observe(seq.params.max_tokens)
        if seq.parent is None:
            self._n.observe(seq.params.n)
        self._count_times(seq, length)

    def _count_times(self, seq: Sequence, length: int) -> None:
        metrics = seq.metrics
        first_s = metrics.first_token_s
        end_s = perf_counter() if metrics.finish_s is None else metrics.finish_s
        start_s = end_s if metrics.start_s is None else metrics.start_s
        self._whole.observe(end_s - metrics.arrival_s)
        self._queue.observe(start_s - metrics.arrival_s)
        if metrics.start_s is None:
            return
        self._inference.observe(end_s - start_s)
        self._prefill.observe((end_s if first_s is None else first_s) - start_s)
        if first_s is not None:
            self._computed.observe(seq.num_prompt_tokens - metrics.num_cached_tokens)
            self._decode.observe(end_s - first_s)
            if length > 1:
                self._per_token.observe((end_s - first_s) / (length - 1))


def _drafter(source: str) -> str:
    """Who proposed a node: "suffix" for "suffix:8.sole", whose rest says how."""
    return source.partition(":")[0] or "unknown"


def _registry() -> prometheus.CollectorRegistry:
    registry = prometheus.CollectorRegistry()
    prometheus.ProcessCollector(registry=registry)
    prometheus.GCCollector(registry=registry)
    return registry
