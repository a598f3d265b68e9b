"""From pieces of text to a response, whole or as a stream; what chat and text have in common."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from uuid import uuid4

from draftwood.sampling import TokenLogprobs
from draftwood.serve.formats import Json, metrics_of, usage, usage_of
from draftwood.serve.generation import Ending, Generation, News, Piece
from draftwood.serve.replay import Place, Position, Tail, cut
from draftwood.serve.requests import Sampling
from draftwood.serve.service import Answer, Service, fingerprint
from draftwood.serve.stream import DONE, PING, event


class Responder:
    """Writes the response to one request.

    A subclass says what its objects are called and how a choice looks, whole and in pieces.

    Args:
        service: the model.
        body: the request.
        answer: what the engine makes of it.

    Attributes:
        streams: whether the client takes it piece by piece.
    """

    prefix = "resp"
    kind = "response"
    chunk_kind = "response"

    def __init__(self, service: Service, body: Sampling, answer: Answer) -> None:
        self._answer = answer
        self._n = body.n or 1
        self._texts = service.texts
        self._endings: dict[int, Ending] = {}
        self._place = Position.begin(answer.num_outputs)  # how far it has been read here
        self._have = self._place  # how much of it the reader has
        self._complete = False
        self._num_told = 0
        self._options = body.stream_options
        self.streams = bool(body.stream)
        shows_all = body.skip_special_tokens is False
        self._hidden = frozenset() if shows_all else service.llm.tokenizer.special_ids
        held = answer.held
        self._head: Json = {
            "id": (held and held.response_id) or f"{self.prefix}-{uuid4().hex}",
            "object": self.kind,
            "created": (held and held.created) or int(time.time()),
            "model": service.check_model(body.model),
            "system_fingerprint": fingerprint(service.llm),
        }

    @property
    def id(self) -> str:
        """Of the response."""
        return str(self._head["id"])

    @property
    def model(self) -> str:
        """The name that the model answers under."""
        return str(self._head["model"])

    @property
    def generations(self) -> Sequence[Generation]:
        """Its prompts in the engine; there is one at least."""
        return self._answer.generations

    @property
    def created(self) -> int:
        """When it began, in seconds since 1970."""
        return int(self._head["created"])

    @property
    def answer(self) -> Answer:
        """What the engine makes of the request."""
        return self._answer

    def skip(self, have: Position) -> None:
        """Begins the events behind what the reader has already."""
        self._have = have

    @property
    def has_all(self) -> bool:
        """Whether its reader has had even the last event."""
        return self._have.tail is Tail.ALL

    def facts(self) -> Json:
        """What the log says of it."""
        return {
            "prompt_tokens": sum(len(one.prompt_ids) for one in self._answer.generations),
            "completion_tokens": self._num_told,
            "finish_reasons": [one.reason for one in self.endings],
        }

    def close(self) -> None:
        """Ends what has not ended; see `Answer.cancel`."""
        self._answer.cancel(complete=self._complete)

    @property
    def endings(self) -> list[Ending]:
        """Of the outputs that have ended, in their order."""
        return [self._endings[index] for index in sorted(self._endings)]

    async def whole(self) -> Json:
        """The response, when all of it is there.

        Raises:
            Exception: what ended the request before its end.
        """
        async for news in self._answer.news():
            for piece in news.pieces:
                self._note(piece)
                self.take(piece)
        self._complete = True
        return self._head | {
            "choices": [self.choice(index) for index in range(self._answer.num_outputs)],
            "usage": usage_of(self.endings, self._n),
            "metrics": metrics_of(self.endings),
        }

    async def events(self) -> AsyncGenerator[bytes]:
        """The response as server-sent events.

        Raises:
            Exception: what ended the request before its end.
        """
        options = self._options
        counted = bool(options and options.include_usage)
        always = counted and bool(options and options.continuous_usage_stats)
        head = self._head | {"object": self.chunk_kind} | ({"usage": None} if counted else {})
        stream = self._answer.news()
        try:
            async for news in stream:
                data = b"".join(self._events(head, news, always))
                yield data or PING
        finally:
            await stream.aclose()
        last = b""
        if counted and self._have.tail < Tail.USAGE:
            counts = {"usage": usage_of(self.endings, self._n)}
            chunk = head | {"choices": [], "metrics": metrics_of(self.endings)} | counts
            last = self._id(Tail.USAGE) + event(chunk)
        yield last + self._id(Tail.ALL) + DONE
        self._complete = True

    def take(self, piece: Piece) -> None:
        """Keeps a piece for the whole."""
        raise NotImplementedError

    def choice(self, index: int) -> Json:
        """An output in the whole response."""
        raise NotImplementedError

    def delta(self, piece: Piece) -> Json:
        """A piece as a choice of a chunk."""
        raise NotImplementedError

    def _events(self, head: Json, news: News, always: bool) -> Iterator[bytes]:
        for piece in news.pieces:
            start, have = (p.places[piece.index] for p in (self._place, self._have))
            known, new = cut(piece, start, have)
            if known is not None:
                self._advance(known)
                self.delta(known)  # for what it remembers: the reader has it
            if new is not None:
                self._advance(new)
                yield self._id() + self._event(head, new, news, always)

    def _advance(self, piece: Piece) -> None:
        self._note(piece)
        place: Place = self._place.places[piece.index]
        self._place = self._place.at(piece.index, place.behind(piece))

    def _id(self, tail: Tail = Tail.NOTHING) -> bytes:
        """The line with an event's id; nothing where nobody could come back with it."""
        if self._answer.held is None:
            return b""
        return b"id: %s\n" % str(replace(self._place, tail=tail)).encode()

    def _event(self, head: Json, piece: Piece, news: News, always: bool) -> bytes:
        chunk = head | {"choices": [self.delta(piece)]}
        if always:
            num_prompt = sum(len(one.prompt_ids) for one in self._answer.generations)
            chunk["usage"] = usage(num_prompt, self._num_told, 0)
        rounds = [record for record in news.rounds if record["index"] == piece.index]
        return event(chunk | {"draftwood": {"rounds": rounds}} if rounds else chunk)

    def _note(self, piece: Piece) -> None:
        self._num_told += len(piece.token_ids)
        if piece.ending is not None:
            self._endings[piece.index] = piece.ending

    def shown(self, piece: Piece) -> Sequence[TokenLogprobs]:
        """Log-probabilities of tokens that are text: an end token that is not shown has none."""
        kept = piece.logprobs
        if piece.ending and piece.ending.reason == "stop" and kept:
            return kept[:-1] if kept[-1].token in self._hidden else kept
        return kept
