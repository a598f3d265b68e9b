"""Texts of a wanted form and tools that must be called, through the official client."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.serve.conftest import MODEL, Live

CITIES = ["Rome", "Oslo", "Lima"]
_FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "time": {"zone": {"enum": ["UTC", "CET"]}},
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        },
    }
    for name, properties in _FUNCTIONS.items()
]
MESSAGES: Any = [{"role": "user", "content": "the quick brown fox"}]
SEEDS = range(4)


class Answer(BaseModel):
    """A form that ends soon, also where a random model fills it in."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo", "Lima"]
    warm: bool
    days: Literal[1, 2, 3]


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_choice": ["yes", "no", "naïve"]}, r"yes|no|naïve"),
    ({"guided_regex": r"[a-c]{2,4}-[0-9]{3}"}, r"[a-c]{2,4}-[0-9]{3}"),
    ({"guided_json": {"enum": [1, "two", None]}}, r'1|"two"|null'),
    ({"guided_json": json.dumps({"enum": [1, "two", None]})}, r'1|"two"|null'),
    ({"guided_grammar": 'start: "a" ("b" | "c") "d"'}, r"a[bc]d"),
    ({"structured_outputs": {"choice": ["left", "right"]}}, r"left|right"),
]


def _ask(client: openai.OpenAI, seed: int, **fields: Any) -> tuple[Any, Any]:
    """The choice of a whole answer, and what a stream of the same request adds up to."""
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 120, "seed": seed}
    asked |= fields
    [whole] = client.chat.completions.create(**asked).choices
    streamed: dict[str, Any] = {"content": "", "calls": [], "reason": None}
    for chunk in client.chat.completions.create(stream=True, **asked):
        [choice] = chunk.choices
        streamed["content"] += choice.delta.content or ""
        streamed["calls"] += choice.delta.tool_calls or []
        streamed["reason"] = choice.finish_reason or streamed["reason"]
    return whole, streamed


def _named(calls: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or []]


def _check_arguments(name: str, arguments: dict[str, Any]) -> None:
    assert set(arguments) == set(_FUNCTIONS[name])
    if name == "weather":
        assert arguments["city"] in CITIES
        assert 1 <= arguments["days"] <= 9
    else:
        assert arguments["zone"] in ("UTC", "CET")


@pytest.mark.parametrize(("fields", "pattern"), FORMS)
def test_a_form_is_kept_to(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    """Whole and streamed, with speculation and without, by chat and by completion."""
    for seed in SEEDS:
        whole, streamed = _ask(client, seed, extra_body=fields)
        assert re.fullmatch(pattern, whole.message.content), whole
        assert (whole.finish_reason, streamed["reason"]) == ("stop", "stop")
        assert streamed["content"] == whole.message.content
        plain, _ = _ask(client, seed, extra_body=fields | {"speculation": False})
        assert plain.message.content == whole.message.content
    text = client.completions.create(model=MODEL, prompt="the", max_tokens=60, extra_body=fields)
    assert re.fullmatch(pattern, text.choices[0].text)


@pytest.fixture
def no_space(live: Live) -> dict[str, int]:
    """A bias against white space: JSON may have any amount, and a random model makes use of it."""
    decode = live.llm.tokenizer.decode
    return {str(i): -100 for i in range(len(live.llm.tokenizer)) if not decode([i]).strip()}


def test_a_schema_by_openais_rules(client: openai.OpenAI, no_space: dict[str, int]) -> None:
    schema = {"name": "answer", "schema": Answer.model_json_schema(), "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    found = set()
    for seed in range(6):
        whole, streamed = _ask(client, seed, response_format=form, logit_bias=no_space)
        assert streamed["content"] == whole.message.content
        found.add(Answer.model_validate_json(whole.message.content).city)
    assert len(found) > 1


def test_the_clients_own_parser_gets_its_type(
    client: openai.OpenAI, no_space: dict[str, int]
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 120, "seed": 1}
    asked |= {"response_format": Answer, "logit_bias": no_space}
    completion = client.chat.completions.parse(**asked)
    assert isinstance(completion.choices[0].message.parsed, Answer)
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == completion.choices[0].message.parsed


def test_any_json_object(client: openai.OpenAI) -> None:
    """A random model may not end it in time: then it is the beginning of one."""
    for seed in SEEDS:
        whole, streamed = _ask(client, seed, response_format={"type": "json_object"})
        assert whole.message.content.lstrip().startswith("{")
        assert streamed["content"] == whole.message.content
        if whole.finish_reason == "stop":
            assert isinstance(json.loads(whole.message.content), dict)


def test_a_tool_that_must_be_called(client: openai.OpenAI) -> None:
    names = set()
    for seed in range(8):
        whole, streamed = _ask(client, seed, tools=TOOLS, tool_choice="required")
        [(name, arguments)] = _named(whole.message.tool_calls)
        _check_arguments(name, arguments)
        assert _named(streamed["calls"]) == [(name, arguments)]
        assert (whole.finish_reason, streamed["reason"]) == ("tool_calls", "tool_calls")
        assert whole.message.content is None
        assert streamed["content"] == ""
        assert [call.index for call in streamed["calls"]] == [0]
        names.add(name)
    assert names == set(_FUNCTIONS)


@pytest.mark.parametrize("name", list(_FUNCTIONS))
def test_a_tool_by_its_name(client: openai.OpenAI, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    for seed in SEEDS:
        whole, streamed = _ask(client, seed, tools=TOOLS, tool_choice=choice)
        [(called, arguments)] = _named(whole.message.tool_calls)
        assert called == name
        _check_arguments(name, arguments)
        assert _named(streamed["calls"]) == [(called, arguments)]


def test_every_output_calls_for_itself(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", n=3, max_tokens=120
    )
    for choice in answer.choices:
        [(name, arguments)] = _named(choice.message.tool_calls)
        _check_arguments(name, arguments)
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3  # type: ignore[index]


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_where_no_tool_need_be_called_text_is_text(
    client: openai.OpenAI, choice: str | None
) -> None:
    """The random model calls nothing by itself; what it says is as if held to no form."""
    fields: dict[str, Any] = {} if choice is None else {"tool_choice": choice}
    for seed in SEEDS:
        whole, streamed = _ask(client, seed, tools=TOOLS, max_tokens=20, **fields)
        assert whole.message.tool_calls is None
        assert streamed["calls"] == []
        assert streamed["content"] == whole.message.content != ""


def test_a_conversation_with_a_call_goes_on(client: openai.OpenAI) -> None:
    """What came is sent back as it is, with the tool's answer."""
    first = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=120
    )
    message = first.choices[0].message
    [call] = message.tool_calls or []
    turns: Any = [
        *MESSAGES,
        message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    second = client.chat.completions.create(
        model=MODEL, messages=turns, tools=TOOLS, max_tokens=5
    ).choices[0]
    assert second.finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "without tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "contradicts",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"extra_body": {"guided_regex": "(", "temperature": 0}}, "regex"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, "one form"),
        ({"extra_body": {"guided_choice": []}}, "choice"),
    ],
)
def test_what_cannot_be_is_refused(
    client: openai.OpenAI, live: Live, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(words)):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)
    live.assert_idle()
