"""`bench ablate`: what is varied, what is counted, and a run that is killed and goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftwood.bench.ablate import (
    PLAIN,
    Ablation,
    AblationRun,
    Factors,
    Setting,
    Workload,
    grid,
    one_at_a_time,
    setting_name,
    workload_name,
)
from draftwood.bench.ablate_summary import summarise
from draftwood.bench.records import read_records
from draftwood.cli.app import run as run_command
from draftwood.errors import ConfigError
from draftwood.sampling import SamplingParams
from tests.tiny import TinyLLM, random_prompts, save_tiny, tiny_llm

FACTORS = Factors(
    drafters=["bushy", "random"],
    trees=[32, 4],
    controllers=[True, False],
    temperatures=[0.0, 1.0],
    batches=[1, 3],
    contexts=[0, 40],
)
FULL = FACTORS.full
USUAL = FACTORS.usual
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True, seed=5)


@pytest.fixture(scope="module")
def llm() -> TinyLLM:
    """A tiny model that some drafter drafts for."""
    made = tiny_llm("llama", drafter="none")
    made.make_drafter = lambda name: made._tiny_drafter(name)  # type: ignore[method-assign]
    return made


def test_one_at_a_time_changes_one_thing() -> None:
    first, *others = one_at_a_time(FACTORS)
    assert first.workload == USUAL
    assert first.settings == (
        PLAIN,
        FULL,
        replace(FULL, drafter="random"),
        replace(FULL, max_tree_nodes=4),
        replace(FULL, controller=False),
    )
    assert [block.workload for block in others] == [
        replace(USUAL, temperature=1.0), replace(USUAL, batch=3), replace(USUAL, context=40)
    ]  # fmt: skip
    assert all(block.settings == (PLAIN, FULL, replace(FULL, controller=False)) for block in others)


def test_the_grid_has_every_combination_once() -> None:
    blocks = grid(FACTORS)
    assert len({block.workload for block in blocks}) == len(blocks) == 8
    for block in blocks:
        assert block.settings[0] == PLAIN
        assert len(set(block.settings)) == len(block.settings) == 9


def test_all_settings_say_what_plain_says(llm: TinyLLM) -> None:
    """All take turns at all workloads, sampled, in batches and behind other prompts."""
    free = llm.pool.num_free
    prompts = random_prompts((9, 14, 12, 17, 11))
    cells: list[list[AblationRun]] = []
    blocks = one_at_a_time(FACTORS)
    Ablation(llm, prompts, blocks, 2, PARAMS).measure((), lambda runs: cells.append(list(runs)))
    assert len(cells) == 2 * len(blocks)
    for cell, block in zip(cells, [block for block in blocks for _ in range(2)], strict=True):
        assert {run.workload for run in cell} == {block.workload}
        assert {run.setting for run in cell} == set(block.settings)
        assert [run.order for run in cell] == list(range(len(cell)))
        for run in cell:
            size = block.workload.batch
            assert run.num_tokens == 10 * size
            assert 0 < run.decode_s < run.total_s
            assert run.num_identical == (None if run.setting == PLAIN else size)
            assert run.num_draft_tokens == 0 if run.setting == PLAIN else True
    assert [run.setting for run in cells[0]] != [run.setting for run in cells[1]], "the order turns"
    wide = [run for run in cells[0] if run.setting == replace(FULL, controller=False)]
    narrow = [run for run in cells[0] if run.setting == replace(FULL, max_tree_nodes=4)]
    assert wide[0].num_draft_tokens > narrow[0].num_draft_tokens > 0
    assert llm.pool.num_free == free
    llm.pool.check()


def test_contexts_are_filled_with_other_prompts(llm: TinyLLM) -> None:
    seen: list[list[int]] = []
    prompts = random_prompts((9, 14, 12))
    block = one_at_a_time(replace(FACTORS, batches=[1], contexts=[30], temperatures=[0.0]))[0]
    one = Ablation(llm, prompts, [block], 1, PARAMS)
    seen = one._fitting(block.workload)
    assert seen[0] == [*prompts[2], *prompts[1]][-21:] + prompts[0]
    assert [len(prompt) for prompt in seen] == [30, 30, 30]
    with pytest.raises(ConfigError, match="35 tokens together, and 36 are to stand before"):
        one._fitting(replace(block.workload, context=36))
    with pytest.raises(ConfigError, match="3 prompts fit the context, and 4"):
        Ablation(llm, prompts, grid(replace(FACTORS, batches=[4])), 1, PARAMS).check()


def run_of(group: int, setting: Setting, seconds: float, workload: Workload = USUAL) -> AblationRun:
    """A run that decodes 20 tokens."""
    return AblationRun(
        setting=setting, workload=workload, group=group, order=0, num_tokens=21,
        total_s=seconds + 1,
        decode_s=seconds, decode_tokens=20, num_rounds=10, num_draft_tokens=30,
        num_accepted_tokens=10, num_identical=None if setting == PLAIN else 1, neighbours=0.0,
    )  # fmt: skip


def test_ratios_are_taken_group_by_group() -> None:
    """A slow moment hits all settings of a group; a ratio of medians would mix groups."""
    alone, warm = replace(FULL, controller=False), replace(USUAL, temperature=1.0)
    runs = [
        run_of(0, PLAIN, 4.0), run_of(0, FULL, 2.0), run_of(0, alone, 4.0),
        run_of(1, PLAIN, 40.0), run_of(1, FULL, 10.0), run_of(1, alone, 10.0),
        run_of(2, PLAIN, 4.0), run_of(2, FULL, 1.0), run_of(2, alone, 1.25),
        run_of(0, PLAIN, 3.0, warm), run_of(0, FULL, 2.0, warm),
    ]  # fmt: skip
    lines = summarise(runs, FULL, USUAL)
    assert [line.part for line in lines] == [
        "plain", "all parts", "no controller", "plain, temperature 1", "temperature 1"
    ]  # fmt: skip
    plain, full, without, _, sampled = lines
    assert plain.to_plain is None
    assert plain.to_full is not None
    assert plain.to_full.value == 0.25
    assert full.to_plain is not None
    assert full.to_full is not None
    assert (full.to_plain.value, full.to_full.value) == (4.0, 1.0)
    assert without.to_full is not None
    assert (without.to_full.value, without.to_full.count) == (0.8, 3)
    assert sampled.to_plain is not None
    assert (sampled.to_plain.value, sampled.to_plain.low) == (1.5, None)
    assert (full.tokens_per_round, full.nodes_per_round) == (2.0, 3.0)
    assert (full.num_identical, full.num_texts, plain.num_texts) == (3, 3, 0)


def test_names() -> None:
    assert setting_name(replace(FULL, controller=False)) == "bushy, 32 nodes, no controller"
    assert workload_name(Workload(temperature=0.8, batch=4, context=512)) == (
        "temperature 0.8, 4 at once, 512 tokens before"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder."""
    return save_tiny(tmp_path_factory.mktemp("ablate") / "llama")


