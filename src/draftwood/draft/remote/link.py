"""A thread that carries questions to another process, one at a time, and never holds up a round."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from draftwood.draft.remote.messages import Answer, Ask
from draftwood.kv.tiers.breaker import Breaker

Call = Callable[[Ask], Answer]
"""Asks and waits for the answer; raises if there is none. It may take long: a thread runs it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a question.

    Attributes:
        ask: the question.
        answer: None if it failed; what the other side has is then unknown.
        seconds: from question to answer.
    """

    ask: Ask
    answer: Answer | None
    seconds: float


class Link:
    """One question on its way at a time.

    After a failure nothing is sent for half a second, then longer: see `Breaker`.

    Args:
        call: asks the other side. The link's thread calls it, so it may also take the time to
            start the other side again.
        clock: seconds.
    """

    def __init__(self, call: Call, clock: Callable[[], float] = monotonic) -> None:
        self._call = call
        self._clock = clock
        self._breaker = Breaker("drafting in another process", clock)
        self._changed = threading.Condition()
        self._ask: Ask | None = None
        self._sent_s = 0.0
        self._reply: Reply | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a question is on its way, or its reply has not been taken."""
        return self._ask is not None or self._reply is not None

    @property
    def waited_s(self) -> float:
        """Seconds since the question on its way was sent; 0 if there is none."""
        return self._clock() - self._sent_s if self._ask is not None else 0.0

    @property
    def num_failures(self) -> int:
        """Questions that had no answer."""
        return self._breaker.num_failures

    def send(self, ask: Ask) -> bool:
        """Sends a question; returns False, and does not, if one is on its way or all is broken."""
        with self._changed:
            if self.busy or self._closed or not self._breaker.allows:
                return False
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="draftwood-draft-link", daemon=True
                )
                self._thread.start()
            self._ask, self._sent_s = ask, self._clock()
            self._changed.notify_all()
            return True

    def take(self, patience_s: float = 0.0) -> Reply | None:
        """The reply to the question, if it is there within `patience_s` seconds."""
        with self._changed:
            if patience_s > 0 and self._ask is not None:
                self._changed.wait_for(lambda: self._reply is not None, patience_s)
            reply, self._reply = self._reply, None
            return reply

    def close(self) -> None:
        """Sends nothing more. A question on its way is not waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ask is not None or self._closed)
                if self._closed:
                    return
                ask = self._ask
            assert ask is not None
            answer = self._asked(ask)
            with self._changed:
                self._reply = Reply(ask, answer, self._clock() - self._sent_s)
                self._ask = None
                self._changed.notify_all()

    def _asked(self, ask: Ask) -> Answer | None:
        try:
            answer = self._call(ask)
        except Exception as error:
            self._breaker.failed(f"{type(error).__name__}: {error}".splitlines()[0])
            return None
        self._breaker.succeeded()
        return answer
