"""`bench diff`: what counts as a regression, and what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftwood.bench.record_file import load_record
from draftwood.bench.regression import Change, compare_records, differences
from draftwood.cli.app import run as run_command
from draftwood.errors import ConfigError
from tests.bench.test_report import fingerprint, write
from tests.bench.test_summary import record as run_of


def runs(
    factors: list[float], contender: str = "auto", plain: float = 1.0, first: int = 0
) -> list[dict[str, Any]]:
    """Prompts of kind "k" whose decoding takes ten seconds over a factor."""
    made = []
    for i, factor in enumerate(factors, start=first):
        made.append(run_of(f"k{i}", "plain", 1 + 10 / plain).to_json())
        made.append(run_of(f"k{i}", contender, 1 + (10 + i) / factor).to_json())
    return made


def changes(tmp_path: Path, old: list[Any], new: list[Any], **how: Any) -> dict[Any, Change]:
    """(contender, kind) to its change."""
    a = load_record(write(tmp_path / "a.jsonl", [fingerprint("compare"), *old]))
    b = load_record(write(tmp_path / "b.jsonl", [fingerprint("compare"), *new]))
    found = compare_records(a, b, **{"to_plain": False, "tolerance": 0.02, **how})
    return {(change.contender, change.kind): change for change in found}


def test_slower_beyond_chance(tmp_path: Path) -> None:
    found = changes(tmp_path, runs([2.0] * 6), runs([1.6, 1.7, 1.6, 1.7, 1.6, 1.5]))
    one = found["auto", "k"]
    assert one.slower
    assert one.ratio.value == pytest.approx(0.8)
    assert one.before == pytest.approx(2 * 10 / 12.5, rel=0.01)
    assert not found["plain", "all"].slower
    assert found["plain", "all"].ratio.value == 1.0


@pytest.mark.parametrize(
    "after",
    [
        [2.0] * 6,
        [2.5] * 6,
        [1.97] * 6,  # less than is tolerated
        [1.0, 2.6, 1.0, 2.6, 2.4, 2.6],  # slower here, faster there
    ],
)
def test_not_slower(tmp_path: Path, after: list[float]) -> None:
    assert not any(c.slower for c in changes(tmp_path, runs([2.0] * 6), runs(after)).values())


def test_two_prompts_prove_nothing(tmp_path: Path) -> None:
    one = changes(tmp_path, runs([2.0] * 2), runs([1.0] * 2))["auto", "k"]
    assert one.ratio.value == pytest.approx(0.5)
    assert one.ratio.high is None
    assert not one.slower


def test_only_common_prompts_count(tmp_path: Path) -> None:
    one = changes(tmp_path, runs([2.0] * 4), runs([2.0] * 4, first=2))["auto", "all"]
    assert one.ratio.count == 2
    with pytest.raises(ConfigError, match="no contender and prompt in common"):
        changes(tmp_path, runs([2.0] * 2), runs([2.0] * 2, first=5))


def test_a_slower_machine_leaves_the_ratios(tmp_path: Path) -> None:
    old, new = runs([2.0] * 5), runs([1.0] * 5, plain=0.5)
    assert changes(tmp_path, old, new)["auto", "all"].slower
    found = changes(tmp_path, old, new, to_plain=True)
    assert list(found) == [("auto", "k"), ("auto", "all")]
    assert found["auto", "all"].ratio.value == pytest.approx(1.0)
    assert not found["auto", "all"].slower


def test_batches_are_compared_by_size(tmp_path: Path) -> None:
    def batches(speed: float) -> list[dict[str, Any]]:
        return [
            {
                "type": "batch", "concurrency": n, "group": g, "contender": "auto",
                "tokens_per_s": speed * (1 if n == 1 else 2) + g,
            }
            for n in (1, 4)
            for g in range(3)
        ]  # fmt: skip

    found = changes(tmp_path, batches(10.0), batches(5.0))
    assert [kind for _, kind in found] == ["1 at once", "4 at once", "all"]
    assert all(change.slower for change in found.values())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(
        tmp_path / "a.jsonl", [fingerprint("compare", params={"max_tokens": 8}), *runs([2.0] * 4)]
    )
    b = write(
        tmp_path / "b.jsonl", [fingerprint("compare", params={"max_tokens": 9}), *runs([1.0] * 4)]
    )
    assert run_command(["bench", "diff", str(a), str(b)]) == 1
    shown = capsys.readouterr().out
    assert "params, max_tokens: 8, then 9" in shown
    assert "0.500 to 0.500" in shown
    assert "slower" in shown
    assert run_command(["bench", "diff", str(b), str(a), "--json"]) == 0
    assert [row["contender"] for row in json.loads(capsys.readouterr().out)] == [
        "plain",
        "plain",
        "auto",
        "auto",
    ]
    assert list(differences(load_record(a), load_record(a))) == []
