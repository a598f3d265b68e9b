"""What drafters remember beyond a sequence, by tenant and within a budget.

Requests with one `cache_salt` are one tenant's. What one tenant was told never shapes what is
drafted for another: whoever watches how fast answers come learns nothing of other people's.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import OrderedDict
from dataclasses import dataclass

from draftwood.draft.past import PastAnswers
from draftwood.draft.recycling_table import RecyclingTable

DEFAULT_BYTES = 64 << 20
_TABLE_SHARE = 0.5  # of a tenant's bytes; the rest is for past answers
_SAVED_TENANTS = 8
_SAVED_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class TenantMemory:
    """One tenant's: what the target ranked highest where, and what it answered."""

    table: RecyclingTable
    past: PastAnswers

    @classmethod
    def of_size(cls, max_bytes: int) -> TenantMemory:
        """An empty one that takes no more than so many bytes."""
        table_bytes = int(_TABLE_SHARE * max_bytes)
        return cls(RecyclingTable.of_size(table_bytes), PastAnswers(max_bytes - table_bytes))

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return self.table.num_bytes + self.past.num_bytes


class DraftMemory:
    """The memories of all tenants; of the least recently used ones nothing is left.

    Args:
        max_bytes: for all of them. One alone may have half of it, so that two always fit.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[str, TenantMemory] = OrderedDict()

    def __len__(self) -> int:
        """Tenants known."""
        return len(self._tenants)

    @property
    def num_bytes(self) -> int:
        """About what all take."""
        return sum(memory.num_bytes for memory in self._tenants.values())

    def limit(self, max_bytes: int) -> None:
        """Sets the budget anew, before anything is remembered."""
        self._max_bytes = max_bytes

    def of(self, tenant: str | None) -> TenantMemory:
        """A tenant's memory, which counts as used now."""
        name = tenant or ""
        if name not in self._tenants:
            self._tenants[name] = TenantMemory.of_size(self._max_bytes // 2)
        self._tenants.move_to_end(name)
        return self._tenants[name]

    def trim(self) -> None:
        """Forgets tenants, the least recently used first, until the rest fits the budget."""
        while len(self._tenants) > 1 and self.num_bytes > self._max_bytes:
            self._tenants.popitem(last=False)

    def state(self) -> bytes:
        """The newest part, for a checkpoint."""
        latest = list(self._tenants.items())[-_SAVED_TENANTS:]
        rows = [
            {
                "tenant": name,
                "table": b64encode(memory.table.state()).decode(),
                "answers": memory.past.latest(_SAVED_TOKENS),
            }
            for name, memory in latest
        ]
        return json.dumps(rows).encode()

    def restore(self, state: bytes) -> None:
        """Learns what `state` gave.

        Raises:
            ValueError: it is something else.
        """
        rows = json.loads(state)
        if not isinstance(rows, list):
            raise ValueError("the state is no list of tenants")
        for row in rows:
            try:
                name, table, answers = row["tenant"], b64decode(row["table"]), row["answers"]
            except (TypeError, KeyError) as error:
                raise ValueError(f"the state is of something else: {error!r}") from error
            memory = self.of(name)
            memory.table.restore(table)
            memory.past.restore(answers)
