"""Server-sent events, and clients that vanish."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftwood.serve.errors import as_api_error

_T = TypeVar("_T")
_STALL_S = 120.0  # a reader that takes nothing for so long is given up
DONE = b"data: [DONE]\n\n"
PING = b": still here\n\n"
PING_S = 15.0  # so long a stream may be silent: proxies hang up on silence


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


def event(data: Any) -> bytes:
    """One server-sent event."""
    return (
        b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` gives; it is cancelled when the client disconnects.

    Raises:
        ClientGoneError: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, gone):
            if not one.done():
                one.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events.

    Args:
        events: encoded events. An exception in it becomes the last event.
        close: called at the end, whatever the end is: also when not one event was asked for.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until they end or nobody reads them.

        Raises:
            ClientGoneError: nobody does.
        """
        status, headers = self.status_code, self.raw_headers
        try:
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await unless_gone(receive, self._send_all(send))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        try:
            async for data in self._events:
                await _write(send, data)
        except ClientGoneError:
            raise
        except Exception as error:
            await _write(send, event(as_api_error(error).body))
        finally:
            await self._events.aclose()
        await _write(send, b"", more=False)


async def _write(send: Send, data: bytes, *, more: bool = True) -> None:
    try:
        async with asyncio.timeout(_STALL_S):
            await send({"type": "http.response.body", "body": data, "more_body": more})
    except (OSError, TimeoutError) as error:
        raise ClientGoneError from error
