"""Whether the numbers in a document are those of the records it names.

The rule, in Markdown, under each heading by itself:

- `Record: \\`x.jsonl\\`` (or a link to that file in the folder of records) says where the numbers
  under this heading come from; a column headed "record" says it row by row.
- Every number in a table, and in prose beside a record, must then be one that can be worked out
  from that record, at the precision it is printed with. In a table it must also be of what its row
  and column name: a contender, a kind, a context, a number of rows, "worst", "over plain".
- What is measured and names no record is a mistake, in prose and in tables: a number of tokens a
  second, of milliseconds, or one that says how many times.
- A part between `<!-- bench report: ... -->` and its end is what its records make.
- `<!-- no record -->` on the line above a table or paragraph exempts it.

Code, headings, and numbers that are part of a word ("135M", "8-bit") are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from draftwood.bench import quoted as names
from draftwood.bench.derived import derived, totals
from draftwood.bench.quoted import Derived
from draftwood.bench.readme import stale
from draftwood.bench.record_file import RecordFile, load_record
from draftwood.errors import ConfigError

_NUMBER = re.compile(
    r"(?<![\w.,/:-])(?P<digits>[-+]?\d+(?:,\d{3})*(?:\.\d+)?)"
    r"(?P<percent>\s?%)?(?:x|\u00d7|\s?ms|\s?s)?(?![\w-])(?!\.\d)"
)
_NAMED = re.compile(r"[Rr]ecords?: ((?:`[^`]+\.jsonl`(?:, | and )?)+)")
_FILE = re.compile(r"[\w.-]+\.jsonl")
_EXEMPT = "<!-- no record -->"
_STATISTICS = {
    "worst": "min",
    "least": "min",
    "slowest": "min",
    "best": "max",
    "fastest": "max",
    "median": "median",
    "mean": "mean",
}
_OVER = re.compile(r"(?:over|x|times)\s+(?:our |the )?(?:`([^`]+)`|([\w-]+))")
_UNITS = r"ms|tokens?/s|tokens a second|x|\u00d7|times"
_MEASURED = re.compile(rf"(?<![\w.,/:-])\d[\d,.]*\s?(?:{_UNITS})(?![\w-])")
_MEASURING = re.compile(rf"(?<![\w-])(?:{_UNITS})(?![\w-])")
# The first column's title to what its cells are numbers of.
_COUNTED = {"rows": names.ROWS, "at once": names.AT_ONCE, "requests": names.AT_ONCE}

Wanted = Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Block:
    """Lines that belong together: a table or a paragraph.

    Attributes:
        line: the number of the first one, from 1.
        lines: their text.
        exempt: the document says that no record has its numbers.
    """

    line: int
    lines: Sequence[str]
    exempt: bool

    @property
    def is_table(self) -> bool:
        """Whether it is one."""
        return self.lines[0].lstrip().startswith("|")


@dataclass(frozen=True, slots=True)
class Fault:
    """A number that no record has.

    Attributes:
        line: of the document.
        message: what is wrong.
    """

    line: int
    message: str


@dataclass(slots=True)
class Records:
    """The folder of records; each is read once.

    Attributes:
        folder: where they are.
    """

    folder: Path
    _read: dict[str, tuple[RecordFile, list[Derived]]] = field(default_factory=dict)

    def numbers(self, wanted: Iterable[str]) -> list[Derived]:
        """What can be worked out from the records named.

        Raises:
            ConfigError: one is not there or is no record.
        """
        found = [self._get(name) for name in wanted]
        together = totals([record for record, _ in found]) if len(found) > 1 else []
        return [*(number for _, own in found for number in own), *together]

    def _get(self, name: str) -> tuple[RecordFile, list[Derived]]:
        if name not in self._read:
            record = load_record(self.folder / name)
            self._read[name] = (record, derived(record))
        return self._read[name]


class Table:
    """A table of a document: rows of cells, below a row of titles."""

    def __init__(self, block: Block) -> None:
        self.line = block.line
        rows = [_cells(line) for line in block.lines]
        self.titles = rows[0]
        self.rows = [(block.line + i, row) for i, row in enumerate(rows) if i > 1]

    @cached_property
    def record_column(self) -> int | None:
        """The column that names the records."""
        titles = [title.strip("` ").lower() for title in self.titles]
        return titles.index("record") if "record" in titles else None


def check_document(path: Path, records: Records) -> list[Fault]:
    """The numbers in a document that are not in its records; none when all are.

    Raises:
        ConfigError: the document cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    faults = [Fault(line, message) for line, message in stale(path, records.folder)]
    for section in _sections(text):
        faults += _check_section(section, records)
    return faults


