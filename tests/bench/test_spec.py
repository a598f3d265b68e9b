"""`bench spec`: conversations, Spec-Bench's arithmetic, and a run that is killed and goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftwood.bench.compare import Skip, make_comparison
from draftwood.bench.contenders import EngineContender
from draftwood.bench.data import BenchPrompt, load_prompts
from draftwood.bench.records import Rounds, RunRecord, read_records
from draftwood.bench.spec import Turn, in_groups, run_questions, summarise_spec
from draftwood.cli.app import run as run_command
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from tests.tiny import save_tiny

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["one two", "again"]},
    {"question_id": 161, "category": "translation", "turns": ["three"]},
    {"question_id": 201, "category": "qa", "turns": ["four five four five"]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder."""
    return save_tiny(tmp_path_factory.mktemp("spec") / "llama")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Questions in Spec-Bench's form."""
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS), encoding="utf-8")
    return path


def command(model: Path, data: Path, out: Path, *more: str) -> int:
    """Runs `bench spec` with short texts."""
    arguments = ["bench", "spec", str(model), "--data", str(data), "--out", str(out)]
    return run_command([*arguments, "--max-tokens", "6", "--drafters", "none,suffix", *more])


def runs(path: Path) -> list[tuple[str, str]]:
    """(turn, contender) of a record's runs."""
    return [(row["prompt"], row["contender"]) for row in read_records(path) if row["type"] == "run"]


ALL_RUNS = {
    (turn, name) for turn in ("81#1", "81#2", "161#1", "201#1") for name in ("plain", "suffix")
}


def test_a_second_turn_holds_our_first_answer(model: Path, data: Path) -> None:
    llm = LLM(str(model), drafter="none")
    seen: list[list[int]] = []
    comparison = make_comparison(
        llm, "", ["none", "suffix"], SamplingParams(max_tokens=6), transformers=False
    )
    for contender in comparison.contenders:
        assert isinstance(contender, EngineContender)
        contender.run = _spied(contender.run, seen)  # type: ignore[method-assign]
    results: list[Sequence[RunRecord | Skip]] = []
    run_questions(
        comparison,
        in_groups(load_prompts(data))[:1],
        frozenset(),
        results.append,
        lambda turn, contender: None,
    )
    first, second = seen[2], seen[4]  # behind the two that warm up; each is given to both
    answer = llm.tokenizer.decode(comparison.answers[tuple(first)][len(first) :])
    assert answer
    assert second == Turn("", "", ("one two", answer, "again")).encode(llm.tokenizer)
    [records] = results
    assert [(r.prompt, r.identical) for r in records if isinstance(r, RunRecord)] == [
        ("81#1", True), ("81#1", True), ("81#2", True), ("81#2", True)
    ]  # fmt: skip


def _spied(run: Any, seen: list[list[int]]) -> Any:
    def spy(prompt_ids: Sequence[int], params: SamplingParams) -> Any:
        seen.append(list(prompt_ids))
        return run(prompt_ids, params)

    return spy


def test_a_foreign_category_is_named() -> None:
    with pytest.raises(ConfigError, match="question 7 has the category 'poem'"):
        in_groups([BenchPrompt("7", "poem", ("x",), chat=True)])


