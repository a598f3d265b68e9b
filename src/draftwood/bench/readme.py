"""The part of a README that is made from records: a table and a picture.

It stands between two comments, the first of which says what it is made from:

    <!-- bench report: a.jsonl, b.jsonl; picture docs/images/speedup.png -->
    ...
    <!-- end of bench report -->

The table has a row for each record of `draftwood bench compare`, the picture shows the last one's
speed-ups by kind. The picture's file says which bytes it was drawn from, so that one can tell
whether it is still that record's, whatever version of matplotlib drew it.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.bench.contenders import PLAIN, TRANSFORMERS
from draftwood.bench.intervals import interval_text
from draftwood.bench.record_file import RecordFile, load_record
from draftwood.bench.speedups import ALL, speedups
from draftwood.bench.summary import summarise
from draftwood.errors import ConfigError

_BEGIN = re.compile(r"<!-- bench report: (?P<records>[^;>]+?)(?:; picture (?P<picture>\S+))? -->\n")
_END = "<!-- end of bench report -->"
_SOURCE = "Records"
_OURS = "auto"
_NAMES = ("plain", "`auto`", "`transformers`")


@dataclass(frozen=True, slots=True)
class Part:
    """The part that is made.

    Attributes:
        line: of its first comment, from 1.
        start, end: where its text begins and ends.
        records: names of the files it is made from.
        picture: its picture's path, seen from the document; None for none.
    """

    line: int
    start: int
    end: int
    records: tuple[str, ...]
    picture: str | None


def find_part(path: Path, text: str) -> Part | None:
    """The part of a document; None when it has none.

    Raises:
        ConfigError: it does not end.
    """
    begin = _BEGIN.search(text)
    if begin is None:
        return None
    end = text.find(_END, begin.end())
    line = text.count("\n", 0, begin.start()) + 1
    if end < 0:
        raise ConfigError(f"{path}:{line}: this part has no end: write {_END} behind it")
    records = tuple(name.strip() for name in begin["records"].split(","))
    return Part(line, begin.end(), end, records, begin["picture"])


def update(path: Path, folder: Path) -> list[Path]:
    """Makes the part of a document anew.

    Args:
        path: the document.
        folder: of the records.

    Returns:
        What was written: the document, and its picture.

    Raises:
        ConfigError: the document has no such part or cannot be written, or a record is not there.
        MissingExtraError: matplotlib is not installed, and there is a picture.
    """
    text = _read(path)
    part = find_part(path, text)
    if part is None:
        raise ConfigError(
            f"{path} has no part to make: put <!-- bench report: NAME.jsonl --> and {_END} into it"
        )
    made = text[: part.start] + _made(path, part, folder) + text[part.end :]
    written = [path]
    try:
        path.write_text(made, encoding="utf-8")
        if part.picture is not None:
            picture = path.parent / part.picture
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(_drawn(folder / part.records[-1]))
            written.append(picture)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error
    return written


def stale(path: Path, folder: Path) -> list[tuple[int, str]]:
    """What of a document's part is not what its records make now: lines and what is wrong.

    Raises:
        ConfigError: the document or a record cannot be read.
    """
    text = _read(path)
    part = find_part(path, text)
    if part is None:
        return []
    how = f"run `draftwood bench report --readme {path}`"
    faults = []
    if text[part.start : part.end] != _made(path, part, folder):
        faults.append((part.line, f"the part below is not what its records make: {how}"))
    if part.picture is not None:
        picture = path.parent / part.picture
        if source_of(picture) != _digest(folder / part.records[-1]):
            faults.append((part.line, f"{part.picture} is not drawn from the record: {how}"))
    return faults


def source_of(picture: Path) -> str | None:
    """What a PNG file says it was drawn from; None when it says nothing or is not there."""
    try:
        data = picture.read_bytes()
    except OSError:
        return None
    at = 8
    while at + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"tEXt" and at + 12 + length <= len(data):
            key, _, value = data[at + 8 : at + 8 + length].partition(b"\0")
            if key.decode("latin-1") == _SOURCE:
                return value.decode("latin-1")
        at += 12 + length
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _drawn(path: Path) -> bytes:
    from draftwood.bench.report_plots import plots

    record = load_record(path)
    for plot in plots(record):
        if plot.name == "speedup":
            return plot.png({_SOURCE: _digest(path)})
    raise ConfigError(f"{path} has no speed-ups to draw: name a record of bench compare")


def _made(path: Path, part: Part, folder: Path) -> str:
    """The text between the two comments."""
    records = [load_record(folder / name) for name in part.records]
    where = Path(os.path.relpath(folder, path.parent)).as_posix()
    lines = ["", *_table(records, where), "", *_legend(records)]
    if part.picture is not None:
        lines += ["", f"![{_caption(records[-1])}]({part.picture})"]
    return "\n".join(lines) + "\n\n"


def _table(records: Sequence[RecordFile], where: str) -> list[str]:
    titles = [
        "decoding, tokens/s (medians)",
        *_NAMES,
        "`auto` over plain, median (95 %)",
        "worst, `auto`",
        "`auto`: same text",
        "record",
    ]
    rows = [titles, ["---"] * len(titles), *(_row(record, where) for record in records)]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _row(record: RecordFile, where: str) -> list[str]:
    found = summarise(record.runs)
    if PLAIN not in found or _OURS not in found:
        raise ConfigError(f"{record.name} is no comparison of plain and `{_OURS}`: name another")
    ours = found[_OURS]
    return [
        _what(record),
        *(_speed(found.get(name)) for name in (PLAIN, _OURS, TRANSFORMERS)),
        interval_text(speedups(record)[_OURS][ALL]),
        f"{ours['to_plain']['decode']['min']:.2f}",
        f"{ours['texts']['num_identical']} of {ours['texts']['num_compared']}",
        f"[`{record.name}`]({where}/{record.name})",
    ]


def _speed(contender: dict[str, Any] | None) -> str:
    return "" if contender is None else f"{contender['decode_tokens_per_s']:.1f}"


def _what(record: RecordFile) -> str:
    prompts = {run.prompt for run in record.runs}
    kinds = {run.kind for run in record.runs}
    tokens = record.fingerprint["params"]["max_tokens"]
    return f"{record.model}: {len(prompts)} prompts of {len(kinds)} kinds, {tokens} tokens"


def _legend(records: Sequence[RecordFile]) -> list[str]:
    places = dict.fromkeys(_machine(record) for record in records)
    temperatures = {record.fingerprint["params"]["temperature"] for record in records}
    how = "greedy; " if temperatures == {0.0} else ""
    return [
        f"On {' and '.join(places)}; {how}all take turns at each prompt. Ratios are taken prompt",
        "by prompt; the intervals are bootstrap intervals over prompts.",
    ]


def _machine(record: RecordFile) -> str:
    gpu, cpu = record.machine["gpu"], record.machine["cpu"]
    return str(gpu or f"{cpu['num_threads']} cores of {cpu['model']}")


def _caption(record: RecordFile) -> str:
    return f"Speed over plain decoding by kind, with intervals: {record.model}"