def _sections(text: str) -> Iterator[list[Block]]:
    """Blocks by the heading above them; code and headings are left out."""
    section: list[Block] = []
    lines: list[str] = []
    exempt = fenced = False
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        fence = line.lstrip().startswith("```")
        inside, fenced = fenced, fenced != fence
        if inside or fence or (line.startswith("    ") and not lines):
            continue
        if line.strip() == _EXEMPT:
            exempt = True
        elif line.strip() and not line.startswith("#"):
            lines.append(line)
        elif lines:
            section.append(Block(number - len(lines), lines, exempt))
            lines, exempt = [], False
        if line.startswith("#"):
            yield section
            section = []
    yield section


def _check_section(blocks: Sequence[Block], records: Records) -> Iterator[Fault]:
    named = list(dict.fromkeys(n for block in blocks for n in _named(block, records.folder)))
    for block in blocks:
        if block.exempt:
            continue
        try:
            if block.is_table:
                yield from _check_table(Table(block), named, records)
            elif named:
                yield from _check_prose(block, named, records)
            else:
                yield from _check_unnamed(block)
        except ConfigError as error:
            yield Fault(block.line, str(error))


def _named(block: Block, folder: Path) -> Iterator[str]:
    """The records that a block names."""
    text = " ".join(block.lines)
    for match in _NAMED.finditer(text):
        yield from _FILE.findall(match[1])
    yield from re.findall(rf"{re.escape(folder.name)}/({_FILE.pattern})", text)
    if block.is_table and (column := Table(block).record_column) is not None:
        for _, row in Table(block).rows:
            yield from _FILE.findall(row[column]) if column < len(row) else []


def _check_prose(block: Block, named: Sequence[str], records: Records) -> Iterator[Fault]:
    numbers = records.numbers(named)
    spans = set(re.findall(r"`([^`]*)`", " ".join(block.lines)))
    known = {number.of[names.CONTENDER] for number in numbers if names.CONTENDER in number.of}
    wanted = {names.CONTENDER: frozenset(spans & known)}
    for i, line in enumerate(block.lines):
        for text in _missing(line, numbers, wanted, whole=False):
            yield Fault(block.line + i, f"{text} is not in {', '.join(named)}")


def _check_unnamed(block: Block) -> Iterator[Fault]:
    """Prose under a heading that names no record: nothing in it is measured."""
    for i, line in enumerate(block.lines):
        for match in _MEASURED.finditer(re.sub(r"`[^`]*`", " ", line)):
            yield Fault(block.line + i, f"{match[0].strip()} is measured and names no record")


def _check_table(table: Table, named: Sequence[str], records: Records) -> Iterator[Fault]:
    column = table.record_column
    for line, row in table.rows:
        own = named if column is None else _FILE.findall(row[column])
        cells = [cell for i, cell in enumerate(row) if i != column]
        titles = [title for i, title in enumerate(table.titles) if i != column]
        if not own:
            if _is_measured(titles, cells):
                yield Fault(line, "the table has measurements and names no record")
                return
            continue
        numbers = records.numbers(own)
        for i, (title, cell) in enumerate(zip(titles, cells, strict=False)):
            wanted = {} if i == 0 else _wanted(titles[0], cells[0], title, numbers)
            for text in _missing(cell, numbers, wanted, whole=True):
                where = f"row {cells[0].strip('`')!r}, column {title.strip('`')!r}"
                yield Fault(line, f"{text} ({where}) is not in {', '.join(own)}")