def test_the_command_writes_a_record_and_a_leaderboard(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "spec.jsonl"
    assert command(model, data, out) == 0
    shown = capsys.readouterr().out
    assert "Retrieval-aug." in shown
    assert "MAT" in shown
    assert set(runs(out)) == ALL_RUNS
    assert len(runs(out)) == len(ALL_RUNS)
    summary = read_records(out)[-1]
    assert summary["spec"]["suffix"]["num_identical"] == 4
    assert set(summary["spec"]["suffix"]["speedup"]) == {"mt_bench", "translation", "qa", "overall"}


def test_sampled_texts_are_plain_decodings(model: Path, data: Path, tmp_path: Path) -> None:
    """At temperature 1, in both turns; another seed is another record."""
    out = tmp_path / "spec.jsonl"
    assert command(model, data, out, "--temperature", "1", "--seed", "3") == 0
    rows = [row for row in read_records(out) if row["type"] == "run"]
    assert {(row["prompt"], row["contender"]) for row in rows} == ALL_RUNS
    assert all(row["identical"] for row in rows)
    assert read_records(out)[0]["params"]["temperature"] == 1.0
    assert command(model, data, out, "--temperature", "1", "--seed", "4") == 2


@pytest.mark.parametrize("cut", ["line", "question", "start", "summary"])
def test_a_killed_run_goes_on(model: Path, data: Path, tmp_path: Path, cut: str) -> None:
    """Whatever a kill leaves of the file: no question is lost, none is there twice."""
    out = tmp_path / "spec.jsonl"
    assert command(model, data, out) == 0
    text = out.read_text()
    lines = text.splitlines(keepends=True)
    kept = {
        "line": "".join(lines[:5]) + lines[5][:40],  # 81 is whole, the next line is cut off
        "question": "".join(lines[:4]),  # a turn and a half of 81
        "start": lines[0][:30],
        "summary": text,
    }[cut]
    out.write_text(kept)
    assert command(model, data, out) == 0
    assert set(runs(out)) == ALL_RUNS
    assert len(runs(out)) == len(ALL_RUNS)
    rows = read_records(out)
    assert [row["type"] for row in rows].count("summary") == 1
    assert rows[-1]["spec"]["plain"]["num_questions"]["overall"] == 3
    if cut in ("line", "summary"):
        assert out.read_text().startswith("".join(lines[:5])), "what was whole is as it was"


def test_more_questions_are_added_to_a_record(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "spec.jsonl"
    assert command(model, data, out, "--limit", "1") == 0
    assert {turn for turn, _ in runs(out)} == {"81#1", "81#2"}
    assert command(model, data, out) == 0
    assert set(runs(out)) == ALL_RUNS
    assert len(runs(out)) == len(ALL_RUNS)


def test_a_record_of_something_else_is_refused(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "spec.jsonl"
    assert command(model, data, out, "--limit", "1") == 0
    before = out.read_bytes()
    assert command(model, data, out, "--temperature", "1") == 2
    assert "params differs" in capsys.readouterr().err
    assert out.read_bytes() == before
    out.write_text("no record\n")
    assert command(model, data, out) == 2
    assert "spec.jsonl:1: this is no record" in capsys.readouterr().err


def test_what_does_not_fit_is_skipped_once(model: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "long.jsonl", tmp_path / "spec.jsonl"
    rows = [*QUESTIONS, {"question_id": 300, "category": "rag", "turns": ["x y z " * 400]}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for _ in range(2):
        assert command(model, data, out) == 0
        assert [row["prompt"] for row in read_records(out) if row["type"] == "skip"] == ["300#1"]
        assert [s["prompt"] for s in read_records(out)[-1]["skipped"]] == ["300#1"]


def record(prompt: str, kind: str, contender: str, num_tokens: int, total_s: float) -> RunRecord:
    """A run; drafters accept one token in each of five rounds."""
    rounds = Rounds(
        num_rounds=5,
        num_draft_tokens=10,
        num_accepted_tokens=0 if contender == "plain" else 5,
        proposed_per_position=(),
        accepted_per_position=(),
        draft_s=0.0,
        target_s=1.0,
        verify_s=0.0,
        commit_s=0.0,
    )
    return RunRecord(
        prompt=prompt,
        kind=kind,
        contender=contender,
        order=0,
        num_prompt_tokens=1,
        num_tokens=num_tokens,
        first_token_s=0.0,
        total_s=total_s,
        cpu_s=1.0,
        rounds=rounds,
        identical=True,
    )


def test_the_arithmetic_is_that_of_spec_bench() -> None:
    """Turns are added before dividing; speeds are averaged before dividing."""
    lines = summarise_spec(
        [
            record("1#1", "mt_bench", "plain", 10, 1.0),
            record("1#2", "mt_bench", "plain", 20, 5.0),  # together 30 / 6 = 5 tokens/s
            record("2#1", "qa", "plain", 10, 1.0),  # 10
            record("1#1", "mt_bench", "auto", 10, 1.0),
            record("1#2", "mt_bench", "auto", 20, 2.0),  # 10
            record("2#1", "qa", "auto", 10, 0.25),  # 40
        ]
    )
    assert lines["plain"]["speedup"] == {"mt_bench": 1.0, "qa": 1.0, "overall": 1.0}
    assert lines["auto"]["speedup"] == {"mt_bench": 2.0, "qa": 4.0, "overall": 50 / 15}
    assert lines["auto"]["mean_accepted_tokens"] == {"mt_bench": 2.0, "qa": 2.0, "overall": 2.0}
    assert lines["auto"]["tokens_per_s"] == 25.0
