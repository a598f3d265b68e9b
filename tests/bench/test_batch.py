"""Several requests at once: what is run, what is counted, and what the summary makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftwood.bench.batch import BatchRun, measure, summarise
from draftwood.cli.app import run as run_command
from draftwood.errors import ConfigError
from draftwood.sampling import SamplingParams
from tests.tiny import VOCAB, random_prompts, save_tiny, tiny_llm

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def test_both_engines_take_turns_and_say_the_same() -> None:
    llm = tiny_llm(adaptive=False)
    llm.make_drafter = lambda name: llm._tiny_drafter("bushy" if name == "auto" else name)  # type: ignore[method-assign]
    free = llm.pool.num_free
    prompts = random_prompts((20, 24, 28, 32, 36), vocab_size=VOCAB)
    runs = measure(llm, "auto", prompts, [1, 3], 2, PARAMS)
    assert [(r.concurrency, r.group, r.contender) for r in runs] == [
        (1, 0, "plain"), (1, 0, "auto"), (1, 1, "auto"), (1, 1, "plain"),
        (3, 0, "plain"), (3, 0, "auto"), (3, 1, "auto"), (3, 1, "plain"),
    ]  # fmt: skip
    for run in runs:
        assert run.num_tokens == 12 * run.concurrency
        assert 0 < run.decode_s < run.total_s
        assert run.decode_tokens <= run.num_tokens - run.concurrency
        assert run.identical is (None if run.contender == "plain" else True)
    assert llm.pool.num_free == free


def test_too_few_prompts_are_named() -> None:
    with pytest.raises(ConfigError, match="2 prompts fit the context, and 4"):
        measure(tiny_llm(), "auto", [[1], [2]], [1, 4], 1, PARAMS)


def run_of(group: int, contender: str, seconds: float, identical: bool | None = None) -> BatchRun:
    return BatchRun(4, group, contender, 40, seconds, seconds - 1, 36, identical)


def test_ratios_are_taken_group_by_group() -> None:
    """A slow moment hits both engines of a group; the ratio of medians would mix groups."""
    runs = [
        run_of(0, "plain", 5.0), run_of(0, "auto", 3.0, True),
        run_of(1, "plain", 9.0), run_of(1, "auto", 5.0, False),
        run_of(2, "plain", 5.0), run_of(2, "auto", 5.0, True),
    ]  # fmt: skip
    [line] = summarise(runs)
    assert line.plain_tokens_per_s == 8.0
    assert line.tokens_per_s == 8.0
    assert line.ratio == pytest.approx(5 / 3)
    assert line.decode_ratio == pytest.approx(2.0)
    assert line.worst == 1.0
    assert (line.num_identical, line.num_texts) == (8, 12)


def test_the_command_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny(tmp_path / "llama")
    out = tmp_path / "batch.jsonl"
    arguments = ["bench", "batch", str(model), "--concurrency", "1,2", "--groups", "1"]
    code = run_command([*arguments, "--max-tokens", "4", "--limit", "6", "--out", str(out)])
    assert code == 0
    assert "Requests at once" in capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    kinds = [row["type"] for row in rows]
    assert kinds == ["fingerprint", *["batch"] * 4, "batch_summary", "batch_summary"]
    assert all(row["num_identical"] == row["num_texts"] for row in rows[-2:])
