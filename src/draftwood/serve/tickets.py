"""Requests as files: what a server must know to answer for them in another process.

    DIR/requests/
    └── 3f09....dwr     one for each request that was accepted, by owner and id

A file is written once when its request is accepted and once more, with the answer, when it has
ended; it goes when nobody can ask for it any more. What changes meanwhile (tokens, noise, grammar,
KV) is in the checkpoint beside it. Each file is `magic`, 16 bytes of blake2b over what follows, and
JSON; it is written under another name, synced and renamed.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from draftwood.engine.checkpoint import Maker, SavedRequest
from draftwood.errors import ConfigError
from draftwood.sampling import TokenLogprobs
from draftwood.serve.generation import Ending, Piece

_log = logging.getLogger("draftwood.serve")
_MAGIC = b"draftwood-request-1\n"
_DIGEST_BYTES = 16
_SUFFIX = ".dwr"
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request as its client sent it, and once it has ended its answer.

    Attributes:
        owner: whose API key it came with; empty where there are no keys.
        request_id: by which its client asks for it.
        kind: of endpoint: "chat" or "completion".
        body: the fields that were given.
        response_id, created: of the response.
        client, priority: its place in the queue.
        deadline_s: wall clock; None for none.
        maker: the model and versions that the answer follows from.
        prompts: the first output of each prompt, as it was before its first token.
        outputs: whole texts; None while it runs.
        prompt_logprobs: by the index of a prompt's first output.
        finished_s: wall clock.
        num_tokens, num_starts: how far it was when a process took it up last, and how many have
            done so without it getting further.
    """

    owner: str
    request_id: str
    kind: str
    body: Mapping[str, Any]
    response_id: str
    created: int
    client: str
    priority: int
    deadline_s: float | None
    maker: Maker
    prompts: tuple[SavedRequest, ...]
    outputs: tuple[Piece, ...] | None = None
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] | None = None
    finished_s: float = 0.0
    num_tokens: int = 0
    num_starts: int = 0

    @property
    def name(self) -> str:
        """Of its file."""
        return file_name(self.owner, self.request_id)

    def sequences(self, place: int) -> list[SavedRequest]:
        """All outputs of a prompt as they were before their first token; see `Worker`."""
        first = self.prompts[place]
        others = [
            replace(
                first,
                request_id=f"{first.request_id}-{i}",
                params=first.params.but(seed=seed, prompt_logprobs=None),
                seed=seed,
                parent=first.request_id,
            )
            for i in range(1, first.params.n)
            for seed in [(first.seed + i) % 2**64]
        ]
        return [first, *others]

    def started(self, num_tokens: int) -> Ticket:
        """The same, taken up by a process that finds so many tokens of it."""
        further = num_tokens > self.num_tokens
        num_starts = 1 if further else self.num_starts + 1
        return replace(self, num_tokens=num_tokens, num_starts=num_starts)

    def encode(self) -> bytes:
        """The bytes of its file."""
        record: dict[str, Any] = {
            "owner": self.owner,
            "request_id": self.request_id,
            "kind": self.kind,
            "body": self.body,
            "response_id": self.response_id,
            "created": self.created,
            "client": self.client,
            "priority": self.priority,
            "deadline_s": self.deadline_s,
            "maker": asdict(self.maker),
            "prompts": [saved.to_json() for saved in self.prompts],
            "finished_s": self.finished_s,
            "num_tokens": self.num_tokens,
            "num_starts": self.num_starts,
        }
        if self.outputs is not None:
            record["outputs"] = [_piece_json(piece) for piece in self.outputs]
            known = self.prompt_logprobs or {}
            record["prompt_logprobs"] = [[i, _logprobs_json(them)] for i, them in known.items()]
        body = json.dumps(record, separators=(",", ":")).encode()
        return _MAGIC + _digest(body) + body

    @classmethod
    def decode(cls, data: bytes) -> Ticket:
        """The ticket that `encode` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is none, or not whole.
        """
        start = len(_MAGIC) + _DIGEST_BYTES
        if not data.startswith(_MAGIC) or data[len(_MAGIC) : start] != _digest(data[start:]):
            raise ValueError("its checksum is wrong")
        record = json.loads(data[start:])
        outputs = record.pop("outputs", None)
        logprobs = record.pop("prompt_logprobs", ())
        return cls(
            **record
            | {
                "maker": Maker(**record["maker"]),
                "prompts": tuple(SavedRequest.from_json(saved) for saved in record["prompts"]),
            },
            outputs=None if outputs is None else tuple(map(_piece_from, outputs)),
            prompt_logprobs={int(i): _logprobs_from(them) for i, them in logprobs},
        )


