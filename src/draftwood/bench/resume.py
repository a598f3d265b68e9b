"""A record that a killed run left: what of it counts, and how the next run goes on with it.

A question's lines are written together, when all of it is measured. What a kill can leave behind is
a last line that is cut off, or some of the last question's lines; both are dropped, and the file is
replaced in one step, so that a second kill cannot lose more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.bench.records import RunRecord, Writer, rounded
from draftwood.bench.spec import question_of
from draftwood.errors import ConfigError

Row = dict[str, Any]
# What must be equal for two runs to be one; and what of the machine.
_FACTS = ("command", "model", "draft_model", "config", "params", "drafters", "data")
_MACHINE = ("cpu", "gpu", "torch", "draftwood")


@dataclass(frozen=True, slots=True)
class Left:
    """What an earlier run left.

    Attributes:
        rows: the fingerprint and the lines of whole questions; empty for a new record.
        records: the runs among them.
        done: ids of the questions that need not be run again.
    """

    rows: Sequence[Row]
    records: Sequence[RunRecord]
    done: frozenset[str]


def read_left(path: Path | None, fingerprint: Row, turns: Mapping[str, int]) -> Left:
    """What of the file at `path` the run described by `fingerprint` goes on from.

    Args:
        path: the record; None or a file that is not there starts afresh.
        fingerprint: of the run that begins.
        turns: number of turns of each question.

    Raises:
        ConfigError: the file cannot be read, or is a record of something else.
    """
    rows = read_rows(path, fingerprint)
    if not rows:
        return Left([], [], frozenset())
    names = {"plain" if name == "none" else name for name in ("none", *fingerprint["drafters"])}
    by_question: dict[str, list[Row]] = {}
    for row in rows:
        if row["type"] in ("run", "skip"):
            by_question.setdefault(question_of(row["prompt"]), []).append(row)
    whole = {q: own for q, own in by_question.items() if _whole(own, names, turns.get(q, 0))}
    kept = [row for own in whole.values() for row in own]
    records = [RunRecord.from_json(row) for row in kept if row["type"] == "run"]
    resumed = [row for row in rows if row["type"] == "resumed"]
    return Left([rows[0], *kept, *resumed], records, frozenset(whole))


def read_rows(path: Path | None, fingerprint: Row) -> list[Row]:
    """The lines of an earlier record of the same run, the fingerprint first; none where none is.

    Args:
        path: the record; None or a file that is not there starts afresh.
        fingerprint: of the run that begins.

    Raises:
        ConfigError: the file cannot be read, or is a record of something else.
    """
    rows = _rows(path) if path is not None and path.exists() else []
    if rows:
        _check_same(path, rows[0], fingerprint)
    return rows


@contextmanager
def open_resumed(path: Path | None, kept: Sequence[Row], fingerprint: Row) -> Iterator[Writer]:
    """A writer behind what is kept; the file is rewritten without what does not count.

    Args:
        path: the record; None writes nothing.
        kept: the lines of it that count, the fingerprint first; empty for a new record.
        fingerprint: of the run that begins.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        yield Writer(None)
        return
    staged = path.with_name(f"{path.name}.part")
    try:
        file = staged.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    with file:
        writer = Writer(file)
        for row in kept or [fingerprint]:
            writer.write(row)
        if kept:
            writer.write({"type": "resumed", "environment": fingerprint["environment"]})
        os.replace(staged, path)
        yield writer


def _rows(path: Path) -> list[Row]:
    """All lines but a last one that was cut off."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line) if line else None
        except ValueError as error:
            if number == len(lines):
                break  # no line feed behind it: the writer was killed
            raise ConfigError(f"{path}:{number}: this is no record: {error}") from error
        if row is not None and (not isinstance(row, dict) or "type" not in row):
            raise ConfigError(
                f"{path}:{number}: this is no record: a line is an object with a type"
            )
        rows.extend([row] if row else [])
    return rows


def _check_same(path: Path | None, old: Row, new: Row) -> None:
    for name in _FACTS:
        if old.get(name) != _plain(new.get(name)):
            raise ConfigError(
                f"{path} is the record of another run ({name} differs): give another --out, or"
                " the arguments it was made with"
            )
    for name in _MACHINE:
        if old["environment"].get(name) != _plain(new["environment"][name]):
            raise ConfigError(
                f"{path} was measured on another machine or version ({name} differs): speeds of"
                " both do not mix; give another --out"
            )


def _plain(value: Any) -> Any:
    """The value as it comes back from a file."""
    return json.loads(json.dumps(rounded(value)))


def _whole(rows: Sequence[Row], names: set[str], num_turns: int) -> bool:
    """Every contender ran every turn, or all up to one that was skipped: its line is the last."""
    if any(row["type"] == "skip" for row in rows):
        return True
    ran = {(row["prompt"], row["contender"]) for row in rows}
    prompts = {prompt for prompt, _ in ran}
    return len(prompts) == num_turns and len(ran) == num_turns * len(names)
