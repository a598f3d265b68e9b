"""`bench grammar`: what is compared, and whether the texts have the form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftwood.bench.grammar import GrammarRun, _in_form, summarise
from draftwood.bench.records import read_records
from draftwood.cli.app import run as run_command
from tests.tiny import save_tiny

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder."""
    return save_tiny(tmp_path_factory.mktemp("grammar") / "llama")


def test_the_command_writes_a_record(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "grammar.jsonl"
    arguments = ["bench", "grammar", str(model), "--drafters", "suffix", "--limit", "2"]
    assert run_command([*arguments, "--max-tokens", "16", "--out", str(out)]) == 0
    assert "2 of 2" in capsys.readouterr().out
    rows = read_records(out)
    runs = [row for row in rows if row["type"] == "grammar"]
    assert {(row["prompt"], row["drafter"], row["grammar"]) for row in runs} == {
        (prompt, drafter, form)
        for prompt in ("rivers", "planets")
        for drafter in ("plain", "suffix")
        for form in (True, False)
    }
    for row in runs:
        assert row["in_form"] is (True if row["grammar"] else None)
        assert row["identical"] is (None if row["drafter"] == "plain" else True)
        assert row["num_tokens"] == 16
        assert 1 < row["num_rounds"] <= 16
        assert row["decode_s"] > 0
    assert [row["drafter"] for row in rows if row["type"] == "grammar_summary"] == [
        "plain", "suffix"
    ]  # fmt: skip


def test_a_schema_of_ones_own(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "schema.json", tmp_path / "grammar.jsonl"
    path.write_text(json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 30}))
    arguments = ["bench", "grammar", str(model), "--limit", "1", "--max-tokens", "12"]
    arguments += ["--schema", str(path), "--out", str(out), "--drafters", "none"]
    assert run_command(arguments) == 0
    assert read_records(out)[0]["schema"]["items"] == {"type": "boolean"}
    path.write_text("[1]")
    assert run_command(arguments) == 2
    assert "schema.json holds no JSON schema" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ['[{"a":', '[{"a', "[", "[1, 2", "[tr", "[-", '["x\\', '["x\\u00', "[1.", '{"a":[]}', "[{"],
)
def test_the_beginning_of_json_has_the_form(text: str) -> None:
    assert _in_form(text)


@pytest.mark.parametrize("text", ["Sure: [1]", '[{"a" 1', "[1 2, 3]", "[}", "[trie", "[1]]"])
def test_other_text_has_not(text: str) -> None:
    assert not _in_form(text)


def run_of(prompt: str, drafter: str, grammar: bool, seconds: float) -> GrammarRun:
    """Eleven tokens in six rounds."""
    return GrammarRun(
        prompt=prompt, drafter=drafter, grammar=grammar, order=0, num_tokens=11, decode_s=seconds,
        num_rounds=6, identical=None if drafter == "plain" else True,
        in_form=True if grammar else None, neighbours=None,
    )  # fmt: skip


def test_ratios_are_taken_prompt_by_prompt() -> None:
    runs = [
        run_of("a", "plain", False, 1.0), run_of("a", "plain", True, 1.1),
        run_of("b", "plain", False, 10.0), run_of("b", "plain", True, 12.0),
        run_of("c", "plain", False, 2.0), run_of("c", "plain", True, 2.0),
        run_of("d", "plain", False, 9.0),  # nothing to compare with
    ]  # fmt: skip
    [line] = summarise(runs)
    assert line.per_token.value == pytest.approx(1.1)
    assert line.per_round.value == pytest.approx(1.1)
    assert runs[0].per_round_s == 0.2
    assert (line.free_ms, line.grammar_ms) == (200.0, 200.0)
    assert (line.num_prompts, line.num_in_form, line.num_compared) == (3, 3, 0)
