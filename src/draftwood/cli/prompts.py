"""Where prompts come from: the argument, a file with many, or standard input."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwood.errors import PromptError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user asks.

    Attributes:
        content: text, token ids, or the messages of a conversation.
        id: the user's own name for it.
        params: sampling parameters of this prompt only.
    """

    content: str | list[int] | list[Message]
    id: str | None = None
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return isinstance(self.content, list) and isinstance(self.content[0], dict)


def read_prompts(argument: str | None, file: Path | None) -> list[Prompt]:
    """The prompts of one call of the command.

    Args:
        argument: the text itself; None or "-" reads standard input whole.
        file: one prompt a line; in a .jsonl file each line is a JSON string or object.

    Raises:
        PromptError: there is none, both are given, or one cannot be read.
    """
    if file is not None:
        if argument is not None:
            raise PromptError("a prompt and --prompt-file are given: use one of them")
        return _from_file(file)
    if argument is None or argument == "-":
        return [_checked(Prompt(_from_stdin(argument)))]
    return [_checked(Prompt(argument))]


def _from_stdin(argument: str | None) -> str:
    if argument is None and sys.stdin.isatty():
        raise PromptError("no prompt: give it as an argument, with --prompt-file, or on stdin")
    text = _decoded(sys.stdin.buffer.read(), "standard input")
    # The line end that `echo` and editors add is not meant as part of the prompt.
    return text.removesuffix("\n")


def _from_file(path: Path) -> list[Prompt]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path} cannot be read ({error.strerror})") from error
    lines = enumerate(_decoded(content, str(path)).split("\n"), start=1)
    parse = _from_json if path.suffix.lower() == ".jsonl" else Prompt
    prompts = []
    for number, line in lines:
        if not line.strip():
            continue
        try:
            prompts.append(_checked(parse(line.removesuffix("\r"))))
        except PromptError as error:
            raise PromptError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise PromptError(f"{path} holds no prompt")
    return prompts


def _from_json(line: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise PromptError(f"this is no JSON ({error})") from error
    if isinstance(value, str):
        return Prompt(value)
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise PromptError("a line is a string, or an object with either prompt or messages")
    content = value.get("prompt", value.get("messages"))
    kind = dict if "messages" in value else int
    listed = isinstance(content, list) and all(type(item) is kind for item in content)
    if not listed and not (kind is int and isinstance(content, str)):
        raise PromptError(
            "messages is a list of objects with role and content"
            if kind is dict
            else "prompt is a text or a list of token ids"
        )
    params = value.get("params", {})
    if not isinstance(params, dict):
        raise PromptError("params is an object of sampling parameters")
    name = value.get("id")
    return Prompt(content, None if name is None else str(name), params)


def _checked(prompt: Prompt) -> Prompt:
    if not prompt.content:
        raise PromptError("the prompt is empty")
    if isinstance(prompt.content, str):
        try:
            prompt.content.encode()
        except UnicodeEncodeError as error:
            raise PromptError("the prompt is not valid UTF-8") from error
    return prompt


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{where} is not valid UTF-8 (byte {error.start})") from error