class TicketFolder:
    """Where tickets are, and the thread that writes them.

    Args:
        folder: made if it is not there.

    Raises:
        ConfigError: it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"checkpoint folder {folder} cannot be used ({error.strerror}): name a folder that "
                "you may write to"
            ) from error
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._failed = False
        self._thread: threading.Thread | None = None

    def load(self) -> Iterator[tuple[Ticket, int]]:
        """All tickets that are whole, with their sizes; the others are removed, with a warning."""
        for part in self._folder.glob("*.part"):
            part.unlink(missing_ok=True)
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            data = path.read_bytes()
            try:
                yield Ticket.decode(data), len(data)
            except (KeyError, TypeError, ValueError) as error:
                _log.warning("request %s is damaged (%r) and forgotten", path, error)
                path.unlink(missing_ok=True)

    def read(self, name: str) -> Ticket | None:
        """One ticket; None where it is gone or damaged."""
        try:
            return Ticket.decode((self._folder / f"{name}{_SUFFIX}").read_bytes())
        except (OSError, KeyError, TypeError, ValueError):
            return None

    def put(self, ticket: Ticket, done: Callable[[int], None]) -> None:
        """Writes a ticket, later; the thread then calls `done` with its size, or 0."""
        self._post(lambda: done(self._write(ticket)))

    def remove(self, name: str) -> None:
        """Removes a ticket, later."""
        self._post(lambda: self._unlink(name))

    def close(self) -> None:
        """Does what waits, ten seconds at most, and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _post(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(job)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name="draftwood-tickets", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            job()

    def _write(self, ticket: Ticket) -> int:
        target = self._folder / f"{ticket.name}{_SUFFIX}"
        part = target.with_suffix(".part")
        try:
            data = ticket.encode()
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        except Exception as error:  # a full disk must not end a server
            if not self._failed:
                _log.warning("a request could not be saved: %s", error)
            self._failed = True
            return 0
        return len(data)

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            (self._folder / f"{name}{_SUFFIX}").unlink(missing_ok=True)


def file_name(owner: str, request_id: str) -> str:
    """What the file of a request is called: an id may hold anything."""
    return blake2b(f"{owner}\n{request_id}".encode(), digest_size=16).hexdigest()


def _piece_json(piece: Piece) -> dict[str, Any]:
    return {
        "index": piece.index,
        "text": piece.text,
        "token_ids": piece.token_ids,
        "logprobs": _logprobs_json(piece.logprobs),
        "offsets": piece.offsets,
        "ending": None if piece.ending is None else asdict(piece.ending),
    }


def _piece_from(record: dict[str, Any]) -> Piece:
    ending = record.pop("ending")
    logprobs = _logprobs_from(record.pop("logprobs"))
    return Piece(**record, logprobs=logprobs, ending=Ending(**ending) if ending else None)


def _logprobs_json(logprobs: Sequence[TokenLogprobs]) -> list[Any]:
    return [[one.token, one.logprob, one.rank, one.top] for one in logprobs]


def _logprobs_from(values: Sequence[Any]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token, logprob, rank, tuple((t, p) for t, p in top))
        for token, logprob, rank, top in values
    ]


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()
