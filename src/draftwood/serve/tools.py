"""Tool calls in a model's text, and the form that makes it call one.

Two ways of writing a call are known. Qwen and others put JSON between tags:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

and some answer with nothing but JSON, one call or a list of them, perhaps in a code fence, with
`arguments` or `parameters`. What names no tool of the request is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from draftwood.serve.errors import ApiError
from draftwood.serve.requests import ChatRequest, Function, NamedTool, Tool

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
_BARE = ("{", "[", "```")
_SPACE = " ?"  # as models write calls; small ones would go on with white space for ever


@dataclass(frozen=True, slots=True)
class Call:
    """A call: the arguments are JSON."""

    id: str
    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True)
class Found:
    """What came of some text: text to show, and calls."""

    text: str = ""
    calls: tuple[Call, ...] = ()


class ToolReader:
    """Reads a growing text of one output and tells calls from text.

    Text is passed on as soon as it cannot be the beginning of a call.

    Args:
        names: of the tools there are.
        single: take the first call only.
        seed: of the calls' ids, so that the same text read again has the same ones.
    """

    def __init__(self, names: Collection[str], *, single: bool = False, seed: str = "") -> None:
        self._names = names
        self._seed = seed
        self._single = single
        self._held = ""
        self._bare: bool | None = None  # whether all of it may be JSON without tags
        self.num_calls = 0

    def read(self, text: str, *, ended: bool) -> Found:
        """Takes what is new; `ended` when nothing more will come."""
        self._held += text
        if self._bare is None and self._held.strip():
            self._bare = _may_be_bare(self._held.lstrip())
        if self._bare is None or self._bare:
            return self._read_bare() if ended else Found()
        return self._read_tagged(ended)

    def _read_bare(self) -> Found:
        fenced = _FENCE.fullmatch(self._held.strip())
        calls = self._calls(fenced[1] if fenced else self._held)
        text, self._held = self._held, ""
        return Found("", calls) if calls else Found(text)

    def _read_tagged(self, ended: bool) -> Found:
        shown = ""
        calls: list[Call] = []
        while (start := self._held.find(_OPEN)) >= 0:
            stop = self._held.find(_CLOSE, start)
            if stop < 0 and not ended:
                break
            inner = self._held[start + len(_OPEN) : stop if stop >= 0 else None]
            found = self._calls(inner)
            end = stop + len(_CLOSE) if stop >= 0 else len(self._held)
            shown += self._held[:start] if found else self._held[:end]
            calls += found
            self._held = self._held[end:]
        safe = len(self._held) if ended else _safe(self._held)
        shown, self._held = shown + self._held[:safe], self._held[safe:]
        # The line breaks around calls are no text of their own.
        return Found("" if self.num_calls and not shown.strip() else shown, tuple(calls))

    def _calls(self, text: str) -> tuple[Call, ...]:
        """The calls that a JSON text makes; none when it is anything else."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return ()
        items = value if isinstance(value, list) else [value]
        parsed = [self._call(item, self.num_calls + i) for i, item in enumerate(items)]
        calls = tuple(call for call in parsed if call is not None)
        if len(calls) < len(items) or not calls:
            return ()
        if self._single:
            calls = calls[:1] if self.num_calls == 0 else ()
        self.num_calls += len(calls)
        return calls

    def _call(self, item: Any, number: int) -> Call | None:
        if not isinstance(item, dict):
            return None
        if isinstance(item.get("function"), dict):
            item = item["function"]
        arguments = item.get("arguments", item.get("parameters", {}))
        if item.get("name") not in self._names:
            return None
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        digest = blake2b(f"{self._seed}:{number}".encode(), digest_size=12).hexdigest()
        return Call(f"call_{digest}", item["name"], arguments)


def _may_be_bare(text: str) -> bool | None:
    """Whether a text begins as JSON or a fence does; None while that is not known."""
    if text.startswith(_BARE):
        return True
    return None if "```".startswith(text) else False


def _safe(text: str) -> int:
    """How much of a text can be no part of a call that begins in it."""
    start = text.find(_OPEN)
    if start >= 0:
        return start
    for size in range(min(len(_OPEN) - 1, len(text)), 0, -1):
        if text.endswith(_OPEN[:size]):
            return len(text) - size
    return len(text)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about tools.

    Attributes:
        shown: the tools the model is told of, as its template takes them.
        names: those it may call.
        structured: the form its text must have; None for any.
        single: take one call only.
    """

    shown: tuple[dict[str, Any], ...] = ()
    names: frozenset[str] = frozenset()
    structured: dict[str, Any] | None = None
    single: bool = False

    def reader(self, seed: str = "") -> ToolReader | None:
        """A reader for one output; None when its text is just text. `seed`: see `ToolReader`."""
        return ToolReader(self.names, single=self.single, seed=seed) if self.names else None


def tool_use(body: ChatRequest) -> ToolUse:
    """What a chat request says about tools.

    Raises:
        ApiError: the choice names a tool that is not there, or there are none.
    """
    tools, choice = body.tools or [], body.tool_choice
    if choice == "required" or isinstance(choice, NamedTool):
        return _forced(tools, choice, body)
    shown = tuple(tool.model_dump(exclude_none=True) for tool in tools)
    names = frozenset(tool.function.name for tool in tools)
    single = body.parallel_tool_calls is False
    return ToolUse(shown, frozenset() if choice == "none" else names, single=single)


def _forced(tools: Sequence[Tool], choice: str | NamedTool | None, body: ChatRequest) -> ToolUse:
    if not tools:
        raise ApiError(400, "tool_choice is given without tools", param="tool_choice")
    if body.response_format is not None and body.response_format.type != "text":
        raise ApiError(
            400, "response_format contradicts tool_choice: leave one out", param="response_format"
        )
    wanted = list(tools)
    if isinstance(choice, NamedTool):
        wanted = [tool for tool in tools if tool.function.name == choice.function.name]
        if not wanted:
            raise ApiError(
                400,
                f"tool_choice names {choice.function.name!r}, which is not among the tools",
                param="tool_choice",
            )
    shown = tuple(tool.model_dump(exclude_none=True) for tool in tools)
    names = frozenset(tool.function.name for tool in wanted)
    schema = _any_call([tool.function for tool in wanted])
    structured = {"json": schema, "whitespace_pattern": _SPACE}
    return ToolUse(shown, names, structured, single=True)


def _any_call(functions: Sequence[Function]) -> dict[str, Any]:
    """The schema of a text that calls one of these functions.

    Raises:
        ApiError: two of them define different things under one name.
    """
    shared: dict[str, dict[str, Any]] = {}
    schemas = []
    for function in functions:
        parameters = dict(function.parameters or {"type": "object"})
        for place in ("$defs", "definitions"):  # references name them from the root
            for name, definition in parameters.pop(place, {}).items():
                if shared.setdefault(place, {}).setdefault(name, definition) != definition:
                    raise ApiError(
                        400, f"two tools define {name!r} differently: rename one", param="tools"
                    )
        schemas.append(_call_schema(function.name, parameters))
    return (schemas[0] if len(schemas) == 1 else {"anyOf": schemas}) | shared


def _call_schema(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
