"""Log lines on stderr, as text or as JSON, each with the id of its request."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from draftwood.serve.middleware import request_id

_LEVELS = {
    "draftwood": logging.INFO,
    "uvicorn": logging.WARNING,
    "opentelemetry": logging.WARNING,
}


def set_up_logging(style: str) -> None:
    """Sends our log, and what uvicorn and OpenTelemetry have to warn of, to stderr.

    Args:
        style: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    for name, level in _LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    own = request_id.get()
    facts: dict[str, Any] = getattr(record, "facts", {})
    return facts | ({"request_id": own} if own else {})


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        row = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row, ensure_ascii=False, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback where there is one; facts as name=value."""
        facts = " ".join(f"{name}={_plain(value)}" for name, value in _facts(record).items())
        line = f"{_time(record)} {record.levelname.lower()} {record.getMessage()} {facts}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _plain(value: object) -> str:
    """A value without white space of its own, so that a client cannot write log lines."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
