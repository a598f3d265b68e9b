"""Requests from start to end, with Ctrl-C between two rounds and never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from draftwood.cli.job import names_of, resume_job
from draftwood.errors import DraftwoodError

if TYPE_CHECKING:
    from draftwood.engine.checkpoint import CheckpointWriter
    from draftwood.engine.engine import Engine
    from draftwood.engine.sequence import Sequence as EngineSequence
    from draftwood.outputs import RequestOutput
    from draftwood.sampling import SamplingParams

OnText = Callable[[int, str, bool], None]


class Interrupt:
    """While entered, Ctrl-C sets `asked`; a second one raises KeyboardInterrupt as ever.

    Args:
        at_once: raise at the first one too.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.asked = False
        self._at_once = at_once
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if again or self._at_once:
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C inside ends in KeyboardInterrupt, whatever the code it hits makes of it.

    Large packages swallow the exception while they are imported, and fail later in other ways.
    """
    with Interrupt(at_once=True) as interrupt:
        try:
            yield
        except Exception as error:
            if interrupt.asked:
                raise KeyboardInterrupt from error
            raise
    if interrupt.asked:
        raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how it shall be answered.

    Attributes:
        prompt_ids: token ids, as the model sees them.
        params: how tokens are chosen and when to stop.
        id: what the user calls it.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """What came of requests; `interrupted` says whether Ctrl-C ended them."""

    outputs: list[RequestOutput]
    interrupted: bool


def complete(
    engine: Engine,
    requests: Sequence[Request],
    on_text: OnText | None = None,
    checkpoints: CheckpointWriter | None = None,
) -> Run:
    """Runs requests in one packed batch.

    Args:
        engine: who runs them.
        requests: all are queued or, when one is wrong, none.
        on_text: `on_text(index, text, ended)` is told each new piece, and once that it ended.
        checkpoints: saves them, and has what an earlier run of the same requests left behind.
            What Ctrl-C ends stays there, and so do outputs until `job.end_job`.

    Raises:
        PromptError, ConfigError: a request cannot be served.
    """
    from draftwood.outputs import make_output

    seqs: list[EngineSequence] = []
    with Interrupt() as interrupt:
        try:
            _queue(engine, requests, checkpoints, seqs)
            news = _News(seqs, on_text or _unheard)
            while not interrupt.asked and not all(seq.finished for seq in seqs):
                engine.step()
                news.tell()
        finally:
            cut = not all(seq.finished for seq in seqs)
            if checkpoints is not None:
                checkpoints.suspend(seqs if cut else ())
            for seq in seqs:
                engine.abort(seq)
        news.tell()
    return Run([make_output(seq) for seq in seqs], cut)


def _queue(
    engine: Engine,
    requests: Sequence[Request],
    checkpoints: CheckpointWriter | None,
    seqs: list[EngineSequence],
) -> None:
    """Appends the sequences of all requests to `seqs`; those of an earlier run go on."""
    names = [None] * len(requests) if checkpoints is None else names_of(requests)
    begun = {} if checkpoints is None else resume_job(checkpoints, names_of(requests))
    for i, (request, name) in enumerate(zip(requests, names, strict=True)):
        seq = None if name is None else begun.get(name)
        index = i if len(requests) > 1 else None
        seqs.append(seq or _add(engine, request, index, name))
    if checkpoints is not None:
        checkpoints.save()


def _unheard(index: int, text: str, ended: bool) -> None:
    pass


class _News:
    """Tells what each sequence has to show beyond what it has shown."""

    def __init__(self, seqs: Sequence[EngineSequence], on_text: OnText) -> None:
        self._open = {i: (seq, 0) for i, seq in enumerate(seqs)}
        self._on_text = on_text

    def tell(self) -> None:
        """Passes on what is new."""
        for i, (seq, num_shown) in list(self._open.items()):
            text = seq.visible_text()
            if seq.finished:
                del self._open[i]
            else:
                self._open[i] = (seq, len(text))
            if len(text) > num_shown or seq.finished:
                self._on_text(i, text[num_shown:], seq.finished)


def with_room(
    engine: Engine, num_prompt: int, params: SamplingParams, default: int
) -> SamplingParams:
    """`params`, with `max_tokens` when the user gave none: `default`, or what the context holds."""
    if params.max_tokens is not None:
        return params
    return params.but(max_tokens=max(min(default, engine.room(num_prompt, params)), 1))


def _add(engine: Engine, request: Request, index: int | None, name: str | None) -> EngineSequence:
    try:
        return engine.add(request.prompt_ids, request.params, name)
    except DraftwoodError as error:
        if index is None:
            raise
        raise type(error)(f"prompt {index + 1}: {error}") from error
