"""Which of many replicas gets a request: policy alone, without sockets, threads or clocks.

A replica that read the beginning of a prompt before has its KV and need not read it again; but if
everybody who shares that beginning goes there, it becomes the one that all wait for. So both are
counted in seconds until the first token, and the least wins:

    waiting work of the replica + tokens it would have to read x seconds per token

The longest cached prefix wins as long as its replica is not that much busier. When it is, the
request goes elsewhere, the prefix is then cached there too, and the load of a hot prefix spreads
over as many replicas as it needs. Nothing has to be tuned but the costs, which can be measured.

What a replica has cached is believed, not known: what was sent there, corrected by what it
reports. A wrong belief costs a recomputation and never a wrong text.

One call at a time, as on an event loop: nothing here locks. A choice among 1,000 replicas takes
tens of microseconds (`block_views`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from draftwood.errors import CapacityError, ConfigError
from draftwood.kv.chain import chained
from draftwood.serve.block_views import BlockViews

_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@dataclass(frozen=True, slots=True)
class Costs:
    """What waiting is made of, in seconds; measured where the replicas run.

    Attributes:
        prefill_s: to read one token of a prompt.
        running_s: what each request that runs beside a new one adds to its wait.
        slots: requests that a replica runs at once; more wait for one of them to end.
        turn_s: until one of them ends when all slots are taken: a request's time / slots.
    """

    prefill_s: float = 0.001
    running_s: float = 0.01
    slots: int = 8
    turn_s: float = 1.0

    def __post_init__(self) -> None:
        if min(self.prefill_s, self.running_s, self.turn_s) < 0:
            raise ConfigError(f"costs of routing must be 0 or more seconds: {self}")
        if self.slots < 1:
            raise ConfigError(f"slots must be at least 1, got {self.slots}")

    def wait(self, tokens: int, requests: int) -> float:
        """Seconds before a new request is read, behind `tokens` to read and `requests` there."""
        excess = max(0, requests + 1 - self.slots)
        running = min(requests, self.slots)
        return tokens * self.prefill_s + running * self.running_s + excess * self.turn_s


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a router needs of a prompt: the keys of its full blocks and its length in tokens."""

    keys: tuple[bytes, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Route:
    """A choice; nothing has changed until it is given to `Router.send`.

    Attributes:
        replica: the name of the replica.
        prompt: what was to be routed.
        cached_tokens: how many of its tokens the replica is believed to have.
        seconds: expected until the first token.
    """

    replica: str
    prompt: Prompt
    cached_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says of itself.

    Attributes:
        tokens: prompt tokens that it has yet to read, over all its requests.
        requests: requests that it has, running or waiting.
        published: keys of blocks that are cached now, a chain's beginning before its end.
        evicted: keys of blocks that no longer are.
        whole: `published` is everything it has; what else was believed is forgotten.
    """

    tokens: int
    requests: int
    published: Sequence[bytes] = ()
    evicted: Sequence[bytes] = ()
    whole: bool = False


@dataclass(slots=True)
class _Replica:
    """A replica's load: what this router sent it, and what it reported beyond that."""

    name: str
    draining: bool = False
    tokens: int = 0
    requests: int = 0
    other_tokens: int = 0
    other_requests: int = 0

    @property
    def load(self) -> tuple[int, int]:
        """Tokens to read and requests, of this router and of others."""
        return self.tokens + self.other_tokens, self.requests + self.other_requests


@dataclass(slots=True)
class _Sent:
    """A request on its way: where, and what is left to read there."""

    slot: int
    replica: _Replica
    tokens: int


class Router:
    """Prefers the replica with the longest cached prefix, weighed against its waiting work.

    Use: `prompt`, `choose`, `send`, then `prefilled` at the first token and `done` at the end,
    whatever the end was. Replicas come and go by `add`, `drain` and `remove`.

    Args:
        costs: what waiting is made of.
        block_size: tokens in a block, as replicas have it.
        identity: the salt of the replicas' `PrefixIndex`; only then do reported keys fit.
        max_blocks: how many blocks of a replica are remembered; what it can cache is enough.
    """

    def __init__(
        self,
        costs: Costs | None = None,
        block_size: int = 16,
        identity: bytes = b"",
        max_blocks: int = 4096,
    ) -> None:
        if block_size < 1 or max_blocks < 1:
            raise ConfigError(
                f"block_size and max_blocks must be at least 1, got {block_size}, {max_blocks}"
            )
        self._costs = costs or Costs()
        self._block_size = block_size
        self._identity = identity
        self._views = BlockViews(max_blocks)
        self._slots: dict[str, int] = {}
        self._replicas: list[_Replica | None] = []
        self._wait = np.zeros(0)  # [slots] seconds; infinite for whom nothing may be sent to
        self._busy = np.zeros(0, np.int64)  # [slots] requests
        self._lots = np.zeros(0, np.uint64)  # [slots] what decides between equals
        self._sent: dict[int, _Sent] = {}
        self._num_sent = 0

    # Replicas that come and go.

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names of the replicas that may be sent to, in the order in which they came."""
        return tuple(name for name, slot in self._slots.items() if self._wait[slot] < np.inf)

    def add(self, name: str) -> None:
        """A replica is ready: a new one with nothing cached, or one that had begun to drain."""
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = self._free_slot()
            self._replicas[slot] = _Replica(name)
            digest = blake2b(name.encode(), digest_size=8).digest()
            self._lots[slot] = int.from_bytes(digest, "little")
        self._known(slot).draining = False
        self._weigh(slot)

    def drain(self, name: str) -> None:
        """Sends a replica nothing more; what it has it may end. Unknown names do nothing."""
        slot = self._slots.get(name)
        if slot is not None:
            self._known(slot).draining = True
            self._weigh(slot)

    def remove(self, name: str) -> None:
        """Forgets a replica that is dead or gone, its blocks and its load."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._views.clear(slot)
            self._replicas[slot] = None
            self._wait[slot] = np.inf

    def report(self, name: str, report: Report) -> None:
        """Corrects what is believed of a replica; reports of unknown ones are ignored."""
        slot = self._slots.get(name)
        if slot is None:
            return
        if report.whole:
            self._views.clear(slot)
        self._views.drop(slot, report.evicted)
        self._views.touch(slot, report.published)
        replica = self._known(slot)
        # Other routers send there too. Only what is beyond our own is kept, so that what we send
        # and end after the report counts at once.
        replica.other_tokens = max(0, report.tokens - replica.tokens)
        replica.other_requests = max(0, report.requests - replica.requests)
        self._weigh(slot)

    def requests(self, name: str) -> int:
        """How many requests a replica is believed to have; 0 for an unknown one."""
        slot = self._slots.get(name)
        return 0 if slot is None else self._known(slot).load[1]

    # The life of a request.

    def prompt(self, tokens: Sequence[int], salt: bytes = b"") -> Prompt:
        """Keys of a prompt's full blocks, under a tenant's `salt`."""
        keys = chained(tokens, self._block_size, self._identity, salt)
        return Prompt(tuple(key for key, _ in keys), len(tokens))

    def choose(self, prompt: Prompt, avoid: Collection[str] = ()) -> Route:
        """Finds the replica that would give the first token soonest. Changes nothing.

        Args:
            prompt: as `prompt` gives it.
            avoid: replicas that just failed this request: taken only when there is no other.

        Raises:
            CapacityError: no replica may be sent to.
        """
        cached = self._cached_tokens(prompt)
        seconds = self._wait + (prompt.num_tokens - cached) * self._costs.prefill_s
        slot = self._best(self._score(prompt, seconds), prompt, avoid)
        return Route(self._known(slot).name, prompt, int(cached[slot]), float(seconds[slot]))

    def send(self, route: Route) -> int:
        """Counts a request as on its way; returns its ticket for `prefilled` and `done`.

        Raises:
            CapacityError: the replica has gone since: choose again.
        """
        slot = self._slots.get(route.replica)
        if slot is None:
            raise CapacityError(f"replica {route.replica} has gone: choose another")
        replica = self._known(slot)
        tokens = route.prompt.num_tokens - route.cached_tokens
        replica.tokens += tokens
        replica.requests += 1
        self._num_sent += 1
        self._sent[self._num_sent] = _Sent(slot, replica, tokens)
        self._views.touch(slot, route.prompt.keys)
        self._weigh(slot)
        return self._num_sent

    def prefilled(self, ticket: int) -> None:
        """The first token came: there is nothing left to read. The second time does nothing."""
        sent = self._sent.get(ticket)
        if sent is not None:
            sent.replica.tokens -= sent.tokens
            sent.tokens = 0
            self._weigh(sent.slot, sent.replica)

    def done(self, ticket: int, keys: Sequence[bytes] = ()) -> None:
        """A request ended, or failed. The second time does nothing.

        Args:
            ticket: from `send`.
            keys: of prompt and answer, if both are cached there now: a conversation comes back.
        """
        self.prefilled(ticket)
        sent = self._sent.pop(ticket, None)
        if sent is None:
            return
        sent.replica.requests -= 1
        if self._weigh(sent.slot, sent.replica):
            self._views.touch(sent.slot, keys)

    # How it is decided.

    def _score(self, prompt: Prompt, seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[slots] The least is chosen; infinite for whom nothing may be sent to."""
        return seconds

    def _cached_tokens(self, prompt: Prompt) -> npt.NDArray[np.int64]:
        """[slots] Tokens that need not be read; the last one is, as its logits are wanted."""
        tokens = self._views.matched(prompt.keys) * self._block_size
        return np.minimum(tokens, max(0, prompt.num_tokens - 1))

    def _best(self, score: npt.NDArray[np.float64], prompt: Prompt, avoid: Collection[str]) -> int:
        """The slot with the least score; of equals the least busy, then by lot."""
        avoided = [self._slots[name] for name in avoid if name in self._slots]
        if avoided:
            others = score.copy()
            others[avoided] = np.inf
            score = others if others.min() < np.inf else score
        least = score.min(initial=np.inf)
        if least == np.inf:
            raise CapacityError("no replica is ready: wait for one, or start more")
        equals = np.flatnonzero(score == least)
        if len(equals) > 1:
            equals = equals[self._busy[equals] == self._busy[equals].min()]
        return int(equals[0]) if len(equals) == 1 else self._draw(equals, prompt)

    def _draw(self, equals: npt.NDArray[np.int64], prompt: Prompt) -> int:
        """By lot (rendezvous hashing): routers that know nothing send a new prefix to one place.

        Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998.
        """
        first = prompt.keys[0][:8] if prompt.keys else self._num_sent.to_bytes(8, "little")
        lots = self._lots[equals] ^ np.uint64(int.from_bytes(first, "little"))
        lots *= _MIX
        lots ^= lots >> _SHIFT
        lots *= _MIX
        return int(equals[np.argmax(lots)])

    def _known(self, slot: int) -> _Replica:
        replica = self._replicas[slot]
        assert replica is not None, "a slot in _slots has a replica"
        return replica

    def _weigh(self, slot: int, of: _Replica | None = None) -> bool:
        """Brings a slot's wait up to date; False if it is no longer `of`'s."""
        replica = self._replicas[slot]
        if replica is None or (of is not None and replica is not of):
            return False
        tokens, requests = replica.load
        self._busy[slot] = requests
        self._wait[slot] = np.inf if replica.draining else self._costs.wait(tokens, requests)
        return True

    def _free_slot(self) -> int:
        for slot, replica in enumerate(self._replicas):
            if replica is None:
                return slot
        self._replicas.append(None)
        self._views.grow()
        self._wait = np.append(self._wait, np.inf)
        self._busy = np.append(self._busy, 0)
        self._lots = np.append(self._lots, np.uint64(0))
        return len(self._replicas) - 1


class LeastQueue(Router):
    """The replica with the fewest requests, whatever it has cached: to compare with."""

    def _score(self, prompt: Prompt, seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.where(seconds < np.inf, self._busy, np.inf)

    def _draw(self, equals: npt.NDArray[np.int64], prompt: Prompt) -> int:
        return int(equals[self._num_sent % len(equals)])  # not by prefix


class RoundRobin(Router):
    """One replica after the other, whatever it has cached or to do: to compare with."""

    _last = -1

    def send(self, route: Route) -> int:
        """Counts a request as on its way, and moves on; see `Router.send`."""
        self._last = self._slots.get(route.replica, self._last)
        return super().send(route)

    def _score(self, prompt: Prompt, seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        turn = (np.arange(len(seconds)) - self._last - 1) % max(1, len(seconds))
        return np.where(seconds < np.inf, turn, np.inf)
