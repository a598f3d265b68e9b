"""Speed-ups over plain decoding by kind, with intervals, from the runs of a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from draftwood.bench.contenders import PLAIN
from draftwood.bench.intervals import Estimate, estimate, mean, middle, ratio_of_means
from draftwood.bench.record_file import RecordFile
from draftwood.bench.records import RunRecord
from draftwood.bench.spec import question_of
from draftwood.bench.summary import Speed, decode_speed

ALL = "all"

# Contender to kind to speed-up.
Speedups = Mapping[str, Mapping[str, Estimate]]


def speedups(record: RecordFile) -> Speedups:
    """Speed-up of every contender but plain, by kind and, as "all", over everything.

    For Spec-Bench by its own definition (see `draftwood.bench.spec`). Otherwise the mean over the
    prompts of a kind of their ratios in decoding speed, and the median over all prompts.
    """
    names = [name for name in dict.fromkeys(r.contender for r in record.runs) if name != PLAIN]
    plain = [run for run in record.runs if run.contender == PLAIN]
    taken = _of_questions if record.command == "spec" else _of_prompts
    found = {name: taken([r for r in record.runs if r.contender == name], plain) for name in names}
    return {name: by_kind for name, by_kind in found.items() if by_kind}


def paired(
    own: Iterable[RunRecord], base: Iterable[RunRecord], speed: Speed
) -> dict[str, dict[str, tuple[float, float]]]:
    """Kind to prompt to both speeds, where both are known."""
    others = {run.prompt: speed(run) for run in base}
    pairs: dict[str, dict[str, tuple[float, float]]] = {}
    for run in own:
        mine, theirs = speed(run), others.get(run.prompt)
        if mine and theirs:
            pairs.setdefault(run.kind, {})[run.prompt] = (mine, theirs)
    return pairs


def _of_prompts(own: Sequence[RunRecord], plain: Sequence[RunRecord]) -> dict[str, Estimate]:
    pairs = paired(own, plain, decode_speed)
    ratios = {kind: [a / b for a, b in by.values()] for kind, by in pairs.items()}
    found = {kind: estimate(values, mean) for kind, values in ratios.items()}
    everything = [value for values in ratios.values() for value in values]
    return {**found, ALL: estimate(everything, middle)} if everything else {}


def _of_questions(own: Sequence[RunRecord], plain: Sequence[RunRecord]) -> dict[str, Estimate]:
    mine, theirs = _question_speeds(own), _question_speeds(plain)
    pairs: dict[str, list[tuple[float, float]]] = {}
    for question, (kind, speed) in mine.items():
        if question in theirs:
            pairs.setdefault(kind, []).append((speed, theirs[question][1]))
    found = {kind: estimate(values, ratio_of_means) for kind, values in pairs.items()}
    everything = [pair for values in pairs.values() for pair in values]
    return {**found, ALL: estimate(everything, ratio_of_means)} if everything else {}


def _question_speeds(runs: Iterable[RunRecord]) -> dict[str, tuple[str, float]]:
    """Question to its group and its speed, all turns together."""
    turns: dict[str, list[RunRecord]] = {}
    for run in runs:
        turns.setdefault(question_of(run.prompt), []).append(run)
    return {
        question: (own[0].kind, sum(r.num_tokens for r in own) / sum(r.total_s for r in own))
        for question, own in turns.items()
    }
