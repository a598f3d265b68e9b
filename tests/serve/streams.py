"""A client that reads events, may lose its connection at any of them, and comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any

Address = tuple[str, int]


@dataclass(slots=True)
class Stream:
    """What came of one streamed request, over all of its connections.

    Attributes:
        events: the data of each event but the last, `[DONE]`.
        ids: of these.
        done: whether `[DONE]` came.
    """

    address: Address
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    events: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    done: bool = False
    status: int = 0

    @property
    def last_id(self) -> str:
        """Of the last event that came whole; empty before the first."""
        return self.ids[-1] if self.ids else ""

    def text(self, index: int = 0) -> str:
        """All that came of one output."""
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or ""
            for choice in self._choices(index)
        )

    def _choices(self, index: int) -> list[dict[str, Any]]:
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return [choice for choice in choices if choice["index"] == index]

    def tokens(self, index: int) -> list[str]:
        """Of the log-probabilities of one output."""
        found: list[str] = []
        for choice in self._choices(index):
            logprobs = choice.get("logprobs") or {}
            found += logprobs.get("tokens") or []
            found += [one["token"] for one in logprobs.get("content") or []]
        return found

    def calls(self, index: int) -> list[Any]:
        """The functions that one output calls."""
        found = []
        for choice in self._choices(index):
            calls = choice.get("delta", {}).get("tool_calls", [])
            found += [call["function"] for call in calls]
        return found

    def reasons(self) -> list[str]:
        """Of the outputs that have ended, as they came."""
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]

    def send(self, most: int | None = None) -> Stream:
        """Sends the request and reads events, at most so many; then the connection is cut."""
        content = json.dumps(self.body).encode()
        return self._read("POST", self.path, content, most)

    def come_back(self, request_id: str, most: int | None = None) -> Stream:
        """Asks for what follows the last event."""
        return self._read("GET", f"/v1/requests/{request_id}/events", None, most)

    def _read(self, method: str, path: str, content: bytes | None, most: int | None) -> Stream:
        headers = {"content-type": "application/json", **self.headers}
        if self.last_id:
            headers["last-event-id"] = self.last_id
        connection = HTTPConnection(*self.address, timeout=120)
        try:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            self.status = response.status
            if response.status != 200:
                self.events.append(json.loads(response.read() or b"{}"))
                return self
            self._take(response, most)
        finally:
            connection.close()
        return self

    def _take(self, response: HTTPResponse, most: int | None) -> None:
        for count, (event_id, data) in enumerate(events_of(response), start=1):
            if data == "[DONE]":
                self.done = True
                self.ids.append(event_id)
                return
            self.events.append(json.loads(data))
            if event_id:  # an error has none
                self.ids.append(event_id)
            if count == most:
                return


def events_of(response: HTTPResponse) -> Iterator[tuple[str, str]]:
    """Id and data of each event that arrives whole."""
    event_id = data = ""
    for line in response:
        text = line.decode().rstrip("\r\n")
        if not line.endswith(b"\n"):
            return
        if text.startswith("id: "):
            event_id = text[4:]
        elif text.startswith("data: "):
            data = text[6:]
        elif not text and data:
            yield event_id, data
            event_id = data = ""
