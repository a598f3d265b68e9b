"""`bench cost`: the curve's shape, its records, its picture. Nothing here looks at the clock."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from draftwood.bench.cost import CostPoint, bushy_tree, measure, plot
from draftwood.bench.records import read_records
from draftwood.cli.app import run as run_command
from draftwood.errors import ConfigError, MissingExtraError
from tests.tiny import CountingModel, hf_model, save_tiny, tiny_llm


def points(context: int = 8) -> list[CostPoint]:
    """Two points of a curve."""
    one = {"context": context, "min_s": 0.1, "repeats": 3, "neighbours": None}
    return [
        CostPoint(rows=1, median_s=0.1, relative=1.0, **one),
        CostPoint(rows=4, median_s=0.2, relative=2.0, **one),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 64])
def test_the_trees_have_the_wanted_size_and_branch(size: int) -> None:
    tree = bushy_tree(size)
    assert len(tree) == size
    assert tree.is_chain == (size < 3)


def test_every_size_is_run_as_often_and_nothing_is_kept() -> None:
    model = CountingModel(hf_model("llama"))
    llm = tiny_llm(model, drafter="none")
    model.clear()
    told: list[CostPoint] = []
    found = measure(model, llm.pool, [8, 20], [1, 2, 5], 3, told.append)
    assert told == found
    assert [(p.context, p.rows) for p in found] == [(c, n) for c in (8, 20) for n in (1, 2, 5)]
    assert all(p.relative == p.median_s / found[3 * (p.context == 20)].median_s for p in found)
    # The context, then each size once to warm up and three times to count.
    assert sorted(model.rows) == sorted([8, 20, *[1, 2, 5] * 4 * 2])
    deepest = [max(positions) for positions in model.positions[1:13]]
    assert min(deepest) == 8  # every tree stands on the same context
    llm.pool.check()


def test_a_context_that_does_not_fit_is_refused() -> None:
    llm = tiny_llm("llama", drafter="none", num_blocks=4)
    with pytest.raises(ConfigError, match="context 255 with 2 rows does not fit the model's 256"):
        measure(llm.model, llm.pool, [255], [1, 2], 1, lambda point: None)
    with pytest.raises(ConfigError, match="context 100 does not fit the KV memory"):
        measure(llm.model, llm.pool, [100], [1, 2], 1, lambda point: None)
    llm.pool.check()


def test_the_command_writes_its_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save_tiny(tmp_path / "llama"))
    out = tmp_path / "cost.jsonl"
    options = ["--contexts", "4,16", "--rows", "2,4", "--repeats", "1", "--out", str(out)]
    assert run_command(["bench", "cost", folder, *options]) == 0
    first, *rows = read_records(out)
    assert first["type"] == "fingerprint"
    places = [(row["type"], row["context"], row["rows"]) for row in rows]
    assert places == [("cost", c, n) for c in (4, 16) for n in (1, 2, 4)]
    text = capsys.readouterr().out
    assert "context 16" in text
    assert run_command(["bench", "cost", folder, *options, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "1,x"], "rows is '1,x': give whole numbers"),
        (["--rows", "0"], "rows holds 0: the least is 1"),
        (["--contexts", "-5"], "contexts holds -5: the least is 0"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", "cost", "no-such-model", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_plot_needs_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'draftwood\[bench\]'"):
        plot(points(), tmp_path / "cost.png", "title")


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    drawn: list[tuple[object, ...]] = []

    class Axes:
        """Notes what is drawn."""

        def plot(self, *arguments: object, **style: object) -> None:
            drawn.append((*arguments, style["label"]))

        def __getattr__(self, name: str) -> object:
            return lambda *arguments, **style: None

    class Figure:
        """Stands for matplotlib's, which is optional."""

        def __init__(self, **style: object) -> None: ...

        def subplots(self) -> Axes:
            return Axes()

        def savefig(self, path: Path, dpi: int) -> None:
            path.write_bytes(b"\x89PNG")

    module = type(sys)("matplotlib.figure")
    module.Figure = Figure  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", type(sys)("matplotlib"))
        patch.setitem(sys.modules, "matplotlib.figure", module)
        plot([*points(8), *points(32)], tmp_path / "cost.png", "title")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert drawn == [
        ([1, 4], [1.0, 2.0], "8 tokens of context"),
        ([1, 4], [1.0, 2.0], "32 tokens of context"),
    ]
