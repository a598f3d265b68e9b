"""One request that is kept for a client that may come back."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from draftwood.sampling import TokenLogprobs
from draftwood.serve.generation import Generation, Outbox, Piece
from draftwood.serve.tickets import Ticket

if TYPE_CHECKING:
    from draftwood.serve.recovery import Recovery

_SAVED_S = 2.0  # a disk that is slower than this does not hold up answers


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """How long requests are kept for clients that may come back.

    Attributes:
        grace_s: a request that runs and has no reader.
        keep_s: an answer, from its end on.
        keep_bytes: most bytes of answers on the disk; the oldest go first.
    """

    grace_s: float = 60.0
    keep_s: float = 600.0
    keep_bytes: int = 256 << 20


@dataclass(slots=True)
class RecoveryCounts:
    """What happened since the start.

    Attributes:
        num_resumed: requests of an earlier process that went on.
        num_lost: those that could not.
        num_reconnects: readers that came back.
        num_refused: that came back and asked for what is not there, or not theirs.
        num_expired: requests that nobody came back for in time.
    """

    num_resumed: int = 0
    num_lost: int = 0
    num_reconnects: int = 0
    num_refused: int = 0
    num_expired: int = 0


@dataclass(slots=True)
class Whole:
    """Outputs that have ended.

    Attributes:
        pieces: by index, each all of its output.
        prompt_logprobs: by the index of a prompt's first output.
    """

    pieces: dict[int, Piece] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

    def add(self, other: Whole) -> None:
        """Takes over what another has."""
        self.pieces |= other.pieces
        self.prompt_logprobs |= other.prompt_logprobs


@dataclass(slots=True, eq=False)
class Held:
    """One request that is kept. Belongs to the event loop, `ended` excepted.

    Attributes:
        key: owner and id.
        question: digest of what was asked.
        keeps: whether it lives on without a reader.
        response_id, created: of its response; empty and 0 until it has one.
        generations: while they are needed.
        reader: who is told; None for nobody.
        left_s: since when, on the monotonic clock.
        ticket: what is or will be in its file; None once only the file has it.
        num_bytes: of that file, once it holds the answer.
        finished, finished_s: whether all of it has ended, and when by the wall clock.
        complete: whether some reader has had all of it.
        dropped: whether it is forgotten.
        opened: set when it has a response, or is dropped.
        written: set when its ticket is on the disk, or cannot be written.
        whole: outputs that have ended, until their file has them.
        num_ended: of its generations.
        resumed: whether it is an earlier process's.
    """

    recovery: Recovery
    key: tuple[str, str]
    question: str
    keeps: bool
    response_id: str = ""
    created: int = 0
    generations: list[Generation] = field(default_factory=list)
    reader: Outbox | None = None
    left_s: float = 0.0
    ticket: Ticket | None = None
    num_bytes: int = 0
    finished: bool = False
    finished_s: float = 0.0
    complete: bool = False
    dropped: bool = False
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    written: asyncio.Event = field(default_factory=asyncio.Event)
    whole: Whole = field(default_factory=lambda: Whole())
    num_ended: int = 0
    resumed: bool = False

    async def saved(self) -> None:
        """Waits until the request is on the disk, or the disk is too slow to wait for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_SAVED_S):
                await self.written.wait()

    def left(self, outbox: Outbox, *, complete: bool) -> bool:
        """A reader has gone; returns whether that is dealt with here."""
        return self.recovery.left(self, outbox, complete=complete)

    def ended(self, one: Generation, error: Exception | None) -> None:
        """A generation has ended. On the engine's thread, which alone may read its sequences."""
        whole = Whole() if error is not None else self.recovery.whole_of(one)
        self.recovery.tell(lambda: self.recovery.note_end(self, whole, error))
