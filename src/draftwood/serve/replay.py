"""Where a reader is in a stream: what the ids of events say, and how a stream is cut there.

An id counts what the reader has of each output, in tokens and characters, so it means the same
whatever the rounds were that the text came in: also in another process, and also when the reader
has more than that process had yet when it went on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import IntEnum

from draftwood.serve.errors import ApiError
from draftwood.serve.generation import Piece

_PLACE = re.compile(r"(\d{1,9})\.(\d{1,9})(e?)")


class Tail(IntEnum):
    """What a reader has of the events behind the texts."""

    NOTHING = 0
    USAGE = 1
    ALL = 2


_TAILS = {"": Tail.NOTHING, "u": Tail.USAGE, "d": Tail.ALL}
_LETTERS = {tail: letter for letter, tail in _TAILS.items()}


@dataclass(frozen=True, slots=True)
class Place:
    """How much of one output a reader has; `ended` when it knows its end."""

    num_tokens: int = 0
    num_chars: int = 0
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.num_tokens}.{self.num_chars}{'e' if self.ended else ''}"

    def behind(self, piece: Piece) -> Place:
        """The place behind a piece that begins here."""
        return Place(
            self.num_tokens + len(piece.token_ids),
            self.num_chars + len(piece.text),
            piece.ending is not None,
        )


@dataclass(frozen=True, slots=True)
class Position:
    """A place in each output of a request; as a string it is the id of an event.

    `5.21,7.30e;u`: five tokens with 21 characters of the first output, all of the second, and the
    counts.
    """

    places: tuple[Place, ...]
    tail: Tail = Tail.NOTHING

    def __str__(self) -> str:
        tail = _LETTERS[self.tail]
        return ",".join(map(str, self.places)) + (f";{tail}" if tail else "")

    @classmethod
    def begin(cls, num_outputs: int) -> Position:
        """Where a reader is that has nothing."""
        return cls((Place(),) * num_outputs)

    @classmethod
    def of(cls, event_id: str | None, num_outputs: int) -> Position:
        """What a header `Last-Event-ID` says; without one the beginning.

        Raises:
            ApiError: it is no id of a stream with so many outputs.
        """
        if not event_id:
            return cls.begin(num_outputs)
        text, _, letter = event_id.partition(";")
        parts = [_PLACE.fullmatch(part) for part in text.split(",")]
        if letter not in _TAILS or len(parts) != num_outputs or None in parts:
            raise ApiError(
                400,
                f"Last-Event-ID is {event_id[:40]!r}: send the id of an event of this stream",
                code="invalid_event_id",
            )
        places = [Place(int(m[1]), int(m[2]), bool(m[3])) for m in parts if m]
        return cls(tuple(places), _TAILS[letter])

    def at(self, index: int, place: Place) -> Position:
        """The same with another place in one output."""
        return replace(self, places=(*self.places[:index], place, *self.places[index + 1 :]))


def cut(piece: Piece, start: Place, have: Place) -> tuple[Piece | None, Piece | None]:
    """A piece in two: what its reader has already, and what is new; None for nothing.

    Args:
        piece: begins at `start`.
        have: what the reader has.
    """
    if have.ended:
        return piece, None
    num_tokens = max(have.num_tokens - start.num_tokens, 0)
    num_chars = max(have.num_chars - start.num_chars, 0)
    if num_tokens == num_chars == 0:
        return None, piece
    known = Piece(
        piece.index,
        piece.text[:num_chars],
        piece.token_ids[:num_tokens],
        piece.logprobs[:num_tokens],
        piece.offsets[:num_tokens],
    )
    new = Piece(
        piece.index,
        piece.text[num_chars:],
        piece.token_ids[num_tokens:],
        piece.logprobs[num_tokens:],
        piece.offsets[num_tokens:],
        piece.ending,
    )
    return known, new if new.text or new.token_ids or new.ending else None
