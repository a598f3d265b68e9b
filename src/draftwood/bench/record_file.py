"""A record read back: what it is of, and its lines by type."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.bench.records import RunRecord
from draftwood.errors import ConfigError

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordFile:
    """One file of `draftwood bench --out`.

    Attributes:
        name: the file's name, without its folder.
        fingerprint: its first line.
        runs: its `run` lines.
        rows: all other lines by their type.
    """

    name: str
    fingerprint: Row
    runs: Sequence[RunRecord]
    rows: Mapping[str, Sequence[Row]]

    @property
    def command(self) -> str:
        """The benchmark that wrote it; one of a server does not say so, its lines do."""
        return str(self.fingerprint.get("command") or next(iter(self.rows), ""))

    @property
    def machine(self) -> Row:
        """What it was measured on."""
        environment: Row = self.fingerprint["environment"]
        return environment

    def of(self, kind: str) -> Sequence[Row]:
        """The lines of a type; none when there are none."""
        return self.rows.get(kind, ())

    @property
    def model(self) -> str:
        """The model, its form, and who drafts for it; of a server, what it was asked to serve."""
        one, draft = self.fingerprint.get("model"), self.fingerprint.get("draft_model")
        if not isinstance(one, dict):
            return str(one or self.fingerprint.get("target") or "")
        form = one["dtype"] if one.get("quantization") in (None, "none") else one["quantization"]
        return f"{one['name']}, {form}" + (f", drafts by {draft['name']}" if draft else "")


def load_record(path: Path) -> RecordFile:
    """Reads a record.

    Raises:
        ConfigError: it cannot be read, or is no record; the message names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    rows: dict[str, list[Row]] = {}
    runs: list[RunRecord] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if row["type"] == "run":
                runs.append(RunRecord.from_json(row))
            else:
                rows.setdefault(str(row["type"]), []).append(row)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path}:{number}: this is no line of a record of `draftwood bench`"
            ) from error
    heads = rows.pop("fingerprint", [])
    if not heads or "environment" not in heads[0]:
        raise ConfigError(f"{path} is no record of `draftwood bench`: it has no fingerprint")
    return RecordFile(path.name, heads[0], runs, rows)
