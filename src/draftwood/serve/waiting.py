"""Who is next: by priority, then whose client has least running, then first come, first served."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping

from draftwood.serve.generation import Generation


class WaitingQueue:
    """Generations that wait for a place in the engine.

    Within a priority the next place is for the client that has fewest, and of equals the clients
    take turns: one that sends a thousand requests does not shut out one that sends a single one.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str, deque[Generation]]] = {}

    def __bool__(self) -> bool:
        return bool(self._levels)

    def __len__(self) -> int:
        return sum(len(line) for level in self._levels.values() for line in level.values())

    def push(self, generation: Generation) -> None:
        """Takes a place at the end of its client's line."""
        level = self._levels.setdefault(generation.priority, OrderedDict())
        level.setdefault(generation.client, deque()).append(generation)

    @property
    def priority(self) -> int:
        """Of who is next; somebody must wait."""
        return min(self._levels)

    def pop(self, places: Mapping[str, int] | None = None) -> Generation:
        """Takes out who is next; its client goes behind the others of this priority.

        Args:
            places: how many texts of each client run; who is missing has none.
        """
        priority, held = self.priority, places or {}
        level = self._levels[priority]
        client = min(level, key=lambda name: held.get(name, 0))  # of equals the first
        line = level.pop(client)
        generation = line.popleft()
        if line:
            level[client] = line
        elif not level:
            del self._levels[priority]
        return generation

    def remove(self, generation: Generation) -> bool:
        """Takes out one; False when it is not here."""
        level = self._levels.get(generation.priority, OrderedDict())
        line = level.get(generation.client, deque())
        if generation not in line:
            return False
        line.remove(generation)
        if not line:
            del level[generation.client]
        if not level:
            del self._levels[generation.priority]
        return True

    def all(self) -> list[Generation]:
        """Everyone, in no particular order."""
        return [one for level in self._levels.values() for line in level.values() for one in line]
