"""From a responder to an HTTP response, and who asked."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from draftwood.serve.responder import Responder
from draftwood.serve.service import Caller
from draftwood.serve.stream import EventStream, unless_gone


def caller_of(request: Request) -> Caller:
    """Who sent a request."""
    note = request.state.note
    return Caller(note.caller, request.state.request_id, note.owner, note.chose_id)


async def respond(
    request: Request, start: Coroutine[Any, Any, Responder], stream: bool | None
) -> Response:
    """The whole answer, or its pieces as they come; 204 where the reader has had all of them."""
    responder = await unless_gone(request.receive, start)
    request.state.note.facts["id"] = responder.id
    if getattr(request.state, "traced", False):  # who then lets go of it
        request.state.note.responder = responder
    if stream and responder.has_all:
        _finish(request, responder)
        return Response(status_code=204)
    if stream:
        return EventStream(responder.events(), lambda: _finish(request, responder))
    try:
        return JSONResponse(await unless_gone(request.receive, responder.whole()))
    finally:
        _finish(request, responder)


def _finish(request: Request, responder: Responder) -> None:
    """Ends what still runs, and notes for the log what there was."""
    responder.close()
    request.state.note.facts |= responder.facts()
