"""Tool calls: what the model is told, what is read from its text, and how it is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.llm import LLM
from draftwood.serve.errors import ApiError
from draftwood.serve.messages import template_messages
from draftwood.serve.requests import ChatRequest
from draftwood.serve.tools import Found, ToolReader, tool_use
from draftwood.text import Tokenizer
from tests.tiny import bpe_backend

_ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
_TAGGED = f"<tool_call>\n{_ROME}\n</tool_call>"
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": _PARAMETERS}}
    for name in ("weather", "time")
]


def _read(text: str, *, single: bool = False, sizes: list[int] | None = None) -> Found:
    """What a reader makes of a text that comes in pieces of these sizes, in all."""
    reader = ToolReader({"weather", "time"}, single=single)
    shown, calls, start = "", [], 0
    for size in sizes or []:
        found = reader.read(text[start : start + size], ended=False)
        shown, calls, start = shown + found.text, [*calls, *found.calls], start + size
    found = reader.read(text[start:], ended=True)
    return Found(shown + found.text, (*calls, *found.calls))


def _plain(found: Found) -> tuple[str, list[tuple[str, Any]]]:
    return found.text, [(call.name, json.loads(call.arguments)) for call in found.calls]


ROME = ("weather", {"city": "Rome"})


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (_TAGGED, "", [ROME]),
        (f"I look.\n{_TAGGED}", "I look.\n", [ROME]),
        (f"{_TAGGED}\n{_TAGGED}", "", [ROME, ROME]),
        (f"<tool_call>[{_ROME}]</tool_call>", "", [ROME]),
        (f"<tool_call>{_ROME}", "", [ROME]),  # cut off behind the call
        (_ROME, "", [ROME]),
        (f"[{_ROME}, {_ROME}]", "", [ROME, ROME]),
        (f"```json\n{_ROME}\n```", "", [ROME]),
        ('{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
        ('{"name": "time"}', "", [("time", {})]),
        (
            '{"type": "function", "function": {"name": "time", "arguments": "{}"}}',
            "",
            [("time", {})],
        ),
        ("no call", "no call", []),
        ("", "", []),
        ("  ", "  ", []),
        ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
        ('{"city": "Rome"}', '{"city": "Rome"}', []),
        ("{not json", "{not json", []),
        ("```py\nx\n```", "```py\nx\n```", []),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        ("a < b <tool", "a < b <tool", []),
    ],
)
def test_calls_are_told_from_text(text: str, shown: str, calls: list[Any]) -> None:
    assert _plain(_read(text)) == (shown, calls)


_parts = st.lists(
    st.sampled_from([_TAGGED, _ROME, "text ", "<tool_", "call>", "</tool_call>", "\n", "```", "{"])
)


@given(_parts.map("".join), st.lists(st.integers(1, 9), max_size=60))
def test_pieces_do_not_change_what_is_read(text: str, sizes: list[int]) -> None:
    whole, pieces = _plain(_read(text)), _plain(_read(text, sizes=sizes))
    assert pieces[1] == whole[1]
    assert pieces[0].strip() == whole[0].strip()


def test_text_before_a_call_is_shown_at_once() -> None:
    reader = ToolReader({"weather"})
    assert reader.read("I look <tool", ended=False) == Found("I look ")
    assert reader.read("_box>", ended=False) == Found("<tool_box>")


def test_one_call_is_enough_where_parallel_ones_are_off() -> None:
    assert len(_read(f"{_TAGGED}{_TAGGED}", single=True).calls) == 1


def _body(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | fields)


def test_a_forced_call_has_the_form_of_its_tool() -> None:
    named = {"type": "function", "function": {"name": "time"}}
    one = tool_use(_body(tools=_TOOLS, tool_choice=named))
    assert one.names == {"time"}
    assert one.structured is not None
    schema = one.structured["json"]
    assert schema["properties"] == {"name": {"const": "time"}, "arguments": _PARAMETERS}
    any_ = tool_use(_body(tools=_TOOLS, tool_choice="required"))
    assert any_.structured is not None
    assert len(any_.structured["json"]["anyOf"]) == 2
    assert tool_use(_body(tools=_TOOLS)).structured is None
    off = tool_use(_body(tools=_TOOLS, tool_choice="none"))
    assert (off.names, off.reader(), len(off.shown)) == (frozenset(), None, 2)


def test_definitions_stay_within_reach_of_their_references() -> None:
    parameters = {
        "type": "object",
        "properties": {"where": {"$ref": "#/$defs/Place"}},
        "$defs": {"Place": {"type": "string"}},
    }
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    use = tool_use(_body(tools=[tool], tool_choice="required"))
    assert use.structured is not None
    schema = use.structured["json"]
    assert schema["$defs"] == {"Place": {"type": "string"}}
    assert "$defs" not in schema["properties"]["arguments"]
    other = json.loads(json.dumps(tool).replace("string", "integer").replace('"go"', '"run"'))
    with pytest.raises(ApiError, match="Place"):
        tool_use(_body(tools=[tool, other], tool_choice="required"))


def test_messages_become_what_templates_take() -> None:
    body = _body(
        messages=[
            {"role": "developer", "content": "be kind"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "time", "arguments": '{"zone": 1}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        ]
    )
    system, user, assistant, tool = template_messages(body.messages)
    assert system == {"role": "system", "content": "be kind"}
    assert user["content"] == "a\nb"
    assert assistant["tool_calls"][0]["function"] == {"name": "time", "arguments": {"zone": 1}}
    assert tool == {"role": "tool", "content": "noon", "tool_call_id": "c1"}


def test_the_template_gets_the_tools() -> None:
    backend = bpe_backend()
    template = backend.chat_template
    backend.chat_template = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ mood }}"
    try:
        turns = [{"role": "user", "content": "x"}]
        ids = Tokenizer(backend).encode_chat(turns, _TOOLS, mood="kind")
        assert Tokenizer(backend).decode(ids) == "weather time kind"
    finally:
        backend.chat_template = template


def test_a_call_is_answered_as_one(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model says nothing of the kind by itself: its text is put into its mouth."""
    llm: LLM = live.llm
    spoken = [*llm.tokenizer.encode(f"I look. {_TAGGED}"), min(llm.tokenizer.eos_token_ids)]
    make = llm.engine.make

    def scripted(prompt_ids: Any, params: Any, *args: Any) -> Any:
        def say(ids: Any, scores: Any) -> Any:
            scores = scores.clone().fill_(-1e9)
            scores[0, spoken[ids.shape[1] - len(prompt_ids)]] = 0.0
            return scores

        return make(prompt_ids, params.but(logits_processors=(say,)), *args)

    monkeypatch.setattr(llm.engine, "make", scripted)
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": _TOOLS,
        "max_tokens": 150,
    }
    with live.client() as client:
        whole = client.chat.completions.create(**asked).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", "I look. ")
        [call] = whole.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ROME
        text, calls, reason = "", [], None
        for chunk in client.chat.completions.create(stream=True, **asked):
            [choice] = chunk.choices
            text += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            reason = choice.finish_reason or reason
        assert (text, reason, len(calls)) == ("I look. ", "tool_calls", 1)
        assert (calls[0].index, calls[0].function.name) == (0, "weather")
        off = client.chat.completions.create(tool_choice="none", **asked).choices[0]
        assert (off.finish_reason, off.message.tool_calls) == ("stop", None)
