"""The page at `/`: a chat, and beside it the round as it happens.

Plain files of this package, read once. They ask nothing of any other server, and the browser is
told to allow nothing else.
"""

from __future__ import annotations

import mimetypes
from hashlib import blake2b
from importlib.resources import files
from typing import TYPE_CHECKING

from draftwood.errors import MissingExtraError

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
    )
)
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}


def static_files() -> dict[str, bytes]:
    """The page's files by name."""
    folder = files("draftwood.serve").joinpath("static")
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def mount_page(app: FastAPI) -> None:
    """Adds `GET /` and `GET /static/NAME` to an application. They need no API key.

    Raises:
        MissingExtraError: FastAPI is not installed.
    """
    try:
        from fastapi import HTTPException
    except ImportError as error:
        raise MissingExtraError("fastapi", "server") from error
    contents = static_files()

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in contents:
            raise HTTPException(404, f"the page has no file {name!r}")
        return _answer(name, contents[name], request.headers.get("If-None-Match"))

    for path in ("/", "/static/{name}"):
        app.add_route(path, file, methods=["GET", "HEAD"], include_in_schema=False)


def _answer(name: str, body: bytes, known: str | None) -> Response:
    """A file, or 304 if the browser has it."""
    from fastapi import Response

    tag = f'"{blake2b(body, digest_size=12).hexdigest()}"'
    suffix = name[name.rfind(".") :]
    headers = {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": tag,
    }
    if known == tag:
        return Response(status_code=304, headers=headers)
    kind = _TYPES.get(suffix) or mimetypes.types_map.get(suffix, "application/octet-stream")
    return Response(body, headers=headers, media_type=kind)
