"""`bench report --readme`: the part that is made, and how `bench check` sees that it is stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwood.bench.readme import source_of, stale, update
from draftwood.cli.app import run as run_command
from draftwood.errors import ConfigError
from tests.bench.test_report import COST, fingerprint, runs, write

PARAMS = {"max_tokens": 128, "temperature": 0.0}
TEXT = """# Title

<!-- bench report: one.jsonl, two.jsonl; picture images/speed.png -->
old
<!-- end of bench report -->

The end.
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two records, of drafters two and three times as fast as plain decoding."""
    made = tmp_path / "records"
    made.mkdir()
    for name, times in (("one", 2.0), ("two", 3.0)):
        write(made / f"{name}.jsonl", [fingerprint("compare", params=PARAMS), *runs(times)])
    write(made / "cost.jsonl", [fingerprint("cost"), *COST])
    return made


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    """A document with a part to make."""
    path = tmp_path / "README.md"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_the_part_is_made_and_the_rest_stays(readme: Path, folder: Path) -> None:
    assert update(readme, folder) == [readme, readme.parent / "images/speed.png"]
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(TEXT.partition("old")[0])
    assert text.endswith(TEXT.partition("old\n")[2])
    assert "old" not in text
    rows = [line for line in text.splitlines() if line.startswith("| tiny")]
    assert "| 2.00 (2.00 to 2.00) | 2.00 | 4 of 4 | [`one.jsonl`](records/one.jsonl) |" in rows[0]
    assert "| 3.00 (3.00 to 3.00) | 3.00 |" in rows[1]
    assert "4 prompts of 2 kinds, 128 tokens" in rows[0]
    assert "![Speed over plain decoding by kind" in text
    assert stale(readme, folder) == []
    update(readme, folder)
    assert readme.read_text(encoding="utf-8") == text, "made again, it is the same"


def test_what_is_stale_is_told(readme: Path, folder: Path) -> None:
    [(line, message), (_, picture)] = stale(readme, folder)
    assert line == 3
    assert "not what its records make: run `draftwood bench report --readme" in message
    assert "images/speed.png is not drawn from the record" in picture
    update(readme, folder)
    text = readme.read_text(encoding="utf-8")
    readme.write_text(text.replace("| 2.00 |", "| 2.10 |", 1), encoding="utf-8")
    assert len(stale(readme, folder)) == 1
    update(readme, folder)
    write(folder / "two.jsonl", [fingerprint("compare", params=PARAMS), *runs(3.5)])
    assert len(stale(readme, folder)) == 2, "the table and the picture of another record"


def test_a_picture_says_what_it_was_drawn_from(readme: Path, folder: Path) -> None:
    picture = readme.parent / "images/speed.png"
    assert source_of(picture) is None
    update(readme, folder)
    digest = source_of(picture)
    assert digest is not None
    assert len(digest) == 64
    picture.write_bytes(picture.read_bytes()[:60])
    assert source_of(picture) is None
    picture.write_bytes(b"no picture")
    assert source_of(picture) is None


def test_the_commands(readme: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = ["bench", "check", str(readme), "--records", str(folder)]
    assert run_command(check) == 1
    assert "README.md:3: the part below" in capsys.readouterr().out
    made = ["bench", "report", "--readme", str(readme), "--folder", str(folder)]
    assert run_command(made) == 0
    assert "wrote" in capsys.readouterr().out
    assert run_command(check) == 0
    assert run_command(["bench", "report"]) == 2
    assert "nothing to report" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no part", "has no part to make"),
        ("<!-- bench report: one.jsonl -->\n", r"README\.md:1: this part has no end"),
        (TEXT.replace("one.jsonl", "gone.jsonl"), "gone.jsonl cannot be read"),
        (TEXT.replace("one.jsonl", "cost.jsonl"), "cost.jsonl is no comparison"),
    ],
)
def test_mistakes_are_named(readme: Path, folder: Path, text: str, message: str) -> None:
    readme.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        update(readme, folder)


def test_without_a_picture_nothing_is_drawn(readme: Path, folder: Path) -> None:
    readme.write_text(TEXT.replace("; picture images/speed.png", ""), encoding="utf-8")
    assert update(readme, folder) == [readme]
    assert "![" not in readme.read_text(encoding="utf-8")
    assert stale(readme, folder) == []
