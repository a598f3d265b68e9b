"""The arithmetic behind the tables. A ratio is taken per prompt, then averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from draftwood.bench.contenders import PLAIN, TRANSFORMERS
from draftwood.bench.records import Rounds, RunRecord

Speed = Callable[[RunRecord], float | None]
# Differences below this margin are put down to rounding.
TIE_MARGIN = 1e-3


def total_speed(record: RunRecord) -> float | None:
    """Tokens a second, the prompt included."""
    return record.tokens_per_s


def cpu_speed(record: RunRecord) -> float | None:
    """Tokens per second of processor time: on one thread, others' work does not count."""
    return record.num_tokens / record.cpu_s if record.cpu_s > 0 else None


def decode_speed(record: RunRecord) -> float | None:
    """Tokens a second after the first."""
    return record.decode_tokens_per_s


def summarise(records: Sequence[RunRecord]) -> dict[str, Any]:
    """What each contender achieved, ready for JSON.

    Returns:
        Contender to its speeds, ratios to plain decoding and to transformers, acceptance, shares
        of time and comparison of texts; in the order in which contenders first appear.
    """
    names = list(dict.fromkeys(record.contender for record in records))
    return {name: _contender(name, records) for name in sorted(names, key=_rank)}


def _rank(name: str) -> int:
    """The two baselines come first; `sorted` leaves the rest in order."""
    return {TRANSFORMERS: 0, PLAIN: 1}.get(name, 2)


def _contender(name: str, records: Sequence[RunRecord]) -> dict[str, Any]:
    own = [record for record in records if record.contender == name]
    plain = [record for record in records if record.contender == PLAIN]
    other = [record for record in records if record.contender == TRANSFORMERS]
    return {
        "num_prompts": len(own),
        "tokens_per_s": _middle(total_speed(record) for record in own),
        "decode_tokens_per_s": _middle(decode_speed(record) for record in own),
        "to_plain": {
            "decode": ratios(own, plain, decode_speed),
            "total": ratios(own, plain, total_speed),
            "cpu": ratios(own, plain, cpu_speed),
        },
        "to_transformers": {
            "decode": ratios(own, other, decode_speed),
            "total": ratios(own, other, total_speed),
            "cpu": ratios(own, other, cpu_speed),
        },
        **_acceptance([record.rounds for record in own if record.rounds]),
        "neighbours": _middle(record.neighbours for record in own),
        "texts": _texts(own),
    }


def ratios(
    own: Iterable[RunRecord], base: Iterable[RunRecord], speed: Speed
) -> dict[str, Any] | None:
    """Speed over the base's at the same prompt.

    Returns:
        `by_kind`, the mean of each kind; `mean` of these, so that kinds with many prompts do not
        outweigh others; `median`, `min` and `max` over prompts. None when no prompt has both.
    """
    base_speeds = {record.prompt: speed(record) for record in base}
    by_kind: dict[str, list[float]] = {}
    for record in own:
        mine, theirs = speed(record), base_speeds.get(record.prompt)
        if mine and theirs:
            by_kind.setdefault(record.kind, []).append(mine / theirs)
    everything = [ratio for group in by_kind.values() for ratio in group]
    if not everything:
        return None
    means = {kind: fmean(group) for kind, group in by_kind.items()}
    return {
        "mean": fmean(means.values()),
        "median": median(everything),
        "min": min(everything),
        "max": max(everything),
        "num_prompts": len(everything),
        "by_kind": means,
    }


def _acceptance(rounds: Sequence[Rounds]) -> dict[str, Any]:
    """Tokens a round, acceptance by position and shares of time, over all rounds together."""
    num_rounds = sum(r.num_rounds for r in rounds)
    if not num_rounds:
        return {"rounds": None}
    proposed = _added(r.proposed_per_position for r in rounds)
    accepted = _added(r.accepted_per_position for r in rounds)
    accepted += [0] * (len(proposed) - len(accepted))
    num_accepted = sum(r.num_accepted_tokens for r in rounds)
    return {
        "rounds": {
            "num_rounds": num_rounds,
            "mean_acceptance_length": 1 + num_accepted / num_rounds,
            "nodes_per_round": sum(r.num_draft_tokens for r in rounds) / num_rounds,
            "proposed_per_position": proposed,
            "acceptance_by_position": [a / p for a, p in zip(accepted, proposed, strict=True)],
            "seconds_per_round": sum(map(_seconds, rounds)) / num_rounds,
            "shares": _shares(rounds),
        }
    }


def _shares(rounds: Sequence[Rounds]) -> dict[str, float]:
    total = sum(map(_seconds, rounds))
    parts = ("draft", "target", "verify", "commit")
    return {
        part: sum(getattr(r, f"{part}_s") for r in rounds) / total if total else 0.0
        for part in parts
    }


def _seconds(rounds: Rounds) -> float:
    return rounds.draft_s + rounds.target_s + rounds.verify_s + rounds.commit_s


def _texts(records: Iterable[RunRecord]) -> dict[str, Any]:
    compared = [record for record in records if record.identical is not None]
    parted = [(record.prompt, d) for record in compared if (d := record.difference)]
    return {
        "num_compared": len(compared),
        "num_identical": sum(bool(record.identical) for record in compared),
        "num_ties": sum(d.margin < TIE_MARGIN for _, d in parted),
        "differences": [
            {"prompt": prompt, "position": d.position, "margin": d.margin} for prompt, d in parted
        ],
    }


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _added(rows: Iterable[Sequence[int]]) -> list[int]:
    """Sums by position of rows of different lengths."""
    total: list[int] = []
    for row in rows:
        total.extend([0] * (len(row) - len(total)))
        for i, value in enumerate(row):
            total[i] += value
    return total
