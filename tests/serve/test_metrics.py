"""What Prometheus is told: vLLM's names and buckets, and the numbers of the requests."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from draftwood.draft.base import Drafter
from draftwood.engine.checkpoint import CheckpointStats
from draftwood.engine.sequence import Sequence
from draftwood.errors import MissingExtraError
from draftwood.sampling import SamplingParams
from draftwood.serve.families import round_buckets
from draftwood.serve.held import RecoveryCounts
from draftwood.serve.metrics import Metrics
from draftwood.serve.recovery_gauges import RecoveryCollector
from tests.tiny import TinyLLM, bushy_drafter, random_prompts, run_until, tiny_llm

MODEL = "tiny"
SPEC = "vllm:spec_decode_num"

# Names on the wire without suffix, as vLLM 0.11 to 0.2x has them.
VLLM_COUNTERS = {
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "vllm:prompt_tokens",
    "vllm:prompt_tokens_cached",
    "vllm:prompt_tokens_by_source",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:num_preemptions",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
}
VLLM_GAUGES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
}
VLLM_HISTOGRAMS = {
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:iteration_tokens_total",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_params_n",
    "vllm:request_params_max_tokens",
    "vllm:request_prefill_kv_computed_tokens",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
}


class Scrape:
    """What a scrape says, parsed."""

    def __init__(self, metrics: Metrics) -> None:
        body, kind = metrics.render()
        assert kind.startswith("text/plain; version=0.0.4")
        self.families = {f.name: f for f in text_string_to_metric_families(body.decode())}

    def samples(self, name: str) -> list[Any]:
        """The samples of that name, whatever their labels."""
        return [s for f in self.families.values() for s in f.samples if s.name == name]

    def value(self, name: str, **labels: str) -> float:
        """The one sample with these labels among others."""
        [found] = [s for s in self.samples(name) if labels.items() <= s.labels.items()]
        return float(found.value)

    def bounds(self, histogram: str) -> list[float]:
        """Upper bounds of a histogram's buckets, infinity left out."""
        bounds = [float(s.labels["le"]) for s in self.samples(f"{histogram}_bucket")]
        return sorted(bounds)[:-1]


def watched(llm: TinyLLM, queue_length: Callable[[], int] = lambda: 0) -> Metrics:
    """Metrics of an engine."""
    metrics = Metrics(MODEL)
    metrics.bind(llm.engine, queue_length)
    return metrics


def run(
    llm: TinyLLM, metrics: Metrics, prompts: list[list[int]], params: SamplingParams
) -> list[Sequence]:
    """Runs requests to their end, telling the metrics of each as a server does."""
    seqs = [llm.engine.add(prompt, params) for prompt in prompts]
    run_until(llm, seqs)
    for seq in seqs:
        metrics.on_finished(seq)
    return seqs


def bushy() -> TinyLLM:
    """An engine whose trees are wide and often right."""
    return tiny_llm(drafter="bushy", vocab_size=8, max_tree_nodes=12)


def test_spec_counters_equal_those_of_the_requests() -> None:
    """Drafts, draft tokens, accepted ones and those of each position; four requests at once."""
    llm = bushy()
    metrics = watched(llm)
    seqs = run(llm, metrics, random_prompts([9, 14, 20, 5], vocab_size=8), long())
    scrape = Scrape(metrics)
    assert scrape.value(f"{SPEC}_draft_tokens_total") == total(seqs, "num_draft_tokens") > 50
    assert scrape.value(f"{SPEC}_accepted_tokens_total") == total(seqs, "num_accepted_tokens") > 20
    # Of the last token of a request no more than the bonus token is wanted: a round without draft.
    drafts = scrape.value(f"{SPEC}_drafts_total")
    assert total(seqs, "num_rounds") - len(seqs) <= drafts <= total(seqs, "num_rounds")
    depths = max(len(seq.metrics.accepted_per_position) for seq in seqs)
    assert depths >= 2
    for depth in range(depths):
        wanted = sum(sum(seq.metrics.accepted_per_position[depth : depth + 1]) for seq in seqs)
        name = f"{SPEC}_accepted_tokens_per_pos_total"
        assert scrape.value(name, position=str(depth)) == wanted
    assert len(scrape.samples(f"{SPEC}_accepted_tokens_per_pos_total")) == depths


