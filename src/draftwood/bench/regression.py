"""Two records of the same benchmark: what became slower, and whether that is more than chance.

Prompt by prompt, so that only prompts both have count and their differences do not blur the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from draftwood.bench.contenders import PLAIN
from draftwood.bench.intervals import Estimate, estimate, middle
from draftwood.bench.record_file import RecordFile
from draftwood.bench.speedups import ALL
from draftwood.errors import ConfigError

# (contender, kind, prompt) to a speed.
Speeds = Mapping[tuple[str, str, str], float]


@dataclass(frozen=True, slots=True)
class Change:
    """One contender at one kind of prompt, before and after.

    Attributes:
        contender: who.
        kind: "all" for all prompts together.
        before, after: medians over the prompts that both records have.
        ratio: median over prompts of after over before, with its interval.
        slower: the whole interval lies below one by more than is tolerated.
    """

    contender: str
    kind: str
    before: float
    after: float
    ratio: Estimate
    slower: bool

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


def compare_records(
    before: RecordFile, after: RecordFile, *, to_plain: bool, tolerance: float
) -> list[Change]:
    """What changed from one record to the other.

    Args:
        before, after: of `compare`, `spec`, `peers` or `batch`.
        to_plain: compare speed-ups over plain decoding instead of speeds: for records of machines
            that are not the same, or not equally busy.
        tolerance: how much slower is still called equal; 0.02 is two per cent.

    Raises:
        ConfigError: they have no contender and prompt in common.
    """
    old, new = _speeds(before), _speeds(after)
    if to_plain:
        old, new = _over_plain(old), _over_plain(new)
    common = [key for key in old if key in new]
    if not common:
        raise ConfigError(
            f"{before.name} and {after.name} have no contender and prompt in common: compare"
            " records of the same benchmark and the same prompts"
        )
    changes = []
    for contender in dict.fromkeys(key[0] for key in common):
        own = [key for key in common if key[0] == contender]
        groups = {
            kind: [k for k in own if k[1] == kind] for kind in dict.fromkeys(k[1] for k in own)
        }
        for kind, keys in [*groups.items(), (ALL, own)]:
            changes.append(_change(contender, kind, keys, old, new, tolerance))
    return changes


def differences(before: RecordFile, after: RecordFile) -> Iterator[str]:
    """What else is not the same in two records, a line each: it may be the cause."""
    for name, old, new in (
        *((field, before.fingerprint.get(field), after.fingerprint.get(field)) for field in _FACTS),
        *((field, before.machine.get(field), after.machine.get(field)) for field in _MACHINE),
    ):
        if old != new and not (isinstance(old, dict) or isinstance(new, dict)):
            yield f"{name}: {old}, then {new}"
        elif isinstance(old, dict) and isinstance(new, dict):
            parts = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            yield from (f"{name}, {key}: {old.get(key)}, then {new.get(key)}" for key in parts)
        elif old != new:
            yield f"{name} is in one of them only"


_FACTS = ("command", "model", "draft_model", "params", "prompts")
_MACHINE = ("cpu", "gpu", "torch", "draftwood", "commit")


def _speeds(record: RecordFile) -> Speeds:
    """Decoding speed by prompt; of batches the total by group."""
    speeds = {(run.contender, run.kind, run.prompt): run.decode_tokens_per_s for run in record.runs}
    for row in record.of("batch"):
        kind = f"{row['concurrency']} at once"
        speeds[row["contender"], kind, f"{kind}, group {row['group']}"] = row["tokens_per_s"]
    return {key: speed for key, speed in speeds.items() if speed}


def _over_plain(speeds: Speeds) -> Speeds:
    plain = {key[1:]: speed for key, speed in speeds.items() if key[0] == PLAIN}
    return {
        key: speed / plain[key[1:]]
        for key, speed in speeds.items()
        if key[0] != PLAIN and key[1:] in plain
    }


def _change(
    contender: str,
    kind: str,
    keys: Sequence[tuple[str, str, str]],
    old: Speeds,
    new: Speeds,
    tolerance: float,
) -> Change:
    ratio = estimate([new[key] / old[key] for key in keys], middle)
    slower = ratio.high is not None and ratio.high < 1 - tolerance
    before, after = _median(old, keys), _median(new, keys)
    return Change(contender, kind, before, after, ratio, slower)


def _median(speeds: Speeds, keys: Iterable[tuple[str, str, str]]) -> float:
    return median(speeds[key] for key in keys)
