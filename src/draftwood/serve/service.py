"""What the endpoints share: the model, its names, the engine's thread, the tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar
from uuid import uuid4

from draftwood.models.base import ModelSpec
from draftwood.sampling import SamplingParams
from draftwood.serve.errors import ApiError
from draftwood.serve.generation import Generation, News, Outbox
from draftwood.serve.requests import Sampling
from draftwood.serve.stream import PING_S
from draftwood.serve.token_text import TokenTexts
from draftwood.text import Tokenizer

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
    """

    name: str
    request_id: str


@dataclass(slots=True)
class Service:
    """A model being served.

    Attributes:
        llm: the model. Its engine belongs to the worker's thread.
        worker: that thread.
        names: what clients may call the model; the first is what it calls itself.
        timeout_s: the most a request may take, unless it says so itself; None for no limit.
    """

    llm: Served
    worker: Backend
    names: tuple[str, ...]
    timeout_s: float | None = None
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
                id=f"{uuid4().hex}-{place}",
                prompt_ids=prompt_ids,
                params=params,
                outbox=outbox,
                first_index=place * params.n,
                priority=body.priority or 0,
                client=caller.name,
                deadline=None if seconds is None else time.monotonic() + seconds,
                wants_rounds=bool(body.rounds and body.stream),
            )
            for place, prompt_ids in enumerate(prompts)
        ]
        self.worker.submit(generations)
        return Answer(self.worker, generations, outbox)


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that is on its way."""

    worker: Backend
    generations: list[Generation]
    outbox: Outbox

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

        However it is left, what still runs is cancelled.

        Raises:
            Exception: what ended the request before its end.
        """
        left = self.num_outputs
        try:
            while left:
                news = await self.outbox.take(PING_S)
                left -= sum(piece.ending is not None for piece in news.pieces)
                yield news
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends what has not ended."""
        self.worker.cancel(self.generations)


def fingerprint(llm: Served) -> str:
    """OpenAI's `system_fingerprint`: changes when the same seed may give another text."""
    return f"fp_{llm.model.spec.kv_identity[:10]}"