def test_tokens_requests_and_trees_add_up() -> None:
    """Tokens, rounds, nodes and sources agree with each other and with the requests."""
    llm = bushy()
    metrics = watched(llm)
    seqs = run(llm, metrics, random_prompts([9, 14, 20], vocab_size=8), long())
    scrape = Scrape(metrics)
    num_tokens = sum(len(seq.output_ids) for seq in seqs)
    assert scrape.value("vllm:generation_tokens_total") == num_tokens == 3 * 24
    assert scrape.value("vllm:prompt_tokens_total") == 9 + 14 + 20
    assert scrape.value("vllm:request_success_total", finished_reason="length") == 3
    assert scrape.value("vllm:request_success_total", finished_reason="error") == 0
    assert scrape.value("vllm:request_generation_tokens_sum") == num_tokens
    assert scrape.value("vllm:request_params_max_tokens_sum") == 3 * 24
    rounds = total(seqs, "num_rounds")
    assert scrape.value("draftwood:request_rounds_total") == rounds + len(seqs)
    assert scrape.value("draftwood:tree_nodes_count") == rounds
    drafted = scrape.value(f"{SPEC}_draft_tokens_total")
    accepted = scrape.value(f"{SPEC}_accepted_tokens_total")
    assert scrape.value("draftwood:tree_nodes_sum") == drafted
    assert scrape.value("draftwood:draft_tokens_total", source="bushy") == drafted
    assert scrape.value("draftwood:accepted_tokens_total", source="bushy") == accepted
    assert num_tokens == accepted + rounds + len(seqs)
    assert scrape.value("vllm:inter_token_latency_seconds_count") == rounds
    assert scrape.value("vllm:iteration_tokens_total_sum") == 9 + 14 + 20 - 3 + num_tokens


def test_times_agree_with_each_other() -> None:
    """Queue and inference make up the whole, prefill and decode the inference."""
    llm = bushy()
    metrics = watched(llm)
    [seq] = run(llm, metrics, random_prompts([20], vocab_size=8), long())
    scrape = Scrape(metrics)

    def seconds(name: str) -> float:
        assert scrape.value(f"vllm:{name}_seconds_count") == 1
        return scrape.value(f"vllm:{name}_seconds_sum")

    whole, queue = seconds("e2e_request_latency"), seconds("request_queue_time")
    inference = seconds("request_inference_time")
    assert whole == pytest.approx(queue + inference)
    parts = seconds("request_prefill_time"), seconds("request_decode_time")
    assert inference == pytest.approx(sum(parts))
    assert seconds("time_to_first_token") == pytest.approx(queue + parts[0])
    per_token = seconds("request_time_per_output_token")
    assert per_token == pytest.approx(parts[1] / (len(seq.output_ids) - 1))
    phases = [s.value for s in scrape.samples("draftwood:phase_seconds_total")]
    assert len(phases) == 4
    assert 0 < sum(phases) <= whole


def test_names_and_labels_are_exactly_those_of_vllm() -> None:
    """Every metric called vllm: is one of vLLM's, of its kind, and carries its labels."""
    llm = bushy()
    metrics = watched(llm)
    run(llm, metrics, random_prompts([9], vocab_size=8), long())
    kinds: dict[str, set[str]] = {"counter": set(), "gauge": set(), "histogram": set()}
    for name, family in Scrape(metrics).families.items():
        if name.startswith("vllm:") and not name.endswith("_created"):
            kinds[family.type].add(name)
            for sample in family.samples:
                assert sample.labels.get("engine") == "0"
                assert sample.labels.get("model_name", MODEL) == MODEL
                assert "model_name" in sample.labels or name == "vllm:cache_config_info"
    assert kinds == {"counter": VLLM_COUNTERS, "gauge": VLLM_GAUGES, "histogram": VLLM_HISTOGRAMS}


