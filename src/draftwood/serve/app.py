"""The application: endpoints, and how their errors look."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from draftwood.errors import DraftwoodError
from draftwood.serve.access import ApiKeys
from draftwood.serve.body import JsonRoute
from draftwood.serve.chat import start_chat
from draftwood.serve.completions import start_completion
from draftwood.serve.errors import ApiError, as_api_error
from draftwood.serve.messages import template_messages
from draftwood.serve.middleware import Gate
from draftwood.serve.reply import caller_of, respond
from draftwood.serve.request_routes import request_routes
from draftwood.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from draftwood.serve.responder import Responder
from draftwood.serve.service import Service, Start
from draftwood.serve.tracing import Traced, Tracing

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_JSON = {"application/json": {"schema": {"type": "object"}}}
_WRONG: dict[int | str, dict[str, Any]] = {
    status: {"description": about, "content": {"application/json": {"schema": _ERROR}}}
    for status, about in (("4XX", "the request is at fault"), ("5XX", "the server is"))
}
_GOOD: dict[int | str, dict[str, Any]] = {200: {"description": "the answer", "content": _JSON}}
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer, or with `stream` its pieces as events",
        "content": _JSON | {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """What is allowed.

    Attributes:
        keys: that open the API; none opens it to all.
        hosts: names that requests may use for this server; None for any.
        cors: origins whose pages may read answers.
        max_body: most bytes of a request's body.
        render_metrics: what /metrics answers: body and content type; None for nothing.
        extend: adds further pages to the application.
        tracing: makes spans of requests; None for none.
    """

    keys: ApiKeys
    hosts: frozenset[str] | None = None
    cors: tuple[str, ...] = ()
    max_body: int = 8 << 20
    render_metrics: Callable[[], tuple[bytes, str]] | None = None
    extend: Callable[[FastAPI], None] | None = None
    tracing: Tracing | None = None


def make_app(service: Service, settings: AppSettings) -> FastAPI:
    """The ASGI application that serves a model."""
    app = FastAPI(
        title="Draftwood",
        description="OpenAI's API for one model, with lossless speculative decoding.",
        version=version("draftwood"),
        docs_url=None,
        redoc_url=None,
    )
    app.state.max_body = settings.max_body
    app.include_router(_api(service))
    app.include_router(_about(service, settings))
    if service.recovery is not None:
        app.include_router(request_routes(service.recovery))
    if settings.extend is not None:
        settings.extend(app)
    for kind in (HTTPException, RequestValidationError, DraftwoodError):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(Gate, keys=settings.keys, hosts=settings.hosts)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id", "last-event-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    if settings.tracing is not None:
        app.add_middleware(Traced, tracing=settings.tracing)
    return app


def _api(service: Service) -> APIRouter:
    """What takes a body."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions", responses=_STREAMED | _WRONG)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        return await respond(request, _begin(service, start_chat, body, request), body.stream)

    @router.post("/v1/completions", responses=_STREAMED | _WRONG)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Goes on from a text."""
        start = _begin(service, start_completion, body, request)
        return await respond(request, start, body.stream)

    @router.post("/tokenize", responses=_GOOD | _WRONG)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text or a conversation."""
        return JSONResponse(await _tokenize(service, body))

    @router.post("/detokenize", responses=_GOOD | _WRONG)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        return JSONResponse(await _detokenize(service, body))

    return router


def _about(service: Service, settings: AppSettings) -> APIRouter:
    """What is asked about the server."""
    router = APIRouter()

    @router.get("/v1/models", responses=_GOOD | _WRONG)
    async def models() -> Response:
        """The model, under each of its names."""
        data = [_card(service, name) for name in service.names]
        return JSONResponse({"object": "list", "data": data})

    @router.get("/v1/models/{model:path}", responses=_GOOD | _WRONG)
    async def model(model: str) -> Response:
        """One of its names."""
        return JSONResponse(_card(service, service.check_model(model)))

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=_GOOD | _WRONG)
    async def health() -> Response:
        """Whether requests can be answered."""
        if not service.worker.alive:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return JSONResponse({"status": "ok"})

    @router.get("/version", responses=_GOOD | _WRONG)
    async def version_() -> Response:
        """Draftwood's version."""
        return JSONResponse({"version": version("draftwood")})

    if settings.render_metrics is not None:
        render = settings.render_metrics

        @router.get("/metrics", responses=_WRONG)
        async def metrics() -> Response:
            """Counters for Prometheus."""
            body, kind = render()
            return Response(body, headers={"content-type": kind})

    return router


def _begin(
    service: Service, start: Start, body: Sampling, request: Request
) -> Coroutine[Any, Any, Responder]:
    caller = caller_of(request)
    if service.recovery is None:
        return start(service, body, caller)
    last = request.headers.get("last-event-id") if body.stream else None
    return service.recovery.ask(start, body, caller, last)


async def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    service.check_model(body.model)
    tokenizer = service.llm.tokenizer
    special = body.add_special_tokens is not False
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", param="prompt")
    if body.messages is not None:
        messages = template_messages(body.messages)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        ids = await service.off_loop(lambda: tokenizer.encode_chat(messages, tools))
    else:
        text = body.prompt or ""
        ids = await service.off_loop(lambda: tokenizer.encode(text, add_special_tokens=special))
    strings = tokenizer.token_strings if body.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": service.llm.model.spec.max_model_len,
        "tokens": ids,
        "token_strs": None if strings is None else [strings[token] for token in ids],
    }


async def _detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    service.check_model(body.model)
    tokenizer = service.llm.tokenizer
    for token in body.tokens:
        if token >= len(tokenizer):
            raise ApiError(
                400,
                f"token id {token} does not exist: the vocabulary has {len(tokenizer)} ids",
                param="tokens",
            )
    decode = service.llm.tokenizer.decode
    return {
        "prompt": await service.off_loop(lambda: decode(body.tokens, skip_special_tokens=False))
    }


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "draftwood",
        "root": service.llm.model.spec.name,
        "parent": None,
        "max_model_len": service.llm.model.spec.max_model_len,
    }


async def _on_error(request: Request, error: Exception) -> Response:
    shown = as_api_error(error)
    if type(error) is HTTPException and error.status_code == 404:
        shown = ApiError(404, f"Invalid URL ({request.method} {request.url.path})")
    if type(error) is HTTPException and error.status_code == 405:
        message = f"Not allowed to {request.method} on {request.url.path}"
        shown = ApiError(405, message, code="method_not_supported", headers=error.headers)
    return JSONResponse(shown.body, shown.status_code, headers=shown.headers)
