"""Where prompts come from: the argument, a file with many, or standard input."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draftwood.errors import PromptError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a user asks, in one of three forms.

    Attributes:
        text: to go on from.
        token_ids: the same, as the model sees it.
        messages: a conversation.
        id: the user's own name for it.
        params: sampling parameters of this prompt only.
        place: where it stands, for messages: a file and a line.

    Raises:
        PromptError: it is empty or cannot be encoded.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[Message] | None = None
    id: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    place: str = ""

    def __post_init__(self) -> None:
        if not (self.text or self.token_ids or self.messages):
            raise PromptError("the prompt is empty")
        try:
            (self.text or "").encode()
        except UnicodeEncodeError as error:
            raise PromptError("the prompt is not valid UTF-8") from error


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
        return [Prompt(text=_from_stdin(argument))]
    return [Prompt(text=argument)]


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
    is_json = path.suffix.lower() == ".jsonl"
    prompts = []
    for number, line in lines:
        if not line.strip():
            continue
        try:
            line = line.removesuffix("\r")
            prompt = _from_json(line) if is_json else Prompt(text=line)
            prompts.append(replace(prompt, place=f"{path}, line {number}"))
        except PromptError as error:
            raise PromptError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise PromptError(f"{path} holds no prompt")
    return prompts


def _from_json(line: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise PromptError(f"not valid JSON ({error})") from error
    if isinstance(value, str):
        return Prompt(text=value)
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise PromptError("a line is a string, or an object with either prompt or messages")
    name, params = value.get("id"), value.get("params", {})
    if not isinstance(params, dict):
        raise PromptError("params is an object of sampling parameters")
    return Prompt(**_content(value), id=None if name is None else str(name), params=params)


def _content(value: dict[str, Any]) -> dict[str, Any]:
    if "messages" in value:
        if not _is_list_of(dict, value["messages"]):
            raise PromptError("messages is a list of objects with role and content")
        return {"messages": value["messages"]}
    prompt = value["prompt"]
    if isinstance(prompt, str):
        return {"text": prompt}
    if not _is_list_of(int, prompt):
        raise PromptError("prompt is a text or a list of token ids")
    return {"token_ids": prompt}


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{where} is not valid UTF-8 (byte {error.start})") from error
