"""Conversations as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from draftwood.serve.errors import ApiError
from draftwood.serve.requests import ContentPart, Message, ToolCall


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with their text in one string, and arguments of calls as values.

    Raises:
        ApiError: a part is no text, or the arguments of a call are no JSON.
    """
    return [_message(message, place) for place, message in enumerate(messages)]


def _message(message: Message, place: int) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _text(message.content, place)}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [_call(call, place) for call in message.tool_calls]
    if message.content is None and not (role == "assistant" and message.tool_calls):
        raise ApiError(400, "a message needs content", param=f"messages[{place}].content")
    return turn


def _text(content: str | list[ContentPart] | None, place: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            raise ApiError(
                400,
                f"a content part of type {part.type!r} is not supported: send text",
                param=f"messages[{place}].content",
            )
    return "\n".join(part.text or "" for part in content)


def _call(call: ToolCall, place: int) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(
            400,
            "the arguments of a tool call are not JSON",
            param=f"messages[{place}].tool_calls",
        ) from error
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
