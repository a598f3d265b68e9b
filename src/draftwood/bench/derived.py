"""All numbers that can be worked out from a record, each with what it is of.

A number in a document is looked up here by value, printed precision, and by what its row and column
are about: that of another contender, kind or statistic does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwood.bench.contenders import PLAIN, TRANSFORMERS
from draftwood.bench.record_file import RecordFile, Row
from draftwood.bench.records import RunRecord
from draftwood.bench.spec import GROUPS, summarise_spec
from draftwood.bench.speedups import ALL, speedups
from draftwood.bench.summary import decode_speed, ratios, summarise, total_speed

# What a number may be of.
CONTENDER, BASE, KIND, STATISTIC, UNIT = "contender", "base", "kind", "statistic", "unit"
CONTEXT, ROWS, AT_ONCE, TIER, TEXT = "context", "rows", "at once", "tier", "text"
SPEED, RATIO = "tokens/s", "ratio"
_RATIOS = (decode_speed, total_speed)


@dataclass(frozen=True, slots=True)
class Derived:
    """A number and what it is of.

    Attributes:
        value: the number.
        of: dimension to what it is of there; a dimension that is missing does not apply.
    """

    value: float
    of: Mapping[str, str]


def derived(record: RecordFile) -> list[Derived]:
    """Every number that a document may quote from a record."""
    found = [*_settings(record), *_points(record)]
    if record.runs:
        found += _counts(record.runs)
        found += _summaries(record.runs)
        found += _intervals(record)
    if record.command == "spec" and record.runs:
        found += _spec(record.runs)
    return found


def totals(records: Sequence[RecordFile]) -> list[Derived]:
    """Counts of texts over several records together."""
    runs = [run for record in records for run in record.runs if run.contender != PLAIN]
    return _numbers({}, [*_text_counts(runs), len(records)])


def _numbers(of: Mapping[str, str], values: Iterable[Any]) -> list[Derived]:
    return [Derived(float(value), of) for value in values if isinstance(value, int | float)]


def _settings(record: RecordFile) -> list[Derived]:
    """What the run was asked for, and the cores it had."""
    head = record.fingerprint
    values = [*head.values(), *(head.get("params") or {}).values()]
    prompts, cpu = head.get("prompts") or {}, record.machine.get("cpu") or {}
    more = (prompts.get("count"), cpu.get("num_cores"), cpu.get("num_threads"))
    return _numbers({}, [*(value for value in values if not isinstance(value, bool)), *more])


def _text_counts(runs: Sequence[RunRecord]) -> list[int]:
    compared = [run for run in runs if run.identical is not None]
    same = sum(bool(run.identical) for run in compared)
    return [len(compared), same, len(compared) - same]


def _counts(runs: Sequence[RunRecord]) -> list[Derived]:
    """Prompts, kinds, texts; of the contenders together, plain and transformers left out or not."""
    by_kind = {kind: {r.prompt for r in runs if r.kind == kind} for kind in {r.kind for r in runs}}
    found = _numbers({}, [len({run.prompt for run in runs}), len(by_kind)])
    for kind, prompts in by_kind.items():
        found += _numbers({KIND: kind}, [len(prompts)])
    ours = [run for run in runs if run.contender not in (PLAIN, TRANSFORMERS)]
    found += _numbers({}, [*_text_counts(runs), *_text_counts(ours)])
    return found


def _summaries(runs: Sequence[RunRecord]) -> Iterator[Derived]:
    for name, one in summarise(runs).items():
        own = [run for run in runs if run.contender == name]
        of = {CONTENDER: name}
        yield from _numbers(of, [len(own), *_text_counts(own)])
        for field in ("tokens_per_s", "decode_tokens_per_s"):
            yield from _numbers({**of, UNIT: SPEED, STATISTIC: "median"}, [one[field]])
        yield from _rounds(of, one["rounds"])
        # The bases that somebody may compare with: plain, and all that is not ours.
        bases = (run.contender for run in runs if run.contender == PLAIN or not run.rounds)
        for base in dict.fromkeys(bases):
            others = [run for run in runs if run.contender == base]
            for speed in _RATIOS:
                yield from _ratios({**of, BASE: base}, ratios(own, others, speed))


def _ratios(of: Mapping[str, str], found: Row | None) -> Iterator[Derived]:
    if found is None:
        return
    for statistic in ("mean", "median", "min", "max"):
        yield Derived(found[statistic], {**of, UNIT: RATIO, STATISTIC: statistic})
    for kind, value in found["by_kind"].items():
        yield Derived(value, {**of, UNIT: RATIO, STATISTIC: "mean", KIND: kind})


def _intervals(record: RecordFile) -> Iterator[Derived]:
    """What a report prints of speed-ups over plain, the ends of the intervals among it."""
    for name, by in speedups(record).items():
        for kind, one in by.items():
            of = {CONTENDER: name, BASE: PLAIN, UNIT: RATIO}
            if record.command != "spec":
                of[STATISTIC] = "median" if kind == ALL else "mean"
            if kind != ALL:
                of[KIND] = kind
            yield from _numbers(of, [one.value, one.low, one.high])


def _rounds(of: Mapping[str, str], rounds: Row | None) -> Iterator[Derived]:
    if rounds is None:
        return
    plain_fields = ("mean_acceptance_length", "nodes_per_round", "num_rounds")
    yield from _numbers(of, [rounds[field] for field in plain_fields])
    yield from _numbers(of, [1000 * rounds["seconds_per_round"]])
    yield from _numbers(of, rounds["shares"].values())
    yield from _numbers(of, rounds["acceptance_by_position"])


def _spec(runs: Sequence[RunRecord]) -> Iterator[Derived]:
    for name, one in summarise_spec(runs).items():
        of = {CONTENDER: name}
        yield from _numbers({**of, UNIT: SPEED, STATISTIC: "mean"}, [one["tokens_per_s"]])
        for field, unit in (("speedup", RATIO), ("mean_accepted_tokens", "tokens")):
            for group, value in one[field].items():
                kind = {KIND: group} if group in GROUPS else {}
                yield from _numbers({**of, UNIT: unit, **kind}, [value])
        yield from _numbers({}, one["num_questions"].values())


def _points(record: RecordFile) -> Iterator[Derived]:
    """The lines of benchmarks that are not made of runs; seconds also as milliseconds."""
    for row in record.of("cost"):
        of = {CONTEXT: str(row["context"]), ROWS: str(row["rows"])}
        yield from _numbers(of, [1000 * row["median_s"], 1000 * row["min_s"], row["relative"]])
        yield from _numbers({}, [row["rows"], row["context"], row["repeats"]])
    for row in record.of("batch_summary"):
        of = {AT_ONCE: str(row["concurrency"])}
        yield from _numbers(of, [row["ratio"], row["decode_ratio"], row["worst"]])
        yield from _numbers({**of, UNIT: SPEED}, [row["plain_tokens_per_s"], row["tokens_per_s"]])
        yield from _numbers(of, [row["num_texts"], row["num_identical"], row["concurrency"]])
    for row in record.of("kv"):
        of = {TIER: str(row["tier"])}
        times = [row["ttft_s"], row["min_s"], *([row["floor_s"]] if row["floor_s"] else [])]
        yield from _numbers(of, [*times, *(1000 * time for time in times), row["speedup"]])
        yield from _numbers(of, [row["num_cached_tokens"], row["num_tokens"]])
        yield from _numbers(of, [row["num_bytes"], row["num_bytes"] / 1e6, row["num_bytes"] / 1e9])
    for row in record.of("quality"):
        fields = ("perplexity", "reference_perplexity", "perplexity_change", "divergence")
        of = {TEXT: str(row["text"])}
        yield from _numbers(of, [row[field] for field in (*fields, "same_choice", "num_tokens")])
    for row in record.of("layout"):
        of = {CONTENDER: str(row["layout"]), AT_ONCE: str(row["concurrency"])}
        yield from _numbers({**of, UNIT: SPEED}, [row["tokens_per_s"]])
        yield from _numbers({}, [row["concurrency"], row["num_requests"]])
    for row in record.of("mlperf"):
        of = {CONTENDER: str(row["contender"]), KIND: str(row["scenario"])}
        yield from _numbers(of, row["metrics"].values())
        times = [
            v for name, v in row["metrics"].items() if name.endswith("_s") and "per" not in name
        ]
        yield from _numbers(of, [1000 * seconds for seconds in times])
        yield from _numbers(of, [row["num_identical"], row["num_samples"]])
