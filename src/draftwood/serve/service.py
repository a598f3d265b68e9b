"""What the endpoints share: the model, its names, the engine's thread, the tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import uuid4

from draftwood.models.base import ModelSpec
from draftwood.sampling import SamplingParams
from draftwood.serve.errors import ApiError
from draftwood.serve.generation import Generation, News, Outbox
from draftwood.serve.requests import Sampling
from draftwood.serve.stream import PING_S
from draftwood.serve.token_text import TokenTexts
from draftwood.text import Tokenizer

if TYPE_CHECKING:
    from draftwood.serve.held import Held
    from draftwood.serve.recovery import Recovery
    from draftwood.serve.responder import Responder

ENGINE_PREFIX = "serve-"  # of ids in the engine, by which a server knows its own in a checkpoint
_T = TypeVar("_T")


class Specified(Protocol):
    """A model, of which only the facts are wanted."""

    @property
    def spec(self) -> ModelSpec:
        """Facts about it."""


class Served(Protocol):
    """What the endpoints need of an `LLM`; the engine itself may be in another process."""

    @property
    def model(self) -> Specified:
        """The target."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the target."""


class Backend(Protocol):
    """What generates: the engine's thread (`Worker`), or many of them elsewhere."""

    @property
    def alive(self) -> bool:
        """Whether requests can be answered."""

    def submit(self, generations: Sequence[Generation]) -> None:
        """Takes all of a request's prompts, or none; see `Worker.submit`."""

    def cancel(self, generations: Iterable[Generation]) -> None:
        """Ends generations that nobody waits for."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Attributes:
        name: whose turn it takes in the queue: the API key it used, else the address.
        request_id: shown in logs and in the response's headers.
        owner: who may ask for the answer again; see `ApiKeys.owner`.
        chose_id: whether it chose the id, and so can come back with it.
        held: the request as it outlives this connection; None where none does.
    """

    name: str
    request_id: str
    owner: str = ""
    chose_id: bool = False
    held: Held | None = None


@dataclass(slots=True)
class Service:
    """A model being served.

    Attributes:
        llm: the model. Its engine belongs to the worker's thread.
        worker: that thread.
        names: what clients may call the model; the first is what it calls itself.
        timeout_s: the most a request may take, unless it says so itself; None for no limit.
        recovery: keeps requests for clients that come back; None where nothing is kept.
    """

    llm: Served
    worker: Backend
    names: tuple[str, ...]
    timeout_s: float | None = None
    recovery: Recovery | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    texts: TokenTexts = field(init=False)
    # One thread: tokenizers are not made to be used by several at once.
    _text_thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "draftwood-text")
    )

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.llm.tokenizer)

    async def off_loop(self, work: Callable[[], _T]) -> _T:
        """Runs work with the tokenizer where it does not hold up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, work)

    def close(self) -> None:
        """Ends the tokenizer's thread."""
        self._text_thread.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> str:
        """The name to answer under.

        Raises:
            ApiError: this model is not served here.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404,
                f"The model `{name}` does not exist: this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def open(
        self,
        body: Sampling,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller,
    ) -> Answer:
        """Queues a request's prompts; `Answer.accepted` says whether they are sound.

        Raises:
            ApiError: there is no room for it.
        """
        outbox = Outbox(asyncio.get_running_loop(), len(prompts))
        seconds = body.timeout if body.timeout is not None else self.timeout_s
        generations = [
            Generation(
                id=f"{ENGINE_PREFIX}{uuid4().hex}-{place}",
                prompt_ids=prompt_ids,
                params=params,
                outbox=outbox,
                first_index=place * params.n,
                priority=body.priority or 0,
                client=caller.name,
                deadline=None if seconds is None else time.monotonic() + seconds,
                wants_rounds=bool(body.rounds and body.stream),
                on_end=caller.held.ended if caller.held is not None else None,
            )
            for place, prompt_ids in enumerate(prompts)
        ]
        self.worker.submit(generations)
        return Answer(self.worker, generations, outbox, caller.held)


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that is on its way.

    Attributes:
        held: what is kept of it when its reader has gone; None for nothing.
    """

    worker: Backend
    generations: list[Generation]
    outbox: Outbox
    held: Held | None = None

    @property
    def num_outputs(self) -> int:
        """How many texts it has."""
        return sum(one.params.n for one in self.generations)

    async def accepted(self) -> None:
        """Waits until the engine has found it sound; then it waits, or runs.

        Raises:
            Exception: what is wrong with it.
        """
        try:
            await self.outbox.accepted()
        except BaseException:
            self.cancel()
            raise

    async def news(self) -> AsyncGenerator[News]:
        """What is new, until all texts have ended; empty when nothing was for some seconds.

        However it is left, what still runs is cancelled, unless it is kept for somebody who comes
        back. What is kept is on the disk before anything of it is told.

        Raises:
            Exception: what ended the request before its end.
        """
        left = self.num_outputs
        try:
            if self.held is not None:
                await self.held.saved()
            while left:
                news = await self.outbox.take(PING_S)
                left -= sum(piece.ending is not None for piece in news.pieces)
                yield news
        finally:
            if self.held is None:
                self.cancel()

    def cancel(self, *, complete: bool = False) -> None:
        """Ends what has not ended, or leaves it to be asked for again.

        Args:
            complete: whether its reader has all of it.
        """
        if self.held is None or not self.held.left(self.outbox, complete=complete):
            self.worker.cancel(self.generations)


def fingerprint(llm: Served) -> str:
    """OpenAI's `system_fingerprint`: changes when the same seed may give another text."""
    return f"fp_{llm.model.spec.kv_identity[:10]}"


# Queues a request whose body has been read, and says who writes its response.
Start = Callable[[Service, Any, Caller], "Coroutine[Any, Any, Responder]"]
