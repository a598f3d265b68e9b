"""Whatever goes wrong, as OpenAI's API says it: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from draftwood.errors import DraftwoodError, PromptError
from draftwood.serve.requests import ChatRequest, CompletionRequest

_NAME = re.compile(r"(?!str$)[a-z_]+")
_TYPES = {429: "rate_limit_error"}


class ApiError(HTTPException):
    """A request that ends in an error.

    Args:
        status: of the HTTP response.
        message: what was wrong and what to do.
        param: the request's field it is about.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response, or of the event that ends a stream."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.detail,
                "type": _TYPES.get(self.status_code, kind),
                "param": self.param,
                "code": self.code,
            }
        }


def as_api_error(error: BaseException) -> ApiError:
    """Any error as one that can be sent; what is not the client's fault says nothing of inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptError):
        return ApiError(400, str(error), code=_prompt_code(str(error)))
    if isinstance(error, DraftwoodError):
        return ApiError(400, str(error), param=_param(str(error)))
    if isinstance(error, RequestValidationError):
        return invalid(error.errors())
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    return ApiError(500, "the server failed; its log says why", code="internal_error")


def too_late() -> ApiError:
    """A request whose time is up."""
    return ApiError(
        408,
        "the request's time is up: raise timeout or ask for fewer tokens",
        code="timeout",
        headers={"x-should-retry": "false"},
    )


def invalid(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The error of a body that does not fit, from pydantic's list of problems."""
    unknown = [
        str(problem["loc"][1])
        for problem in problems
        if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 2
    ]
    if unknown:
        plural = "s" if len(unknown) > 1 else ""
        return ApiError(
            400, f"Unrecognized request argument{plural} supplied: {', '.join(unknown)}"
        )
    # Of a union every member has complained: the one that came furthest says it best, and what is
    # said of a value is worth more than that its type is another.
    problem = max(
        problems, key=lambda one: (len(_place(one["loc"])), not one["type"].endswith("_type"))
    )
    param = _field(_place(problem["loc"])) or None
    if problem["type"] == "missing":
        where = f"parameter: '{param}'" if param else "body: send a JSON object"
        return ApiError(
            400, f"Missing required {where}.", param=param, code="missing_required_parameter"
        )
    about = f"'{param}'" if param else "the body"
    return ApiError(
        400, f"Invalid value for {about}: {problem['msg']}.", param=param, code="invalid_value"
    )


def _place(loc: Sequence[Any]) -> list[Any]:
    """Where in the body: names of fields and indices, without what pydantic calls its types."""
    return [part for part in loc[1:] if isinstance(part, int) or _NAME.fullmatch(part)]


def _field(place: Sequence[Any]) -> str:
    """("messages", 0, "role") as messages[0].role."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _param(message: str) -> str | None:
    """The field that a message of ours is about: it begins with it."""
    match = re.match(r"\w+", message)
    name = match[0] if match else ""
    return name if name in ChatRequest.model_fields | CompletionRequest.model_fields else None


def _prompt_code(message: str) -> str | None:
    return "context_length_exceeded" if "context" in message else None
