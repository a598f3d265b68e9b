"""Many replicas behind a router, event by event.

A turn of a conversation comes and is routed; a replica gives a first token or ends an answer;
replicas report what they evicted; some die and come back empty. Nothing waits for a clock, so
minutes of a thousand replicas take seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf, isnan, nan
from time import thread_time

from draftwood.bench.scale_replica import Job, Replica, Service
from draftwood.bench.scale_trace import Talk, Trace
from draftwood.serve.router import Prompt, Report, Router


@dataclass(slots=True, eq=False)
class Request(Job):
    """A turn on its way.

    Attributes:
        talk, turn: whose, and the how manieth.
        come_s, first_s, end_s: when it came, got its first token, and ended.
        ticket: the router's.
        believed, possible: tokens that the router counted on, and that somebody had.
        retried: whether it was started again.
    """

    talk: Talk = field(kw_only=True)
    turn: int = field(kw_only=True)
    come_s: float = field(kw_only=True)
    first_s: float = field(kw_only=True, default=nan)
    end_s: float = field(kw_only=True, default=nan)
    ticket: int = field(kw_only=True, default=0)
    believed: int = field(kw_only=True, default=0)
    possible: int = field(kw_only=True, default=0)
    retried: bool = field(kw_only=True, default=False)


class Keys:
    """Names of blocks: those of what talks share are the same for all of them."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._shared: dict[tuple[int, int], bytes] = {}

    def of(self, talk: Talk, num_tokens: int) -> tuple[bytes, ...]:
        """Keys of the full blocks of a talk's first tokens."""
        keys: list[bytes] = []
        for name, covered in talk.shared:
            keys += (self._key(name, i) for i in range(len(keys), covered // self._size))
        number = talk.number + (1 << 32)
        own = range(len(keys), num_tokens // self._size)
        keys += (number.to_bytes(8, "big") + i.to_bytes(8, "big") for i in own)
        return tuple(keys[: num_tokens // self._size])

    def _key(self, name: int, i: int) -> bytes:
        key = self._shared.get((name, i))
        if key is None:
            key = self._shared[name, i] = name.to_bytes(8, "big") + i.to_bytes(8, "big")
        return key


@dataclass(frozen=True, slots=True)
class Events:
    """Replicas that die together.

    Attributes:
        replicas: their numbers.
        at_s: when they die.
        noticed_s: seconds until the router is told.
        restart_s: seconds from then until they are back.
    """

    replicas: Sequence[int]
    at_s: float
    noticed_s: float
    restart_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened.

    Attributes:
        requests: all of them, in the order in which they ended.
        busy_s: each replica's seconds of work.
        decisions_s: seconds that the router took for each decision, on this machine.
    """

    requests: Sequence[Request]
    busy_s: Sequence[float]
    decisions_s: Sequence[float]


class Simulation:
    """Replicas behind a router. Serves one trace, once.

    Args:
        router: decides; it is told of replicas, first tokens, ends and evictions.
        service: what a replica is.
        num_replicas: how many there are.
        report_s: seconds between reports.
        on_end: told after each request that ended.
    """

    def __init__(
        self,
        router: Router,
        service: Service,
        num_replicas: int,
        report_s: float,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._router = router
        self._service = service
        self._report_s = report_s
        self._on_end = on_end
        self._keys = Keys(service.block_size)
        self._replicas = [Replica(service) for _ in range(num_replicas)]
        self._names = [f"replica-{i}" for i in range(num_replicas)]
        self._numbers = {name: i for i, name in enumerate(self._names)}
        self._lost: dict[int, list[Request]] = {}  # by replica that is dead and not noticed yet
        self._buried_s = [0.0] * num_replicas  # work of those that died
        self._seen: set[bytes] = set()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._done: list[Request] = []
        self._decisions: list[float] = []

    def run(self, trace: Trace, failures: Events) -> Outcome:
        """Serves the trace to the end of its last request."""
        for name in self._names:
            self._router.add(name)
        for talk in trace.talks:
            self._turn(talk, 0, talk.start_s)
        for number in failures.replicas:
            self._at(failures.at_s, self._death(number, failures))
        self._at(self._report_s, self._report)
        while len(self._done) < trace.num_requests:
            now, _, event = heapq.heappop(self._events)
            event(now)
        pairs = zip(self._buried_s, self._replicas, strict=True)
        busy = [buried + replica.busy_s for buried, replica in pairs]
        return Outcome(self._done, busy, self._decisions)

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _turn(self, talk: Talk, turn: int, when: float) -> None:
        self._at(when, lambda now: self._come(talk, turn, now))

    def _come(self, talk: Talk, turn: int, now: float) -> None:
        tokens, answer = talk.prompt_tokens(turn), talk.answers[turn]
        later = self._keys.of(talk, tokens + answer)
        keys = later[: tokens // self._service.block_size]
        request = Request(keys, later, tokens, answer, talk=talk, turn=turn, come_s=now)
        seen = next((i for i, key in enumerate(keys) if key not in self._seen), len(keys))
        request.possible = min(seen * self._service.block_size, tokens - 1)
        self._send(request, now)
        self._seen.update(keys)

    def _send(self, request: Request, now: float) -> None:
        begin = thread_time()
        route = self._router.choose(Prompt(tuple(request.keys), request.num_tokens))
        request.ticket = self._router.send(route)
        self._decisions.append(thread_time() - begin)
        request.believed = route.cached_tokens
        number = self._numbers[route.replica]
        if number in self._lost:
            self._lost[number].append(request)
            return
        replica = self._replicas[number]
        self._happened(replica.submit(request, now), now)
        self._wake_up(replica)

    def _wake_up(self, replica: Replica) -> None:
        """Has a replica looked at when something happens next, unless something comes before."""
        version, when = replica.version, replica.next_s()

        def wake(now: float) -> None:
            if replica.version == version:
                self._happened(replica.advance(now), now)
                self._wake_up(replica)

        if when < inf:
            self._at(when, wake)

    def _happened(self, what: tuple[list[Job], list[Job]], now: float) -> None:
        first, ended = what
        for request in first:
            assert isinstance(request, Request)
            self._router.prefilled(request.ticket)
            if isnan(request.first_s):
                request.first_s = now
        for request in ended:
            assert isinstance(request, Request)
            self._end(request, now)

    def _end(self, request: Request, now: float) -> None:
        request.end_s = now
        self._router.done(request.ticket, request.later)
        self._seen.update(request.later)
        self._done.append(request)
        self._on_end()
        talk, turn = request.talk, request.turn
        if turn + 1 < len(talk.messages):
            self._turn(talk, turn + 1, now + talk.thinks_s[turn])

    def _report(self, now: float) -> None:
        for number, (name, replica) in enumerate(zip(self._names, self._replicas, strict=True)):
            if number not in self._lost:
                evicted = replica.cache.take_evicted()
                self._router.report(name, Report(*replica.load, evicted=evicted))
        self._at(now + self._report_s, self._report)

    def _death(self, number: int, failures: Events) -> Callable[[float], None]:
        return lambda now: self._die(number, failures, now)

    def _die(self, number: int, failures: Events, now: float) -> None:
        replica = self._replicas[number]
        self._happened(replica.advance(now), now)
        self._buried_s[number] += replica.busy_s
        self._lost[number] = []
        for job, written in replica.lost():
            assert isinstance(job, Request)
            self._lost[number].append(self._resumed(job, written))
        self._replicas[number] = Replica(self._service, now)
        self._at(now + failures.noticed_s, lambda then: self._notice(number, failures, then))

    def _resumed(self, request: Request, written: int) -> Request:
        """What of a request is to be done elsewhere: its answer so far is part of its prompt."""
        request.num_tokens += written
        request.answer -= written
        request.keys = request.later[: request.num_tokens // self._service.block_size]
        return request

    def _notice(self, number: int, failures: Events, now: float) -> None:
        self._router.remove(self._names[number])
        for request in self._lost[number]:
            self._router.done(request.ticket)
            request.retried = True
            self._send(request, now)
        self._at(now + failures.restart_s, lambda then: self._come_back(number, then))

    def _come_back(self, number: int, now: float) -> None:
        del self._lost[number]
        self._replicas[number] = Replica(self._service, now)
        self._router.add(self._names[number])
