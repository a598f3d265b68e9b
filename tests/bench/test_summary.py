"""The arithmetic of the tables, against numbers worked out by hand."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from draftwood.bench.difference import Difference
from draftwood.bench.records import Rounds, RunRecord
from draftwood.bench.summary import cpu_speed, decode_speed, ratios, summarise, total_speed
from draftwood.bench.tables import comparison_tables


def record(
    prompt: str, contender: str, total_s: float, *, num_tokens: int = 11, **changes: Any
) -> RunRecord:
    """A run of 11 tokens, the first after one second, of a kind named by the prompt's letter."""
    values = {
        "prompt": prompt,
        "kind": prompt[0],
        "contender": contender,
        "order": 0,
        "num_prompt_tokens": 5,
        "num_tokens": num_tokens,
        "first_token_s": 1.0,
        "total_s": total_s,
        "cpu_s": 2 * total_s,
        "identical": True,
    }
    return RunRecord(**{**values, **changes})


def rounds(num_rounds: int, proposed: tuple[int, ...], accepted: tuple[int, ...]) -> Rounds:
    """Rounds of one second each, a tenth of it drafting."""
    return Rounds(
        num_rounds=num_rounds,
        num_draft_tokens=2 * sum(proposed),
        num_accepted_tokens=sum(accepted),
        proposed_per_position=proposed,
        accepted_per_position=accepted,
        draft_s=0.1 * num_rounds,
        target_s=0.7 * num_rounds,
        verify_s=0.15 * num_rounds,
        commit_s=0.05 * num_rounds,
    )


# Kind a: plain decodes at 10/10 = 1 and 10/4 = 2.5 tokens/s; kind b at 10/5 = 2.
PLAIN = [record("a1", "plain", 11.0), record("a2", "plain", 5.0), record("b1", "plain", 6.0)]
# At 10/2 = 5, 10/8 = 1.25 and 10/5 = 2: ratios 5, 0.5 and 1.
FAST = [
    record("a1", "fast", 3.0, rounds=rounds(4, (4, 2), (2, 1))),
    record("a2", "fast", 9.0, rounds=rounds(6, (3, 2, 1), (1,))),
    record("b1", "fast", 6.0),
]


def test_speeds_of_a_run() -> None:
    run = record("a1", "plain", 11.0)
    assert total_speed(run) == 1.0
    assert decode_speed(run) == 1.0
    assert cpu_speed(run) == 0.5
    assert decode_speed(record("a1", "plain", 11.0, num_tokens=1)) is None
    assert decode_speed(record("a1", "plain", 1.0)) is None


def test_ratios_are_per_prompt_and_kinds_weigh_the_same() -> None:
    found = ratios(FAST, PLAIN, decode_speed)
    assert found is not None
    assert found["by_kind"] == {"a": 2.75, "b": 1.0}
    assert found["mean"] == 1.875
    assert (found["median"], found["min"], found["max"]) == (1.0, 0.5, 5.0)
    assert found["num_prompts"] == 3


def test_a_prompt_without_both_speeds_has_no_ratio() -> None:
    short = [record("a1", "fast", 3.0, num_tokens=1), record("c1", "fast", 3.0)]
    assert ratios(short, PLAIN, decode_speed) is None
    both = ratios([*short, FAST[1]], PLAIN, decode_speed)
    assert both is not None
    assert (both["mean"], both["num_prompts"]) == (0.5, 1)


def test_acceptance_adds_up_over_prompts() -> None:
    own = summarise([*PLAIN, *FAST])["fast"]["rounds"]
    assert own["num_rounds"] == 10
    assert own["proposed_per_position"] == [7, 4, 1]
    assert own["acceptance_by_position"] == pytest.approx([3 / 7, 1 / 4, 0.0])
    assert own["mean_acceptance_length"] == pytest.approx(1 + 4 / 10)
    assert own["nodes_per_round"] == pytest.approx(24 / 10)
    assert own["seconds_per_round"] == pytest.approx(1.0)
    assert own["shares"] == pytest.approx(
        {"draft": 0.1, "target": 0.7, "verify": 0.15, "commit": 0.05}
    )


def test_baselines_come_first_and_ratios_to_them_are_theirs() -> None:
    other = [record(p.prompt, "transformers", 1 + 2 * (p.total_s - 1)) for p in PLAIN]
    summary = summarise([*FAST, *PLAIN, *other])
    assert list(summary) == ["transformers", "plain", "fast"]
    assert summary["plain"]["to_transformers"]["decode"]["mean"] == 2.0
    assert summary["transformers"]["to_plain"]["decode"]["mean"] == 0.5
    assert summary["fast"]["to_transformers"]["decode"]["mean"] == 3.75
    assert summary["plain"]["decode_tokens_per_s"] == 2.0
    assert summary["plain"]["rounds"] is None


def test_without_a_baseline_there_is_no_ratio() -> None:
    summary = summarise(FAST)
    assert summary["fast"]["to_plain"]["decode"] is None
    assert summary["fast"]["to_transformers"]["total"] is None


def parted(prompt: str, margin: float) -> RunRecord:
    """A run whose text leaves that of plain decoding at its fourth token."""
    difference = Difference(position=3, plain_token=1, token=2, margin=margin, gap=margin)
    return record(prompt, "fast", 3.0, identical=False, difference=difference)


def test_texts_are_counted_as_same_tied_or_different() -> None:
    runs = [
        FAST[0],
        parted("a2", 2e-4),
        parted("b1", 0.5),
        record("c", "fast", 2.0, identical=None),
    ]
    texts = summarise([*PLAIN, *runs])["fast"]["texts"]
    assert (texts["num_compared"], texts["num_identical"], texts["num_ties"]) == (3, 1, 1)
    assert texts["differences"][1] == {"prompt": "b1", "position": 3, "margin": 0.5}


def shown(records: list[RunRecord], **changes: Any) -> str:
    """The tables as text."""
    contenders = summarise(records)
    summary = {"contenders": contenders, "skipped": [], "interrupted": False, **changes}
    screen = Console(file=io.StringIO(), width=118)
    screen.print(comparison_tables(summary))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_the_tables_hold_every_contender_and_every_loss() -> None:
    text = shown([*PLAIN, FAST[0], parted("a2", 0.5), FAST[2]])
    speeds, by_kind = text.split("Decoding speed over plain, by kind")
    by_kind, in_rounds = by_kind.split("Rounds: tokens gained")
    for part in (speeds, by_kind, in_rounds):
        assert "fast" in part
    assert "plain" in speeds
    assert "fast differs from plain at a2, token 3" in text
    assert "0.5 apart" in text
    assert "2/3" in speeds


def test_the_tables_say_what_spoils_them() -> None:
    busy = [record("a1", "plain", 11.0, neighbours=1.5)]
    skipped = [{"prompt": "b1", "reason": "too long"}]
    text = shown(busy, skipped=skipped, interrupted=True)
    assert "1.5 cores busy" in text
    assert "b1 was skipped: too long" in text
    assert "Interrupted" in text
    assert "cores busy" not in shown(PLAIN)


def test_the_tables_of_nothing_can_be_shown() -> None:
    assert "Interrupted" in shown([], interrupted=True)
