"""Leaves a store alone for a while after it failed, and says so once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock
from time import monotonic

_log = logging.getLogger("draftwood")

_FIRST_S = 0.5
_MOST_S = 30.0
_WARN_AGAIN_S = 60.0


class Breaker:
    """Whether a store may be asked.

    After a failure it may not for half a second, twice as long after each further one up to half
    a minute; the first success ends that. An outage is warned about once, when it begins.

    Args:
        what: for the warning: "reading KV from disk".
        clock: seconds, for tests.
    """

    def __init__(self, what: str, clock: Callable[[], float] = monotonic) -> None:
        self._what = what
        self._clock = clock
        self._retry_s = float("-inf")
        self._pause_s = 0.0
        self._quiet_until_s = float("-inf")
        self.num_failures = 0
        self._lock = Lock()  # readers may fail at the same moment, and one of them warns

    @property
    def allows(self) -> bool:
        """Whether the store may be asked now."""
        return self._clock() >= self._retry_s

    def failed(self, reason: object) -> None:
        """The store did not do what it was asked to."""
        now = self._clock()
        with self._lock:
            self.num_failures += 1
            begins = self._pause_s == 0.0 and now >= self._quiet_until_s
            self._quiet_until_s = now + _WARN_AGAIN_S  # one that comes and goes is one outage
            self._pause_s = min(max(2 * self._pause_s, _FIRST_S), _MOST_S)
            self._retry_s = now + self._pause_s
        if begins:
            _log.warning("%s does not work and is left out for now: %s", self._what, reason)

    def succeeded(self) -> None:
        """The store did what it was asked to."""
        if self._pause_s:
            _log.info("%s works again", self._what)
        self._pause_s = 0.0
