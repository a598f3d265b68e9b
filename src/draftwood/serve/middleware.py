"""What every request passes through: an id, a log line, the host and key checks, last resorts."""

from __future__ import annotations

import json
import logging
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood.serve.access import ApiKeys, host_name
from draftwood.serve.errors import ApiError, as_api_error
from draftwood.serve.stream import ClientGoneError

if TYPE_CHECKING:
    from draftwood.serve.responder import Responder

_log = logging.getLogger("draftwood.serve")
_ID = re.compile(r"[\x21-\x7e]{1,128}")
# The page must load before it can ask for a key, and a load balancer has none.
_OPEN = re.compile(r"/|/health|/static/.*")

request_id: ContextVar[str | None] = ContextVar("draftwood_request_id", default=None)


@dataclass(slots=True)
class Note:
    """What is known of a request, besides what every request has; endpoints write here.

    Attributes:
        caller: who sent it.
        owner, chose_id: see `Caller`.
        facts: for its log line.
        responder: who writes the response, for its span; None where there is none.
    """

    caller: str = ""
    owner: str = ""
    chose_id: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    responder: Responder | None = None


class Gate:
    """The outermost layer.

    Args:
        app: the application.
        keys: that open the API; none opens it to all.
        hosts: that requests may name; None for any.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, and sees to it that it is answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        own_id = given if _ID.fullmatch(given) else f"req_{uuid4().hex}"
        request_id.set(own_id)
        note = Note(caller=(scope.get("client") or ("",))[0], chose_id=own_id == given)
        state = scope.setdefault("state", {})
        state.update(request_id=own_id, note=note)
        if "trace_id" in state:
            note.facts["trace_id"] = state["trace_id"]
        outgoing = _Outgoing(send, own_id)
        begin = time.perf_counter()
        try:
            await self._serve(scope, headers, note, receive, outgoing)
        finally:
            _access_line(scope, outgoing.status, time.perf_counter() - begin, note)

    async def _serve(
        self, scope: Scope, headers: Headers, note: Note, receive: Receive, send: _Outgoing
    ) -> None:
        try:
            self._check(scope, headers, note)
            await self._app(scope, receive, send)
        except (ClientGoneError, ClientDisconnect):
            note.facts["client_gone"] = True
            send.status = send.status or 499
        except Exception as error:
            if not isinstance(error, ApiError):
                _log.exception("a request failed")
            if send.status is None:
                await send_error(send, as_api_error(error))

    def _check(self, scope: Scope, headers: Headers, note: Note) -> None:
        host = host_name(headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            raise ApiError(
                403,
                f"requests to {host!r} are refused: start the server with --allowed-host {host}",
                code="unknown_host",
            )
        if not self._keys or scope["method"] == "OPTIONS" or _OPEN.fullmatch(scope["path"]):
            return
        holder = self._keys.holder(headers.get("authorization"))
        if holder is None:
            raise ApiError(
                401,
                "Incorrect API key provided: send one as  Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        note.caller, note.owner = holder, self._keys.owner(holder)


class _Outgoing:
    """Sends, and remembers the status."""

    def __init__(self, send: Send, own_id: str) -> None:
        self._send = send
        self._id = own_id.encode()
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._id)]
        await self._send(message)


async def send_error(send: Send, error: ApiError) -> None:
    """An error as a whole response."""
    body = json.dumps(error.body, ensure_ascii=True).encode()
    headers = {"content-type": "application/json", **(error.headers or {})}
    headers["content-length"] = str(len(body))
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status_code, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _access_line(scope: Scope, status: int | None, seconds: float, note: Note) -> None:
    facts = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 4),
        "caller": note.caller,
        **note.facts,
    }
    _log.info("request", extra={"facts": facts})
