"""Reading a request's body: its size, its type, and JSON without surprises."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from draftwood.serve.errors import ApiError

_READ_S = 60.0
_DISCARD_S = 2.0


class JsonRequest(Request):
    """A request whose body is JSON of bounded size."""

    async def body(self) -> bytes:
        """The bytes of the body.

        Raises:
            ApiError: it is too large, too slow, or not said to be JSON.
        """
        if not hasattr(self, "_body"):
            kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json" and not kind.endswith("+json"):
                raise ApiError(
                    415,
                    f"Unsupported content type: {kind or 'none'!r}. Send the header "
                    "Content-Type: application/json",
                    code="unsupported_content_type",
                )
            self._body = await self._read(self.app.state.max_body)
        return self._body

    async def _read(self, limit: int) -> bytes:
        told = self.headers.get("content-length", "")
        if told.isdigit() and int(told) > limit:
            await self._discard(limit)
            raise _too_large(limit)
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(_READ_S):
                while more and len(body) <= limit:
                    data, more = await self._part()
                    body += data
        except TimeoutError as error:
            raise ApiError(408, "the body did not arrive in time", code="timeout") from error
        if len(body) > limit:
            if more:
                await self._discard(limit)
            raise _too_large(limit)
        return bytes(body)

    async def _discard(self, limit: int) -> None:
        """Reads on for a moment: a client that is still sending would not see the answer."""
        size, more = 0, True
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while more and size < 16 * limit:
                    data, more = await self._part()
                    size += len(data)

    async def _part(self) -> tuple[bytes, bool]:
        """What has arrived, and whether more will."""
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        return message.get("body", b""), message.get("more_body", False)

    async def json(self) -> Any:
        """The body's value.

        Raises:
            ApiError: it is not valid UTF-8, not valid JSON, or holds what no JSON may hold.
        """
        return parse_json(await self.body())


class JsonRoute(APIRoute):
    """A route whose body is read by `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handler


def parse_json(body: bytes) -> Any:
    """A JSON value of finite numbers and valid text.

    Raises:
        ApiError: it is none.
    """
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be text
    except UnicodeDecodeError as error:
        raise _invalid(f"it is not UTF-8 (byte {error.start})") from error
    except UnicodeEncodeError as error:
        raise _invalid("a string holds half a surrogate pair") from error
    except RecursionError as error:
        raise _invalid("it is nested too deeply") from error
    except ValueError as error:
        raise _invalid(str(error)) from error
    return value


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {limit} bytes: send less, or start the server with a larger "
        "--max-body",
        code="body_too_large",
        headers={"connection": "close"},
    )


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"We could not parse the JSON body of your request: {why}.")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:20]} is too large a number")
    return number
