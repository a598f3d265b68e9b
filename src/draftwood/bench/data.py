"""Prompts to measure with: a packaged set, and the formats of the usual ones.

Four forms are read, told apart by their content:

- ours, JSON lines: `{"id", "kind", "prompt"}` for text to continue, or `"turns"` in the place of
  `"prompt"` for what a user says in a conversation;
- Spec-Bench (arXiv 2401.07851), JSON lines: `{"question_id", "category", "turns"}`;
- HumanEval (arXiv 2107.03374), JSON lines: `{"task_id", "prompt"}`;
- any other file: one text to continue a line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from draftwood.errors import ConfigError
from draftwood.text import Tokenizer


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt.

    Attributes:
        id: unique in its file.
        kind: what sort of task it is; results are grouped by it.
        turns: what the user says, turn by turn; one text to continue when `chat` is false.
        chat: written with the model's chat template, where it has one.
    """

    id: str
    kind: str
    turns: tuple[str, ...]
    chat: bool

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the first turn."""
        if self.chat and tokenizer.has_chat_template:
            return tokenizer.encode_chat([{"role": "user", "content": self.turns[0]}])
        return tokenizer.encode(self.turns[0])


def load_prompts(path: Path | None = None, limit: int | None = None) -> list[BenchPrompt]:
    """Reads prompts.

    Args:
        path: None takes the packaged set: 30 prompts, five each of six kinds.
        limit: the most prompts to take, spread over the kinds as evenly as they allow.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line of it is wrong; the message names
            file and line.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}: it must be at least 1")
    name, text = _read(path)
    is_json = path is None or path.suffix in (".jsonl", ".json")
    prompts = list(_parse_json(name, text) if is_json else _parse_lines(path, text))
    if not prompts:
        raise ConfigError(f"{name} holds no prompts")
    _refuse_duplicates(name, prompts)
    return prompts if limit is None else spread(prompts, limit)


def spread(prompts: Sequence[BenchPrompt], limit: int) -> list[BenchPrompt]:
    """The first of each kind, then the second of each, up to `limit`; in their old order."""
    taken = {prompt.id for prompt in in_turns(prompts)[:limit]}
    return [prompt for prompt in prompts if prompt.id in taken]


def in_turns(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """The first of each kind, then the second of each, and so on: any beginning has all kinds."""
    by_kind: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    depth = max(len(group) for group in by_kind.values())
    return [group[i] for i in range(depth) for group in by_kind.values() if i < len(group)]


def digest(prompts: Sequence[BenchPrompt]) -> str:
    """Tells prompts apart by what they say, wherever their file lies."""
    return hashlib.sha256(repr([asdict(one) for one in prompts]).encode()).hexdigest()


def _read(path: Path | None) -> tuple[str, str]:
    if path is None:
        packaged = files("draftwood.bench") / "prompts.jsonl"
        return "the packaged prompt set", packaged.read_text(encoding="utf-8")
    try:
        return str(path), path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _parse_lines(path: Path | None, text: str) -> Iterator[BenchPrompt]:
    stem = path.stem if path else "text"
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield BenchPrompt(f"{stem}-{number}", "text", (line,), chat=False)


def _parse_json(name: str, text: str) -> Iterator[BenchPrompt]:
    # Not splitlines(): JSON strings may hold other line separators than the line feed.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield _parse(json.loads(line))
            except (ValueError, _LineError) as error:
                raise ConfigError(f"{name}:{number}: {error}") from error


class _LineError(Exception):
    """What is wrong with a line."""


def _parse(row: Any) -> BenchPrompt:
    if not isinstance(row, dict):
        raise _LineError(f"a prompt is an object, not {type(row).__name__}")
    if "question_id" in row:
        kind = _text(row, "category")
        return BenchPrompt(_identity(row, "question_id"), kind, _turns(row), chat=True)
    if "task_id" in row:
        text = _text(row, "prompt")
        return BenchPrompt(_identity(row, "task_id"), "human_eval", (text,), chat=False)
    if "id" in row:
        return _parse_own(row)
    raise _LineError("no 'id', 'question_id' or 'task_id'")


def _parse_own(row: dict[str, Any]) -> BenchPrompt:
    if ("prompt" in row) == ("turns" in row):
        raise _LineError("give either 'prompt' (a text to continue) or 'turns' (a conversation)")
    chat = "turns" in row
    turns = _turns(row) if chat else (_text(row, "prompt"),)
    return BenchPrompt(_identity(row, "id"), _text(row, "kind"), turns, chat)


def _identity(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _LineError(f"{key!r} is {value!r}: it must be a string or a number")
    return str(value)


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise _LineError(f"{key!r} is {value!r}: it must be a string with something in it")
    return value


def _turns(row: dict[str, Any]) -> tuple[str, ...]:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise _LineError(f"'turns' is {turns!r}: it must be a list of strings")
    return tuple(_text({"turns": turn}, "turns") for turn in turns)


def _refuse_duplicates(name: str, prompts: Iterable[BenchPrompt]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ConfigError(f"{name}: the id {prompt.id!r} is there twice")
        seen.add(prompt.id)
