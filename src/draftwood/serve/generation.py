"""One prompt on its way through the server, and how its text gets from thread to thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwood.engine.sequence import Sequence as EngineSequence
from draftwood.sampling import SamplingParams, TokenLogprobs

_MAX_ROUNDS = 512  # what a reader that is far behind is shown of the rounds it missed


@dataclass(frozen=True, slots=True)
class Ending:
    """How one output ended, and what it took.

    Attributes:
        reason: "stop", "length" or "abort".
        stop: the stop string or token id that ended it, if one did.
        num_prompt_tokens, num_tokens, num_cached_tokens: of prompt, output, and of the prompt what
            needed no computing.
        speculation: vLLM's `metrics.speculative_decoding`.
        tokens_per_s: after the first token; None for texts of one token.
        plain_tokens_per_s: what plain decoding alone on this machine would give, by the measured
            cost of a forward; None where that was not measured.
    """

    reason: str
    stop: str | int | None
    num_prompt_tokens: int
    num_tokens: int
    num_cached_tokens: int
    speculation: dict[str, Any]
    tokens_per_s: float | None
    plain_tokens_per_s: float | None


@dataclass(slots=True)
class Piece:
    """What is new of one output.

    Attributes:
        index: which of the request's outputs.
        text, token_ids: that can be shown.
        logprobs: one per token, if wanted.
        offsets: where each token's text begins in the output.
        ending: in the last piece only.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    ending: Ending | None = None

    def add(self, later: Piece) -> None:
        """Appends what came later of the same output."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.offsets += later.offsets
        self.ending = later.ending


@dataclass(frozen=True, slots=True)
class News:
    """What a reader takes: at most one piece for each output, and the rounds that led there."""

    pieces: list[Piece]
    rounds: list[dict[str, Any]]


class Outbox:
    """What a request's reader has not taken yet, of all its prompts.

    The engine's thread puts and never waits. A reader that is behind finds everything new in one
    piece for each output, so what lies here never exceeds the text itself.

    Args:
        loop: of the reader.
        num_prompts: how many generations put here.

    Attributes:
        prompt_logprobs: by the index of a prompt's first output; there before its first piece.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, num_prompts: int = 1) -> None:
        self.loop = loop
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._lock = threading.Lock()
        self._event = asyncio.Event()
        self._num_unknown = num_prompts
        self._pieces: dict[int, Piece] = {}
        self._rounds: deque[dict[str, Any]] = deque(maxlen=_MAX_ROUNDS)
        self._error: Exception | None = None

    def accept(self) -> None:
        """A prompt is sound. On the engine's thread; `wake` must follow, as after all puts."""
        self._num_unknown -= 1

    def put(self, piece: Piece) -> None:
        """Adds what is new."""
        with self._lock:
            known = self._pieces.setdefault(piece.index, piece)
            if known is not piece:
                known.add(piece)

    def put_round(self, record: dict[str, Any]) -> None:
        """Adds a round for the page that shows them."""
        with self._lock:
            self._rounds.append(record)

    def fail(self, error: Exception) -> None:
        """Nothing more will come. What came before can still be taken."""
        self._error = error

    def wake(self) -> None:
        """Lets the reader look. On the reader's loop."""
        self._event.set()

    async def accepted(self) -> None:
        """Waits until all of the request is known to be sound.

        Raises:
            Exception: what is wrong with it.
        """
        while self._num_unknown > 0:
            if self._error is not None:
                raise self._error
            await self._event.wait()
            self._event.clear()

    async def take(self, patience_s: float | None = None) -> News:
        """Waits for something new; finds nothing when `patience_s` seconds have passed.

        Raises:
            Exception: what ended the request before its end.
        """
        try:
            async with asyncio.timeout(patience_s):
                while not self._pieces and self._error is None:
                    await self._event.wait()
                    self._event.clear()
        except TimeoutError:
            return News([], [])
        with self._lock:
            pieces, self._pieces = list(self._pieces.values()), {}
            rounds, self._rounds = list(self._rounds), deque(maxlen=_MAX_ROUNDS)
        if not pieces and self._error is not None:
            raise self._error
        return News(pieces, rounds)


@dataclass(slots=True, eq=False)
class Generation:
    """A prompt, what to make of it, and who waits for it.

    Attributes:
        id: of this prompt in the engine; outputs behind the first append a number.
        outbox: where the text goes.
        first_index: of its outputs among those of the request.
        priority: lower goes first.
        client: whose turn it takes in the queue.
        deadline: on the monotonic clock; None for none.
        wants_rounds: whether its rounds are recorded.
        on_end: told when it has ended, with the error if that was its end; on the engine's thread.
        seqs: one per output, once the engine's thread has made them. That thread's alone.
        error: what ended it before its end.
        num_failures: of the engine, that it went on after.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    outbox: Outbox
    first_index: int = 0
    priority: int = 0
    client: str = ""
    deadline: float | None = None
    wants_rounds: bool = False
    on_end: Callable[[Generation, Exception | None], None] | None = None
    seqs: list[EngineSequence] = field(default_factory=list)
    tellers: list[Teller] = field(default_factory=list)
    ended: bool = False
    error: Exception | None = None
    num_failures: int = 0

    @property
    def names(self) -> list[str]:
        """Of its sequences in the engine."""
        return [self.id, *(f"{self.id}-{i}" for i in range(1, self.params.n))]

    def listen(self) -> None:
        """Makes tellers that begin at the beginning."""
        self.tellers = [Teller(i, seq) for i, seq in enumerate(self.seqs, start=self.first_index)]

    def put(self, teller: Teller, piece: Piece) -> None:
        """Passes on what a teller has found."""
        if teller.seq.prompt_logprobs:
            self.outbox.prompt_logprobs[piece.index] = teller.seq.prompt_logprobs
        self.outbox.put(piece)


@dataclass(slots=True, eq=False)
class Teller:
    """Tells what is new of one sequence, each time it is asked."""

    index: int
    seq: EngineSequence
    num_chars: int = 0
    num_tokens: int = 0
    done: bool = False

    def news(self) -> Piece | None:
        """What can be shown and was not yet; None for nothing. The caller adds the ending."""
        seq = self.seq
        num_chars = len(seq.detokenizer.text) if seq.finished else seq.detokenizer.num_safe
        num_tokens = seq.num_visible
        if num_chars == self.num_chars and num_tokens == self.num_tokens and not seq.finished:
            return None
        start = seq.num_prompt_tokens
        piece = Piece(
            self.index,
            seq.detokenizer.text[self.num_chars : num_chars],
            seq.tokens[start + self.num_tokens : start + num_tokens],
            seq.logprobs[self.num_tokens : num_tokens],
            seq.detokenizer.offsets[self.num_tokens : num_tokens],
        )
        self.num_chars, self.num_tokens = num_chars, num_tokens
        return piece