def _is_measured(titles: Sequence[str], cells: Sequence[str]) -> bool:
    """Whether a row has a number with a unit, in its cell or in the title above."""
    return any(
        _MEASURED.search(cell) or (_numbers(cell) and _MEASURING.search(title))
        for title, cell in list(zip(titles, cells, strict=False))[1:]
    )


def _wanted(first: str, label: str, title: str, numbers: Sequence[Derived]) -> Wanted:
    """What a cell's number must be of, by its row's label and its column's title."""
    wanted: dict[str, frozenset[str]] = {}
    known: dict[str, set[str]] = {}
    for number in numbers:
        for dimension, value in number.of.items():
            known.setdefault(dimension, set()).add(value)
    for dimension in (names.CONTENDER, names.KIND, names.TIER, names.TEXT, names.PART):
        values = known.get(dimension, set())
        mentioned = _mentioned(label, values) or _mentioned(_OVER.sub("", title), values)
        wanted[dimension] = mentioned
    over = frozenset(match[1] or match[2] for match in _OVER.finditer(title))
    wanted[names.BASE] = over & known.get(names.BASE, set())
    for dimension in (names.SHARE, names.MEASURE, names.QUANTILE):
        wanted[dimension] = _mentioned(title, known.get(dimension, set()))
    if known.get(names.STATISTIC):
        words = re.findall(r"\w+", title.lower())
        wanted[names.STATISTIC] = frozenset(_STATISTICS[w] for w in words if w in _STATISTICS)
        wanted[names.UNIT] = frozenset({names.SPEED} if "tokens/s" in title else ())
    if known.get(names.CONTEXT):
        wanted[names.CONTEXT] = frozenset(re.findall(r"context (\d+)", title))
    counted = _COUNTED.get(first.strip("` ").lower())
    if counted and known.get(counted):
        wanted[counted] = frozenset(re.findall(r"\d+", label)[:1])
    return wanted


def _mentioned(text: str, values: Iterable[str]) -> frozenset[str]:
    """The values that stand in a text as words of their own, and not as part of a longer one."""
    found = {v for v in values if re.search(rf"(?<![\w-]){re.escape(v)}(?![\w-])", text)}
    return frozenset(v for v in found if not any(v != other and v in other for other in found))


def _missing(text: str, numbers: Sequence[Derived], wanted: Wanted, *, whole: bool) -> list[str]:
    """The numbers in a text that are not among those wanted."""
    fit = [
        number.value
        for number in numbers
        if all(number.of.get(dim) in values for dim, values in wanted.items() if values)
    ]
    return [
        shown
        for shown, digits, factor in _numbers(text, whole=whole)
        if not any(_equal(digits, factor * value) for value in fit)
    ]


def _numbers(text: str, *, whole: bool = True) -> list[tuple[str, str, float]]:
    """Numbers of a text: as they stand there, their digits, and what a value is multiplied by.

    `whole` looks into code as well, which is how some write the numbers of a table.
    """
    text = re.sub(r"\]\([^)]*\)|<[^>]*>", " ", text)
    text = text.replace("`", " ") if whole else re.sub(r"`[^`]*`", " ", text)
    return [
        (m[0].strip(), m["digits"].replace(",", ""), 100.0 if m["percent"] else 1.0)
        for m in _NUMBER.finditer(text)
    ]


def _equal(digits: str, value: float) -> bool:
    """Whether a value is printed so; a half is rounded either way."""
    unit = 10.0 ** -len(digits.partition(".")[2])
    return abs(float(digits) - value) <= 0.5 * unit + 1e-6 * abs(value)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
