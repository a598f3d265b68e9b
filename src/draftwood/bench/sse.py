"""A small HTTP client for measuring: one request, one connection, the time of every event.

It does as little as it can while the clock runs, so that the load it makes is the server's.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from draftwood.errors import ConfigError

_LIMIT = 1 << 24


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Attributes:
        host, port, secure: of the server; secure is https.
        path: before the API's own.
        key: sent as the API key; None for none.
    """

    host: str
    port: int
    secure: bool
    path: str = ""
    key: str | None = None

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Target:
        """The target that a URL names, with or without `/v1` at its end.

        Raises:
            ConfigError: it is no http or https URL.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url} is no URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url} is no URL of a server: write http://host:port")
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), secure, path, key)


@dataclass(frozen=True, slots=True)
class Timed:
    """What came back.

    Attributes:
        status: of the response.
        begin: when the request was sent, on the clock of `perf_counter`.
        events: the lines of data, each with the moment it arrived. A response that is no stream
            is one.
    """

    status: int
    begin: float
    events: list[tuple[float, bytes]]

    def json(self) -> list[tuple[float, Any]]:
        """The events as JSON, without the mark of the end."""
        return [(when, json.loads(data)) for when, data in self.events if data != b"[DONE]"]


async def ask(
    target: Target, method: str, path: str, body: Any = None, request_id: str | None = None
) -> Timed:
    """Sends a request and reads its response to the end.

    Args:
        target, method, path, body: of the request.
        request_id: by which it could be asked for again; None for one that the server chooses.

    Raises:
        OSError: the connection failed.
        EOFError: it broke off.
    """
    context = ssl.create_default_context() if target.secure else None
    reader, writer = await asyncio.open_connection(
        target.host, target.port, ssl=context, limit=_LIMIT
    )
    try:
        begin = perf_counter()
        writer.write(_request(target, method, path, body, request_id))
        await writer.drain()
        status, headers = await _head(reader)
        if headers.get("content-type", "").startswith("text/event-stream"):
            lines = [
                (when, line[5:].strip())
                async for when, line in _lines(_body(reader, headers))
                if line.startswith(b"data:")
            ]
            return Timed(status, begin, lines)
        whole = b"".join([data async for data in _body(reader, headers)])
        return Timed(status, begin, [(perf_counter(), whole)])
    finally:
        writer.close()


def _request(target: Target, method: str, path: str, body: Any, request_id: str | None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = [
        f"{method} {target.path}{path} HTTP/1.1",
        f"host: {host}:{target.port}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "connection: close",
        *([f"authorization: Bearer {target.key}"] if target.key else []),
        *([f"x-request-id: {request_id}"] if request_id else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {}
    for line in filter(None, rest):
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return int(first.split()[1]), headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body in the parts that it comes in."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        return
    left = int(headers.get("content-length", _LIMIT))
    while left > 0 and (data := await reader.read(min(left, 1 << 16))):
        left -= len(data)
        yield data


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[tuple[float, bytes]]:
    """Whole lines, with the moment when the last of each arrived."""
    rest = b""
    async for part in parts:
        now = perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield now, line
