"""The cache folder and how long work is shown."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from draftwood import cache
from draftwood.models.progress import LineProgress, shown_progress

pytestmark = pytest.mark.usefixtures("root")


def test_publish_replaces_a_folder_in_one_step(root: Path) -> None:
    """os.replace cannot put a folder where another one is."""
    target = root / "models" / "x"
    for content in ("old", "new"):
        with cache.staging("x", "x", 0) as folder:
            (folder / "made").mkdir()
            (folder / "made" / "file").write_text(content)
            cache.publish(folder / "made", target)
    assert (target / "file").read_text() == "new"
    assert list((root / "staging").iterdir()) == []


def test_default_cache_is_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty DRAFTWOOD_CACHE made the working directory the cache."""
    monkeypatch.setenv("DRAFTWOOD_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "draftwood"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (98_362_432, "98.4 MB"), (1 << 60, "1152921.5 TB")],
)
def test_bytes_for_people(count: int, text: str) -> None:
    """The unit ran off the end of the list for large counts."""
    assert cache.human_bytes(count) == text


def test_plain_progress_is_a_line_for_ten_percent() -> None:
    """A log of 100,000 lines for one download."""
    out = io.StringIO()
    progress = LineProgress(out)
    for done in range(1001):
        progress("downloading x", done * 1000, 1_000_000)
    progress("waiting", 0, 0)
    progress("waiting", 0, 0)
    lines = out.getvalue().splitlines()
    assert lines[0] == "downloading x   0 % of 1.0 MB"
    assert lines[10] == "downloading x 100 % of 1.0 MB"
    assert lines[11:] == ["waiting"]


def test_progress_on_a_terminal_is_a_bar() -> None:
    """The bar went to a pipe as control characters, and to stdout where the answer is."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with shown_progress(out) as progress:
        progress("downloading x", 1, 2)
        progress("downloading x", 2, 2)
        progress("waiting", 0, 0)
    assert "downloading x" in out.getvalue()
    assert "waiting" in out.getvalue()
    plain = io.StringIO()
    with shown_progress(plain) as progress:
        progress("downloading x", 1, 2)
    assert plain.getvalue() == "downloading x  50 % of 2 B\n"
