"""Numbers of the lines of benchmarks that are not made of runs; seconds also as milliseconds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from draftwood.bench.quoted import (
    AT_ONCE,
    BASE,
    CONTENDER,
    CONTEXT,
    KIND,
    MEASURE,
    PART,
    QUANTILE,
    RATIO,
    ROWS,
    SPEED,
    TEXT,
    TIER,
    UNIT,
    Derived,
    numbers,
)
from draftwood.bench.record_file import RecordFile, Row

_FULL = "all parts"
# What a column may be headed with, to the fields of a `scale` line.
_SCALE = {
    "cached": ("hit_rate",),
    "believed": ("believed_hit_rate",),
    "possible": ("possible_hit_rate",),
    "balance": ("balance",),
    "decision": ("decision_us", "decision_p99_us"),
    "requests": ("num_requests",),
    "retried": ("num_retried",),
}


def points(record: RecordFile) -> Iterator[Derived]:
    """Every number of these lines that a document may quote."""
    yield from _cost(record.of("cost"))
    yield from _batch(record.of("batch_summary"))
    yield from _kv(record.of("kv"))
    yield from _quality(record.of("quality"))
    yield from _mlperf(record.of("mlperf"))
    yield from _ablation(record.of("ablation_summary"))
    yield from _beams(record.of("beams_summary"))
    yield from _grammar(record.of("grammar_summary"))
    yield from _load(record.of("load"), record.of("load_ratio"))
    yield from _scale(record.of("scale"))
    yield from _lossless(record.of("difference_rate"))
    yield from _layouts(record.of("layout"))


def _cost(rows: Sequence[Row]) -> Iterator[Derived]:
    for row in rows:
        of = {CONTEXT: str(row["context"]), ROWS: str(row["rows"])}
        yield from numbers(of, [1000 * row["median_s"], 1000 * row["min_s"], row["relative"]])
        yield from numbers({}, [row["rows"], row["context"], row["repeats"]])
    for one, more in itertools.pairwise(rows):
        if one["context"] == more["context"]:
            # What a further row costs between two sizes.
            slope = (more["median_s"] - one["median_s"]) / (more["rows"] - one["rows"])
            yield from numbers({CONTEXT: str(one["context"])}, [1000 * slope])


def _batch(rows: Sequence[Row]) -> Iterator[Derived]:
    for row in rows:
        of = {AT_ONCE: str(row["concurrency"])}
        yield from numbers(of, [row["ratio"], row["decode_ratio"], row["worst"]])
        yield from numbers({**of, UNIT: SPEED}, [row["plain_tokens_per_s"], row["tokens_per_s"]])
        yield from numbers(of, [row["num_texts"], row["num_identical"], row["concurrency"]])


def _kv(rows: Sequence[Row]) -> Iterator[Derived]:
    for row in rows:
        of = {TIER: str(row["tier"])}
        times = [row["ttft_s"], row["min_s"], *([row["floor_s"]] if row["floor_s"] else [])]
        yield from numbers(of, [*times, *(1000 * time for time in times), row["speedup"]])
        yield from numbers(of, [row["num_cached_tokens"], row["num_tokens"]])
        yield from numbers(of, [row["num_bytes"], row["num_bytes"] / 1e6, row["num_bytes"] / 1e9])


def _quality(rows: Sequence[Row]) -> Iterator[Derived]:
    for row in rows:
        fields = ("perplexity", "reference_perplexity", "perplexity_change", "divergence")
        of = {TEXT: str(row["text"])}
        yield from numbers(of, [row[field] for field in (*fields, "same_choice", "num_tokens")])


def _mlperf(rows: Sequence[Row]) -> Iterator[Derived]:
    for row in rows:
        of = {CONTENDER: str(row["contender"]), KIND: str(row["scenario"])}
        yield from numbers(of, row["metrics"].values())
        times = [
            v for name, v in row["metrics"].items() if name.endswith("_s") and "per" not in name
        ]
        yield from numbers(of, [1000 * seconds for seconds in times])
        yield from numbers(of, [row["num_identical"], row["num_samples"]])


def _ablation(rows: Sequence[Row]) -> Iterator[Derived]:
    for row in rows:
        of = {PART: str(row["part"])}
        yield from numbers({**of, UNIT: SPEED}, [row["decode_tokens_per_s"]])
        yield from _estimate({**of, UNIT: RATIO, BASE: "plain"}, row["to_plain"])
        yield from _estimate({**of, UNIT: RATIO, BASE: "plain"}, row["to_plain_total"])
        yield from _estimate({**of, UNIT: RATIO, BASE: _FULL}, row["to_full"])
        counts = ("tokens_per_round", "nodes_per_round", "num_groups", "num_texts", "num_identical")
        yield from numbers(of, [row[field] for field in counts])
    for field in ("num_texts", "num_identical"):
        yield from numbers({}, [sum(row[field] for row in rows)])


def _beams(rows: Sequence[Row]) -> Iterator[Derived]:
    for row in rows:
        speeds = {"draftwood": "tokens_per_s", "transformers": "transformers_tokens_per_s"}
        for name, field in speeds.items():
            yield from numbers({CONTENDER: name, UNIT: SPEED}, [row[field]])
        of = {CONTENDER: "draftwood", BASE: "transformers", UNIT: RATIO}
        yield from _estimate(of, row["ratio"])
        yield from numbers(of, [row["worst"]])
        counts = [row[n] for n in ("num_beams", "num_prompts", "num_identical")]
        yield from numbers({CONTENDER: "draftwood"}, counts)


def _grammar(rows: Sequence[Row]) -> Iterator[Derived]:
    for row in rows:
        of = {CONTENDER: str(row["drafter"])}
        yield from numbers(of, [row["free_ms"], row["grammar_ms"]])
        yield from _estimate({**of, UNIT: RATIO, KIND: "token"}, row["per_token"])
        yield from _estimate({**of, UNIT: RATIO, KIND: "round"}, row["per_round"])
        counts = ("num_prompts", "num_identical", "num_compared", "num_in_form")
        yield from numbers(of, [row[field] for field in counts])


def _load(rows: Sequence[Row], ratios: Sequence[Row]) -> Iterator[Derived]:
    waits = [f"{name}_{p}_s" for name in ("ttft", "itl", "tpot") for p in ("p50", "p99")]
    for row in rows:
        contender = {True: "on", False: "off"}.get(row["speculation"], "as served")
        of = {AT_ONCE: str(row["concurrency"]), CONTENDER: contender}
        yield from numbers({**of, UNIT: SPEED}, [row["tokens_per_s"]])
        times = [row[field] for field in waits if row[field] is not None]
        yield from numbers(of, [*times, *(1000 * seconds for seconds in times)])
        yield from numbers(of, [row["acceptance_length"], row["num_requests"], row["num_failed"]])
        yield from numbers({}, [row["concurrency"]])
    for row in ratios:
        of = {AT_ONCE: str(row["concurrency"]), UNIT: RATIO}
        yield from numbers(of, [row["ratio"], row["worst"], row["num_pairs"]])


def _scale(rows: Sequence[Row]) -> Iterator[Derived]:
    for row in rows:
        of = {CONTENDER: str(row["policy"])}
        for measure, fields in _SCALE.items():
            yield from numbers({**of, MEASURE: measure}, [row[field] for field in fields])
        for measure, field in (("first token", "ttft"), ("answer", "latency")):
            for quantile in ("p50", "p95", "p99"):
                seconds = row[f"{field}_{quantile}_s"]
                yield from numbers({**of, MEASURE: measure, QUANTILE: quantile}, [seconds])


def _lossless(rows: Sequence[Row]) -> Iterator[Derived]:
    counts = ("num_texts", "num_tokens", "num_draft_tokens", "num_accepted_tokens", "num_different")
    for row in rows:
        of = {CONTENDER: str(row["drafter"])}
        yield from numbers(of, [row[field] for field in counts])
        yield from numbers(of, [row["rate"], row["rate_below"], row["temperature"]])
    for field in counts:
        yield from numbers({}, [sum(row[field] for row in rows)])


def _layouts(rows: Sequence[Row]) -> Iterator[Derived]:
    for row in rows:
        of = {CONTENDER: str(row["layout"]), AT_ONCE: str(row["concurrency"])}
        yield from numbers({**of, UNIT: SPEED}, [row["tokens_per_s"]])
        yield from numbers({}, [row["concurrency"], row["num_requests"]])


def _estimate(of: dict[str, str], one: dict[str, Any] | None) -> list[Derived]:
    return numbers(of, [one["value"], one["low"], one["high"]] if one else [])
