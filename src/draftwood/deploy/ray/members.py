"""Who the replicas are: told by Serve's threads, heard by the front's."""

from __future__ import annotations

import threading
from collections.abc import Callable

Listener = Callable[[frozenset[str]], None]
"""Told the names of all replicas that run, whenever they change; on a thread of Serve's."""

_lock = threading.Lock()
_listeners: dict[str, list[Listener]] = {}
_members: dict[str, frozenset[str]] = {}


def listen(app: str, listener: Listener) -> Callable[[], None]:
    """Tells a listener the replicas of an application, now and when they change.

    Returns:
        What ends it.
    """
    with _lock:
        _listeners.setdefault(app, []).append(listener)
        known = _members.get(app)
    if known is not None:
        listener(known)

    def end() -> None:
        with _lock:
            _listeners[app].remove(listener)

    return end


def tell(app: str, names: frozenset[str]) -> None:
    """These are an application's replicas now."""
    with _lock:
        if _members.get(app) == names:
            return
        _members[app] = names
        listeners = list(_listeners.get(app, ()))
    for listener in listeners:
        listener(names)