def test_buckets_are_those_of_vllm() -> None:
    """Quantiles of ours and of vLLM's can be laid over one another."""
    llm = bushy()
    scrape = Scrape(watched(llm))
    assert scrape.bounds("vllm:time_to_first_token_seconds") == [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    ]
    latency = [
        *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
        *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
    ]
    for name in ("e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert scrape.bounds(f"vllm:{name}_seconds") == latency
    assert scrape.bounds("vllm:request_prompt_tokens") == [1, 2, 5, 10, 20, 50, 100, 200]
    assert round_buckets(100) == [1, 2, 5, 10, 20, 50, 100]
    assert round_buckets(99) == [1, 2, 5, 10, 20, 50]


def test_gauges_follow_the_engine() -> None:
    """Running, waiting and blocks: while a request runs, while one waits, and when all is over."""
    llm = tiny_llm(drafter="bushy", vocab_size=8, max_num_seqs=1, block_size=4)
    metrics = watched(llm, lambda: 5)
    seqs = [llm.engine.add(p, long()) for p in random_prompts([9, 9], vocab_size=8)]
    llm.engine.step()
    scrape = Scrape(metrics)
    assert scrape.value("vllm:num_requests_running") == 1
    assert scrape.value("vllm:num_requests_waiting") == 1 + 5
    used = scrape.value("draftwood:kv_blocks", state="used")
    assert used == len(seqs[0].lease.block_table) > 0
    assert scrape.value("vllm:kv_cache_usage_perc") == used / llm.pool.num_blocks
    run_until(llm, seqs)
    scrape = Scrape(metrics)
    assert scrape.value("vllm:num_requests_running") == 0
    assert scrape.value("draftwood:kv_blocks", state="used") == 0
    assert scrape.value("draftwood:kv_blocks", state="cached") > 0
    blocks = [s.value for s in scrape.samples("draftwood:kv_blocks")]
    assert sum(blocks) == llm.pool.num_blocks


def test_cached_prompts_are_counted_by_tier(tmp_path: Path) -> None:
    """The second time most of a prompt comes from RAM; after a restart, from the disk."""
    [prompt] = random_prompts([40])
    for tier, times in (("ram", 2), ("disk", 1)):
        with tiny_llm(block_size=4, kv_disk=str(tmp_path), kv_timeout_s=5.0) as llm:
            metrics = watched(llm)
            for _ in range(times):
                [seq] = run(llm, metrics, [prompt], SamplingParams(max_tokens=4))
            cached = seq.metrics.num_cached_tokens
            scrape = Scrape(metrics)
            assert scrape.value("draftwood:cached_tokens_total", tier=tier) == cached >= 32
            assert scrape.value("vllm:prompt_tokens_cached_total") == cached
            where = "prefix_cache" if tier == "ram" else "external_prefix_cache"
            assert scrape.value(f"vllm:{where}_hits_total") == cached
            assert scrape.value("vllm:prefix_cache_queries_total") == 40 * times
            parts = [s.value for s in scrape.samples("vllm:prompt_tokens_by_source_total")]
            assert sum(parts) == scrape.value("vllm:prompt_tokens_total") == 40 * times
            check_disk(llm, metrics, restored=tier == "disk")


def check_disk(llm: TinyLLM, metrics: Metrics, *, restored: bool) -> None:
    """The disk's counters are those of the tier itself."""
    assert llm.tiers is not None
    assert llm.tiers.flush()
    counters = llm.tiers.counters["disk"]
    assert counters.num_hits >= 8 if restored else counters.num_misses >= 9
    assert counters.num_stored > 0
    scrape = Scrape(metrics)
    for name, value in (
        ("hits", counters.num_hits),
        ("misses", counters.num_misses),
        ("stored", counters.num_stored),
        ("failures", 0),
        ("read_bytes", counters.bytes_read),
        ("written_bytes", counters.bytes_written),
    ):
        assert scrape.value(f"draftwood:cache_tier_{name}_total", tier="disk") == value


def test_preemptions_aborts_and_failing_drafters_are_counted() -> None:
    """What goes wrong is seen: memory runs out, a client leaves, a drafter raises."""

    class Failing(Drafter):
        name = "failing"

        def propose(self, seqs: Any, budgets: Any) -> Any:
            raise RuntimeError("no")

    llm = tiny_llm(drafter=Failing(), block_size=4, num_blocks=14)
    metrics = watched(llm)
    prompts = random_prompts([12, 12, 12])
    seqs = [llm.engine.add(p, SamplingParams(max_tokens=20)) for p in prompts]
    run_until(llm, seqs)
    late = llm.engine.add(prompts[0], SamplingParams(max_tokens=4))
    llm.engine.abort(late)
    for seq in (*seqs, late):
        metrics.on_finished(seq)
    scrape = Scrape(metrics)
    assert scrape.value("vllm:num_preemptions_total") == llm.engine.num_preemptions > 0
    assert scrape.value("draftwood:drafter_failures_total") > 10
    assert scrape.value("vllm:request_success_total", finished_reason="abort") == 1
    assert scrape.value("vllm:request_queue_time_seconds_count") == 4
    assert scrape.value("vllm:request_inference_time_seconds_count") == 3
    assert scrape.value("vllm:prompt_tokens_total") == 36  # nobody's prompt counts twice
    assert scrape.value("vllm:generation_tokens_total") == 60


def test_counters_only_grow_while_others_scrape() -> None:
    """Scrapes from other threads while rounds go on: no error, and no counter goes back."""
    llm = tiny_llm(drafter="bushy", vocab_size=8, max_num_seqs=2, block_size=4, num_blocks=40)
    metrics = watched(llm)
    seqs = [llm.engine.add(p, long(60)) for p in random_prompts([12] * 6, vocab_size=8)]
    over = threading.Event()
    seen: list[dict[str, float]] = []

    def look() -> None:
        while not over.is_set():
            seen.append(counters(Scrape(metrics)))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        run_until(llm, seqs)
    finally:
        over.set()
        watcher.join()
    seen.append(counters(Scrape(metrics)))
    values = [one["vllm:generation_tokens_total"] for one in seen]
    assert len(set(values)) > 2, "scraped before and after only"
    assert values[-1] == 6 * 60
    for before, after in itertools.pairwise(seen):
        assert all(after[name] >= value for name, value in before.items())


def counters(scrape: Scrape) -> dict[str, float]:
    """Counters without labels of their own."""
    names = [name for name, f in scrape.families.items() if f.type == "counter"]
    ours = [f"{name}_total" for name in names if name.startswith(("vllm:", "draftwood:"))]
    return {name: sum(s.value for s in scrape.samples(name)) for name in ours}


def test_beams_count_as_one_request() -> None:
    """A beam search walks no tree; its texts are counted when it ends."""
    llm = tiny_llm()
    metrics = watched(llm)
    params = SamplingParams(max_tokens=6, num_beams=3, num_return_sequences=2)
    [seq] = run(llm, metrics, random_prompts([8]), params)
    scrape = Scrape(metrics)
    length = len(seq.output_ids) + len(seq.others[0].output_ids)
    assert scrape.value("vllm:generation_tokens_total") == length
    assert scrape.value("vllm:prompt_tokens_total") == 8
    assert scrape.value("vllm:request_max_num_generation_tokens_count") == 2


def test_a_stop_string_takes_back_no_count() -> None:
    """What a stop string cuts off within a round was not accepted."""
    llm = bushy()
    [prompt] = random_prompts([12], vocab_size=8)
    [text] = [llm.outputs([prompt], long())[0].text]
    llm = bushy()
    metrics = watched(llm)
    [seq] = run(llm, metrics, [prompt], long().but(stop=text[9:12]))
    scrape = Scrape(metrics)
    assert seq.finish_reason == "stop"
    accepted = scrape.value(f"{SPEC}_accepted_tokens_total")
    assert 0 <= accepted - seq.metrics.num_accepted_tokens <= 2  # held back from earlier rounds
    assert scrape.value("vllm:request_generation_tokens_sum") == len(seq.output_ids)


def test_sources_of_a_strange_drafter_do_not_grow_without_end() -> None:
    """A drafter that names each node differently gets sixteen names and "other".

    What is behind a colon says how a node was found, and is no name.
    """
    llm = bushy()
    metrics = watched(llm)
    inner = bushy_drafter(8)

    class Naming(Drafter):
        def propose(self, seqs: Any, budgets: Any) -> Any:
            trees = inner.propose(seqs, budgets)
            return [renamed(tree, len(seqs[0].tokens)) for tree in trees]

    llm.engine = llm.make_engine(Naming())
    metrics.bind(llm.engine)
    run(llm, metrics, random_prompts([9], vocab_size=8), long())
    names = {s.labels["source"] for s in Scrape(metrics).samples("draftwood:draft_tokens_total")}
    assert len(names) == 17
    assert "other" in names


def renamed(tree: Any, salt: int) -> Any:
    """The tree with a name of its own for every node."""
    names = ("", *(f"{salt % 2}-{node}:{salt}" for node in range(1, len(tree))))
    return type(tree)(tree.tokens, tree.parents, tree.scores, names)


class Kept:
    """What a server with checkpoints has counted: nothing."""

    counts = RecoveryCounts()
    stats = CheckpointStats()

    def size(self) -> tuple[int, int]:
        """Requests and bytes."""
        return 0, 0


def test_every_metric_is_in_the_documentation() -> None:
    """docs/metrics.md names each of them, and no vllm: or draftwood: metric that is not there."""
    llm = bushy()
    metrics = watched(llm)
    run(llm, metrics, random_prompts([9], vocab_size=8), long())
    text = Path("docs/metrics.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`(?:vllm|draftwood):[^|]*)\|", text, re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`([a-z]+:[a-z0-9_]+)", cell)}
    names = set()
    families = {
        **Scrape(metrics).families,
        **{family.name: family for family in RecoveryCollector("m", Kept()).collect()},
    }
    for name, family in families.items():
        if name.startswith(("vllm:", "draftwood:")) and not name.endswith("_created"):
            names.add(f"{name}_total" if family.type == "counter" else name)
    assert documented == names


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without prometheus-client the message says what to install."""
    for name in [name for name in sys.modules if name.startswith("draftwood.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'draftwood\[server\]'"):
        importlib.import_module("draftwood.serve.metrics")


def test_metrics_go_on_with_another_engine() -> None:
    """A server that begins anew with a fresh engine keeps its counts."""
    llm = bushy()
    metrics = watched(llm)
    run(llm, metrics, random_prompts([9], vocab_size=8), long())
    llm.engine = llm.make_engine(bushy_drafter(8))
    metrics.bind(llm.engine, lambda: 7)
    run(llm, metrics, random_prompts([9], vocab_size=8), long())
    scrape = Scrape(metrics)
    assert scrape.value("vllm:generation_tokens_total") == 48
    assert scrape.value("vllm:num_requests_waiting") == 7
    assert scrape.value("vllm:time_to_first_token_seconds_count") == 2


def test_a_registry_can_be_given() -> None:
    """Two models in one process keep apart."""
    registry = CollectorRegistry()
    metrics = Metrics(MODEL, registry)
    assert (
        registry.get_sample_value(
            "vllm:generation_tokens_total", {"model_name": MODEL, "engine": "0"}
        )
        == 0
    )
    body, _ = metrics.render()
    assert b"process_" not in body
    assert b"process_" in Metrics(MODEL).render()[0]


def long(num_tokens: int = 24) -> SamplingParams:
    """A greedy text of a fixed length."""
    return SamplingParams(max_tokens=num_tokens)


def total(seqs: list[Sequence], name: str) -> int:
    """Sum of a field over the requests' metrics."""
    return sum(getattr(seq.metrics, name) for seq in seqs)