def command(model: Path, out: Path, *more: str) -> int:
    """Runs `bench ablate` with two settings and two workloads, unless `more` says otherwise."""
    arguments = ["bench", "ablate", str(model), "--out", str(out), "--max-tokens", "4"]
    few = ["--drafters", "suffix", "--trees", "8", "--temperatures", "0", "--contexts", "0"]
    return run_command([*arguments, *few, "--batches", "1,2", "--groups", "2", *more])


def cells(path: Path) -> list[tuple[int, int, str, bool]]:
    """(batch, group, drafter, controller) of a record's runs."""
    rows = [row for row in read_records(path) if row["type"] == "ablation"]
    return [
        (r["workload"]["batch"], r["group"], r["setting"]["drafter"], r["setting"]["controller"])
        for r in rows
    ]


ALL_CELLS = {
    (batch, group, *setting)
    for batch in (1, 2)
    for group in (0, 1)
    for setting in (("none", False), ("suffix", True), ("suffix", False))
}


def test_the_command_writes_a_record(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ablate.jsonl"
    assert command(model, out) == 0
    shown = capsys.readouterr().out
    assert "no controller" in shown
    assert "2 at once" in shown
    assert len(cells(out)) == len(ALL_CELLS)
    assert set(cells(out)) == ALL_CELLS
    lines = [row for row in read_records(out) if row["type"] == "ablation_summary"]
    assert len(lines) == 6
    assert all(line["num_identical"] == line["num_texts"] for line in lines)


@pytest.mark.parametrize("cut", ["line", "cell", "summary"])
def test_a_killed_run_goes_on(model: Path, tmp_path: Path, cut: str) -> None:
    """Whatever a kill leaves of the file: no cell is lost, none is there twice."""
    out = tmp_path / "ablate.jsonl"
    assert command(model, out) == 0
    text = out.read_text()
    lines = text.splitlines(keepends=True)
    kept = {"line": "".join(lines[:4]) + lines[4][:30], "cell": "".join(lines[:6]), "summary": text}
    out.write_text(kept[cut])
    assert command(model, out) == 0
    assert len(cells(out)) == len(ALL_CELLS)
    assert set(cells(out)) == ALL_CELLS
    assert out.read_text().startswith("".join(lines[:4])), "what was whole is as it was"
    kinds = [row["type"] for row in read_records(out)]
    assert kinds.count("ablation_summary") == 6
    assert command(model, out, "--max-tokens", "5") == 2, "another run's record"


def test_a_wider_plan_adds_to_a_record(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "ablate.jsonl"
    assert command(model, out, "--batches", "1") == 0
    assert command(model, out, "--groups", "3", "--grid") == 0
    assert {(batch, group) for batch, group, _, _ in cells(out)} == {
        (batch, group) for batch in (1, 2) for group in range(3)
    }
    assert len(cells(out)) == 18


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--controller", "maybe"], "controller holds 'maybe': use on and off"),
        (["--drafters", "none"], "plain decoding takes part by itself"),
        (["--temperatures", "warm"], "temperatures is 'warm': give numbers"),
        (["--trees", "0"], "trees holds 0: the least is 1"),
    ],
)
def test_mistakes_are_named(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert command(model, tmp_path / "x.jsonl", *arguments) == 2
    assert message in capsys.readouterr().err
