"""The runs of LoadGen one after the other: every drafter in every scenario, accuracy first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from draftwood.bench.contenders import PLAIN
from draftwood.bench.mlperf import (
    Conf,
    EngineSUT,
    Lengths,
    read_answers,
    read_details,
    reference_answers,
    run_test,
)
from draftwood.bench.rouge import mean_rouge
from draftwood.engine.engine import Engine
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams

_NS = 1e9
_ATTEMPTS = 3
_TOO_SHORT = "too short"
# Metric to the keys of LoadGen's detail log that may hold it, and what to divide by.
_METRICS = {
    "tokens_per_s": (("result_tokens_per_second", "result_completed_tokens_per_second"), 1.0),
    "samples_per_s": (
        (
            "result_samples_per_second",
            "result_completed_samples_per_sec",
            "result_qps_with_loadgen_overhead",
        ),
        1.0,
    ),
    "ttft_p99_s": (("result_first_token_99.00_percentile_latency_ns",), _NS),
    "tpot_p99_s": (("result_time_per_output_token_99.00_percentile_ns",), _NS),
    "latency_p90_s": (("result_90.00_percentile_latency_ns",), _NS),
    "latency_p99_s": (("result_99.00_percentile_latency_ns",), _NS),
    "queries": (("result_query_count",), 1.0),
}
# What LoadGen says was not met, and how we say it.
_REASONS = {
    "result_min_duration_met": _TOO_SHORT,
    "result_min_queries_met": "too few queries",
    "result_perf_constraints_met": "latency above the limit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of LoadGen.

    Attributes:
        contender: "plain" or the drafter's name.
        scenario, mode: which run.
        valid: LoadGen's verdict on a performance run; None for an accuracy run.
        reason: why it is not valid.
        metrics: what was measured; seconds, tokens, per cent.
        num_identical: samples whose tokens are those of the reference run; None for performance.
        num_samples: in the library.
    """

    contender: str
    scenario: str
    mode: str
    valid: bool | None
    reason: str
    metrics: dict[str, float]
    num_identical: int | None
    num_samples: int

    def to_json(self) -> dict[str, Any]:
        """An `mlperf` line."""
        return {"type": "mlperf", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run.

    Attributes:
        drafters: names; "none" is plain decoding.
        scenarios, modes: see `draftwood.bench.mlperf`.
        rules: the model of mlperf.conf whose limits apply.
        seconds, min_queries: see `Lengths`.
        server_qps: see `Lengths`; None takes half of what plain decoding does, one by one.
        user_conf: a file in the place of what is written here.
        mlperf_conf: a file between LoadGen's own mlperf.conf and the user.conf.
        out: the folder for LoadGen's logs.
    """

    drafters: Sequence[str]
    scenarios: Sequence[str]
    modes: Sequence[str]
    rules: str
    seconds: float
    min_queries: int
    server_qps: float | None
    user_conf: Path | None
    mlperf_conf: Path | None
    out: Path


def run_plan(
    llm: LLM,
    samples: Sequence[Sequence[int]],
    params: SamplingParams,
    plan: Plan,
    watch: Callable[[str], None] = lambda what: None,
) -> Iterator[Result]:
    """Runs all of a plan; each result as it comes.

    The reference run, plain decoding without LoadGen, tells how fast to send and what the texts
    are. An accuracy run of a scenario then tells how long a performance run must be planned.

    Args:
        llm: the model.
        samples: token ids that fit the context.
        params: for all of them.
        plan: what to run; logs go to `out/contender/scenario/mode`.
        watch: told what begins.
    """
    watch("reference run")
    begin = perf_counter()
    reference = reference_answers(llm.make_engine(llm.make_drafter("none")), samples, params)
    seconds = (perf_counter() - begin) / len(samples)
    for drafter in plan.drafters:
        name = PLAIN if drafter == "none" else drafter
        engine = llm.make_engine(llm.make_drafter(drafter))
        for scenario in plan.scenarios:
            run = _Run(llm, engine, samples, params, plan, name, scenario, seconds)
            if "accuracy" in plan.modes:
                watch(f"{name}: {scenario}, accuracy")
                yield run.accuracy(reference)
            if "performance" in plan.modes:
                watch(f"{name}: {scenario}, performance")
                yield run.performance()


class _Run:
    """One drafter in one scenario.

    Args:
        seconds: what plain decoding takes for a sample, one by one.
    """

    def __init__(
        self,
        llm: LLM,
        engine: Engine,
        samples: Sequence[Sequence[int]],
        params: SamplingParams,
        plan: Plan,
        name: str,
        scenario: str,
        seconds: float,
    ) -> None:
        self._llm, self._engine, self._samples, self._params = llm, engine, samples, params
        self._plan, self._name, self._scenario = plan, name, scenario
        self._plain = self._each = seconds

    def accuracy(self, reference: Sequence[tuple[int, ...]]) -> Result:
        """Every sample once; how long they take is noted for the other run."""
        begin = perf_counter()
        folder = self._test("accuracy")
        self._each = (perf_counter() - begin) / len(self._samples)
        return _accuracy(self._llm, self._name, self._scenario, folder, reference)

    def performance(self) -> Result:
        """A measured run; planned too short, it is repeated by what it has shown."""
        for _ in range(_ATTEMPTS):
            folder = self._test("performance")
            result = _performance(self._name, self._scenario, folder, len(self._samples))
            if _TOO_SHORT not in result.reason or self._plan.user_conf is not None:
                break
            self._each = min(self._each, 1 / result.metrics["samples_per_s"]) / 2
        return result

    def _test(self, mode: str) -> Path:
        """Runs LoadGen; the folder of its logs."""
        plan = self._plan
        folder = plan.out / self._name / self._scenario / mode
        conf = _user_conf(plan, folder, self._each, self._plain, len(self._samples))
        sut = EngineSUT(self._engine, self._samples, self._params)
        run_test(sut, self._scenario, mode, Conf(conf, plan.rules, plan.mlperf_conf), folder)
        return folder


def _user_conf(plan: Plan, folder: Path, each: float, plain: float, num_samples: int) -> Path:
    """The user.conf of a run, made from seconds a sample: of this run's kind, and of plain."""
    if plan.user_conf is not None:
        return plan.user_conf
    lengths = Lengths(
        seconds=plan.seconds,
        min_queries=plan.min_queries,
        # Longer than needed rather than too short: LoadGen plans before it measures.
        offline_qps=1.5 / each,
        server_qps=plan.server_qps or 0.5 / plain,
        latency_ms=max(round(1000 * each / 3), 1),
        samples=num_samples,
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "user.conf"
    path.write_text(lengths.user_conf(plan.rules), encoding="utf-8")
    return path


def _performance(name: str, scenario: str, folder: Path, num_samples: int) -> Result:
    details = read_details(folder)
    metrics = {
        metric: details[key] / divisor
        for metric, (keys, divisor) in _METRICS.items()
        for key in keys
        if key in details
    }
    valid = details.get("result_validity") == "VALID"
    return Result(
        contender=name,
        scenario=scenario,
        mode="performance",
        valid=valid,
        reason="" if valid else _reason(details),
        metrics=metrics,
        num_identical=None,
        num_samples=num_samples,
    )


def _reason(details: dict[str, Any]) -> str:
    found = [text for key, text in _REASONS.items() if details.get(key) is False]
    said = str(details.get("error_invalid_config") or "").strip()
    # What is left is that too few queries ran to be sure of a percentile.
    return "; ".join([*found, *([said] if said else [])]) or "early stopping: more queries"


def _accuracy(
    llm: LLM, name: str, scenario: str, folder: Path, reference: Sequence[tuple[int, ...]]
) -> Result:
    answers = read_answers(folder)
    decode = llm.tokenizer.decode
    scores = mean_rouge(
        (decode(answers.get(i, ())), decode(tokens)) for i, tokens in enumerate(reference)
    )
    same = sum(answers.get(i) == tokens for i, tokens in enumerate(reference))
    lengths = [len(tokens) for tokens in answers.values()]
    return Result(
        contender=name,
        scenario=scenario,
        mode="accuracy",
        valid=None,
        reason="",
        metrics={**scores, "tokens_per_sample": sum(lengths) / len(reference)},
        num_identical=same,
        num_samples=len(reference),
    )
