"""`bench beams`: both searches find the same, and the ratio is taken prompt by prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwood.bench.beams import OURS, BeamRun, Beams, summarise
from draftwood.bench.records import read_records
from draftwood.cli.app import run as run_command
from draftwood.sampling import SamplingParams
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder."""
    return save_tiny(tmp_path_factory.mktemp("beams") / "llama")


def test_the_command_compares_with_transformers(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "four.txt", tmp_path / "beams.jsonl"
    data.write_text("one two three\nfour five\nsix\nseven eight seven eight\n")
    arguments = ["bench", "beams", str(model), "--beams", "3", "--data", str(data)]
    assert run_command([*arguments, "--max-tokens", "6", "--out", str(out)]) == 0
    assert "4 of 4" in capsys.readouterr().out
    rows = read_records(out)
    assert [row["type"] for row in rows] == ["fingerprint", *["beams"] * 8, "beams_summary"]
    runs = [BeamRun(**{k: v for k, v in row.items() if k != "type"}) for row in rows[1:-1]]
    assert [run.contender for run in runs][:4] == [
        "draftwood", "transformers", "transformers", "draftwood"
    ]  # fmt: skip
    scores: dict[str, list[float]] = {}
    for run in runs:
        assert run.identical
        assert run.total_s > 0
        scores.setdefault(run.prompt, []).append(run.score)
    assert all(one == pytest.approx(other, abs=1e-4) for one, other in scores.values())
    assert rows[-1]["num_identical"] == rows[-1]["num_prompts"] == 4


def test_another_text_is_seen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwood.bench.beams import BeamPrompt
    from draftwood.llm import LLM
    from draftwood.models.sources import resolve

    llm = LLM(str(model), drafter="none")
    both = Beams.load(llm, resolve(str(model)), SamplingParams(max_tokens=5, num_beams=2))
    monkeypatch.setattr(both, "_theirs", both._ours)
    prompt = BeamPrompt("a", "b", llm.tokenizer.encode("one two three"))
    assert all(run.identical for run in both.measure([prompt]))
    both._module = None
    real = both._ours

    def other(token_ids: list[int]) -> object:
        return real(token_ids[:2])

    monkeypatch.setattr(both, "_theirs", other)
    assert not any(run.identical for run in both.measure([prompt]))


def run_of(prompt: str, contender: str, seconds: float) -> BeamRun:
    """A search for ten tokens."""
    return BeamRun(
        prompt=prompt, kind="a", contender=contender, order=0, num_prompt_tokens=3, num_tokens=10,
        total_s=seconds, score=-1.0, identical=prompt != "c", neighbours=None,
    )  # fmt: skip


def test_ratios_are_taken_prompt_by_prompt() -> None:
    runs = [
        run_of("a", OURS, 1.0), run_of("a", "transformers", 2.0),
        run_of("b", OURS, 10.0), run_of("b", "transformers", 10.0),
        run_of("c", OURS, 1.0), run_of("c", "transformers", 4.0),
    ]  # fmt: skip
    summary = summarise(runs, 4)
    assert (summary.ratio.value, summary.worst) == (2.0, 1.0)
    assert (summary.tokens_per_s, summary.transformers_tokens_per_s) == (10.0, 2.5)
    assert (summary.num_identical, summary.num_prompts) == (2, 3)
