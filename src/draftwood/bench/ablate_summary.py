"""What the runs of an ablation say: every setting against plain decoding and against all parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from draftwood.bench.ablate import PLAIN, AblationRun, Setting, Workload
from draftwood.bench.intervals import Estimate, estimate, middle

FULL = "all parts"

_Speed = Callable[[AblationRun], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationLine:
    """One `ablation_summary` line: a setting at a workload.

    Attributes:
        part: what differs from all parts at the usual workload; "all parts" where nothing does.
        setting, workload: which.
        decode_tokens_per_s: the median over groups; None when nothing was decoded.
        to_plain: decoding speed over plain decoding's, the median over groups; None for plain.
        to_plain_total: the same with the prompts included.
        to_full: decoding speed over that of all parts at the same workload.
        tokens_per_round: tokens that a verification gave, the target's own among them.
        nodes_per_round: draft nodes verified.
        num_groups: groups of prompts.
        num_texts, num_identical: texts compared with plain decoding's.
        neighbours: cores that other processes kept busy, the median; None where it is not known.
    """

    part: str
    setting: Setting
    workload: Workload
    decode_tokens_per_s: float | None
    to_plain: Estimate | None
    to_plain_total: Estimate | None
    to_full: Estimate | None
    tokens_per_round: float
    nodes_per_round: float
    num_groups: int
    num_texts: int
    num_identical: int
    neighbours: float | None

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        return {"type": "ablation_summary", **asdict(self)}


def summarise(runs: Sequence[AblationRun], full: Setting, usual: Workload) -> list[AblationLine]:
    """A line for each setting at each workload, the usual one first."""
    cells: dict[Workload, dict[Setting, dict[int, AblationRun]]] = {usual: {}}
    for run in runs:
        own = cells.setdefault(run.workload, {})
        own.setdefault(run.setting, {})[run.group] = run
    return [
        _line(part_name(setting, workload, full, usual), of, settings, full)
        for workload, settings in cells.items()
        for setting, of in sorted(settings.items(), key=lambda item: _rank(item[0], full))
    ]


def part_name(setting: Setting, workload: Workload, full: Setting, usual: Workload) -> str:
    """What differs from the full setting and the usual workload."""
    names = list(_workload_parts(workload, usual))
    if setting == PLAIN:
        names.insert(0, "plain")
    else:
        names.extend(_setting_parts(setting, full))
    return ", ".join(names) or FULL


def _workload_parts(one: Workload, usual: Workload) -> Iterable[str]:
    if one.temperature != usual.temperature:
        yield f"temperature {one.temperature:g}" if one.temperature else "greedy"
    if one.batch != usual.batch:
        yield f"{one.batch} at once"
    if one.context != usual.context:
        yield f"context {one.context}"


def _setting_parts(one: Setting, full: Setting) -> Iterable[str]:
    if one.drafter != full.drafter:
        yield f"drafter {one.drafter}"
    if one.max_tree_nodes != full.max_tree_nodes:
        yield f"{one.max_tree_nodes} nodes"
    if one.controller != full.controller:
        yield "controller" if one.controller else "no controller"


def _rank(setting: Setting, full: Setting) -> int:
    """Plain, then all parts; `sorted` leaves the rest in order of their first turn."""
    return {PLAIN: 0, full: 1}.get(setting, 2)


def _line(
    part: str,
    own: Mapping[int, AblationRun],
    settings: Mapping[Setting, Mapping[int, AblationRun]],
    full: Setting,
) -> AblationLine:
    runs = list(own.values())
    setting, workload = runs[0].setting, runs[0].workload
    plain, whole = settings.get(PLAIN, {}), settings.get(full, {})
    rounds = sum(run.num_rounds for run in runs)
    compared = [run for run in runs if run.num_identical is not None]
    busy = [run.neighbours for run in runs if run.neighbours is not None]
    speeds = [speed for run in runs if (speed := _decoding(run)) is not None]
    return AblationLine(
        part=part,
        setting=setting,
        workload=workload,
        decode_tokens_per_s=median(speeds) if speeds else None,
        to_plain=_ratio(own, plain, _decoding) if setting != PLAIN else None,
        to_plain_total=_ratio(own, plain, _total) if setting != PLAIN else None,
        to_full=_ratio(own, whole, _decoding),
        tokens_per_round=1 + sum(run.num_accepted_tokens for run in runs) / rounds,
        nodes_per_round=sum(run.num_draft_tokens for run in runs) / rounds,
        num_groups=len(runs),
        num_texts=len(compared) * workload.batch,
        num_identical=sum(run.num_identical or 0 for run in compared),
        neighbours=median(busy) if busy else None,
    )


def _total(run: AblationRun) -> float | None:
    return run.tokens_per_s


def _decoding(run: AblationRun) -> float | None:
    return run.decode_tokens_per_s


def _ratio(
    own: Mapping[int, AblationRun], base: Mapping[int, AblationRun], speed: _Speed
) -> Estimate | None:
    """The median over groups that both ran; None when none has both speeds."""
    pairs = [(speed(run), speed(base[group])) for group, run in own.items() if group in base]
    ratios = [mine / theirs for mine, theirs in pairs if mine and theirs]
    return estimate(ratios, middle) if ratios else None
