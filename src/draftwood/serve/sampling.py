"""From a request's fields to sampling parameters."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from draftwood.errors import MissingExtraError
from draftwood.sampling import SamplingParams
from draftwood.serve.errors import ApiError
from draftwood.serve.requests import ChatRequest, CompletionRequest, ResponseFormat, Sampling

# Fields that mean the same under the same name; what is None keeps the default.
_SAME = (
    "n",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "cache_salt",
    "speculation",
    "max_tree_nodes",
    "max_draft_depth",
)


def chat_params(body: ChatRequest, structured: dict[str, Any] | None = None) -> SamplingParams:
    """The parameters of a chat request.

    Args:
        body: the request.
        structured: the form that a tool call must have; None leaves it to the request.

    Raises:
        ApiError, ConfigError: fields contradict each other.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    values = _shared(body, structured or structured_of(body, body.response_format))
    wanted = body.max_completion_tokens or body.max_tokens
    values["max_tokens"] = wanted  # None: as many as the context holds
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    return SamplingParams(**values)


def completion_params(body: CompletionRequest) -> SamplingParams:
    """The parameters of a completion request; OpenAI's default of 16 tokens holds.

    Raises:
        ApiError, ConfigError: fields contradict each other, or one is not supported.
    """
    if body.suffix is not None:
        raise ApiError(400, "suffix is not supported: leave it out", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of is supported only where it equals n", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0: that needs echo: true", param="max_tokens")
    values = _shared(body, structured_of(body, None))
    # The text of 0 tokens is made with one, which is then left out.
    values["max_tokens"] = 16 if body.max_tokens is None else max(body.max_tokens, 1)
    if body.logprobs is not None:
        values["logprobs"] = body.logprobs
        values["prompt_logprobs"] = body.logprobs if body.echo else None
    return SamplingParams(**values)


def structured_of(body: Sampling, response_format: ResponseFormat | None) -> dict[str, Any] | None:
    """The form that the text must have, as a mapping of vLLM's fields; None for any.

    Raises:
        ApiError: several forms are given, or a schema is missing.
    """
    given = {name: form for name, form in _forms(body, response_format) if form is not None}
    if len(given) > 1:
        names = " and ".join(given)
        raise ApiError(400, f"{names} are given: a text has one form", param=next(iter(given)))
    return next(iter(given.values()), None)


def _forms(
    body: Sampling, response_format: ResponseFormat | None
) -> list[tuple[str, dict[str, Any] | None]]:
    guided = ("json", "regex", "choice", "grammar")
    return [
        ("response_format", _form_of(response_format)),
        ("structured_outputs", body.structured_outputs),
        *(
            (f"guided_{kind}", None if value is None else {kind: value})
            for kind in guided
            for value in [getattr(body, f"guided_{kind}")]
        ),
    ]


def _form_of(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return {"json_object": True}
    if response_format.json_schema is None or response_format.json_schema.schema_ is None:
        raise ApiError(
            400,
            "Missing required parameter: 'response_format.json_schema.schema'.",
            param="response_format",
            code="missing_required_parameter",
        )
    return {"json": response_format.json_schema.schema_}


def _shared(body: Sampling, structured: dict[str, Any] | None) -> dict[str, Any]:
    values = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    values["temperature"] = 1.0 if body.temperature is None else body.temperature
    if body.seed is not None:
        values["seed"] = body.seed % 2**64
    if body.logit_bias:
        values["logit_bias"] = {_token(key): bias for key, bias in body.logit_bias.items()}
    if structured is not None:
        if not can_structure():
            raise MissingExtraError("structured output", "grammar")
        values["structured"] = structured
    return values


def can_structure() -> bool:
    """Whether the engine can be told what form a text must have."""
    return any(f.name == "structured" for f in fields(SamplingParams))


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise ApiError(
            400, f"logit_bias has the key {key!r}: it must be a token id", param="logit_bias"
        )
    return int(key)
