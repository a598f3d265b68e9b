"""Whatever a client gets wrong: a status of OpenAI's, a body of OpenAI's form, and a plain word."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftwood.llm import LLM
from draftwood.serve.access import ApiKeys, allowed_hosts
from tests.serve.conftest import Live, Reply, serving

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the dog"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "the dog", "max_tokens": 2}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def _chat(live: Live, **changes: Any) -> Reply:
    return live.ask("POST", "/v1/chat/completions", CHAT | changes)


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"heat": 1}, None, "Unrecognized request argument supplied: heat"),
        ({"heat": 1, "cold": 2}, None, "Unrecognized request arguments supplied: heat, cold"),
        ({"messages": None}, "messages", "messages"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "Missing required parameter"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            "image_url",
        ),
        ({"temperature": "0.5"}, "temperature", "number"),
        ({"temperature": 2.1}, "temperature", "2"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_tokens": 2.5}, "max_tokens", "integer"),
        ({"max_tokens": 4000}, "max_tokens", "256"),
        ({"n": 0}, "n", "1"),
        ({"n": 129}, "n", "128"),
        ({"seed": 2**64}, "seed", "18446744073709551616"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"stop": 3}, "stop", "string"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "100"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"min_tokens": 3}, "min_tokens", "max_tokens"),
        ({"timeout": 0}, "timeout", "greater than 0"),
        ({"modalities": ["audio"]}, "modalities[0]", "'text'"),
        ({"functions": []}, None, "functions"),
        ({"reasoning_effort": "high"}, None, "reasoning_effort"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json", "one form"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        (
            {
                "tools": [_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "go"}},
            },
            "tool_choice",
            "'go'",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
        ({"n": 128, "max_tokens": None, "extra": 1}, None, "extra"),
    ],
)
def test_a_wrong_field_is_named(
    live: Live, changes: dict[str, Any], param: str | None, words: str
) -> None:
    reply = _chat(live, **changes)
    assert reply.status == 400, reply
    error = reply.error
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert words in error["message"], error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "at least 1"),
        ({"prompt": [[]]}, "at least 1"),
        ({"prompt": ["the", 3]}, "string"),
        ({"prompt": [1, -1]}, "greater than or equal to 0"),
        ({"prompt": [99999]}, "99999"),
        ({"prompt": "the dog " * 300}, "256"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "echo"),
        ({"prompt": ["a"] * 2000}, "2000 texts"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_wrong_completion_is_refused(live: Live, changes: dict[str, Any], words: str) -> None:
    reply = live.ask("POST", "/v1/completions", TEXT | changes)
    assert reply.status == 400, reply
    assert words in reply.error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "Missing required body"),
        (b"{", "could not parse"),
        (b'{"prompt": "a"} {}', "could not parse"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": 1e999}', "too large"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "could not parse"),
        (b'{"prompt": ' + b"[" * 50_000 + b"}", "could not parse"),
        (b"[]", "body"),
        (b"null", "body"),
        (b'"text"', "body"),
    ],
)
def test_a_body_that_is_no_request_is_refused(live: Live, body: bytes, words: str) -> None:
    reply = live.ask("POST", "/v1/completions", body)
    assert reply.status == 400, reply
    assert words in reply.error["message"]


def test_a_body_that_is_not_said_to_be_json_is_refused(live: Live) -> None:
    """A page can send a form anywhere without being asked: that must not reach the model."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        body = json.dumps(TEXT).encode()
        reply = live.ask("POST", "/v1/completions", body, {"content-type": kind})
        assert reply.status == 415
        assert "application/json" in reply.error["message"]


def test_a_body_that_is_too_large_is_refused(live: Live) -> None:
    reply = live.ask("POST", "/v1/completions", b" " * 100_001)
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    assert live.ask("POST", "/v1/completions", TEXT).status == 200


def test_unknown_places_and_methods_are_refused(live: Live) -> None:
    missing = live.ask("GET", "/v1/nothing")
    assert (missing.status, missing.error["message"]) == (404, "Invalid URL (GET /v1/nothing)")
    wrong = live.ask("GET", "/v1/chat/completions")
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_supported")
    assert wrong.headers["allow"] == "POST"
    model = _chat(live, model="gpt-5")
    assert (model.status, model.error["code"]) == (404, "model_not_found")


def test_fields_that_change_no_text_are_taken(live: Live) -> None:
    reply = _chat(
        live,
        user="somebody",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        prompt_cache_key="k",
        safety_identifier="s",
        modalities=["text"],
        prediction={"type": "content", "content": "x"},
        response_format={"type": "text"},
        tools=None,
        stop=None,
        top_logprobs=None,
    )
    assert reply.status == 200, reply


def test_structured_output_without_its_extra_names_it(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood.serve.sampling.can_structure", lambda: False)
    for changes in (
        {"response_format": {"type": "json_object"}},
        {"guided_choice": ["a", "b"]},
        {"structured_outputs": {"regex": "a+"}},
        {"tools": [_TOOL], "tool_choice": "required"},
    ):
        reply = _chat(live, **changes)
        assert reply.status == 400
        assert "draftwood[grammar]" in reply.error["message"]


def test_every_answer_has_the_requests_id(live: Live) -> None:
    given = live.ask("GET", "/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = live.ask("GET", "/v1/nothing", headers={"x-request-id": "a b"})
    assert made.headers["x-request-id"].startswith("req_")


def test_pages_from_elsewhere_may_read_only_where_that_is_set(live: Live) -> None:
    def allowed(origin: str) -> str | None:
        reply = live.ask("GET", "/v1/models", headers={"origin": origin})
        return reply.headers.get("access-control-allow-origin")

    assert allowed("https://page.example") == "https://page.example"
    assert allowed("https://other.example") is None


def test_a_key_opens_the_api_and_nothing_else_does(make_llm: Any) -> None:
    llm: LLM = make_llm()
    hashed = "sha256:" + "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
    with serving(llm, keys=ApiKeys(["first-key", hashed])) as live:
        for key in ("first-key", "secret"):
            reply = live.ask("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
            assert reply.status == 200, reply
        for header in ({}, {"authorization": "Bearer x"}, {"authorization": "Basic first-key"}):
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models")):
                reply = live.ask(method, path, headers=header)
                assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert live.ask("GET", "/health").status == 200
        assert "first-key" not in repr(vars(ApiKeys(["first-key"])))


def test_a_host_that_points_here_is_not_let_in(make_llm: Any) -> None:
    """A page whose own name is made to resolve to 127.0.0.1 could read all answers otherwise."""
    llm: LLM = make_llm()
    with serving(llm, hosts=allowed_hosts("127.0.0.1", ["my.example"])) as live:
        port = live.address[1]
        for host in ("localhost", f"127.0.0.1:{port}", "MY.example:80", "[::1]:1"):
            assert live.ask("GET", "/v1/models", headers={"host": host}).status == 200
        reply = live.ask("GET", "/v1/models", headers={"host": "evil.example"})
        assert (reply.status, reply.error["code"]) == (403, "unknown_host")
        assert "--allowed-host" in reply.error["message"]
    assert allowed_hosts("0.0.0.0", []) is None
