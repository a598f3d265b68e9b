"""Requests that were sent before: their rest, their answer, their end."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from draftwood.serve.recovery import Recovery
from draftwood.serve.reply import caller_of, respond

_KNOWN: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "there is no such request of this client"},
    "5XX": {"description": "the server is at fault"},
}


def request_routes(recovery: Recovery) -> APIRouter:
    """The endpoints under /v1/requests."""
    router = APIRouter()

    @router.get("/v1/requests/{request_id}", responses=_KNOWN)
    async def answer(request_id: str, request: Request) -> Response:
        """The whole answer, when it is there."""
        start = recovery.again(caller_of(request), request_id, None)
        return await respond(request, start, stream=False)

    @router.get("/v1/requests/{request_id}/events", responses=_KNOWN)
    async def events(request_id: str, request: Request) -> Response:
        """The events behind the one that the header Last-Event-ID names, or all of them."""
        last = request.headers.get("last-event-id")
        start = recovery.again(caller_of(request), request_id, last)
        return await respond(request, start, stream=True)

    @router.delete("/v1/requests/{request_id}", responses=_KNOWN)
    async def delete(request_id: str, request: Request) -> Response:
        """Ends the request, if it runs, and forgets its answer."""
        recovery.cancel(caller_of(request), request_id)
        return JSONResponse({"id": request_id, "deleted": True})

    return router
