"""A replica as a queue: what a request waits for, reads, and writes, without a model.

Time is what this engine's rounds cost, measured on a machine (`draftwood bench cost` and `kv`): a
round of n decoding requests takes `round_s + n * row_s`, and a chunk of a prompt beside them
`chunk * prefill_s` more. Between two events the same requests run, so rounds need not be counted
one by one: reading and writing go on at constant rates.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_NEVER = float("inf")
_SETTLED = 1e-6  # tokens: what rounding leaves over


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What a replica is. The defaults are the 1.5B model in 8 bits on two cores.

    Attributes:
        round_s: seconds of a round with no rows; `row_s` what each row adds.
        row_s: seconds for a request's next token beside others.
        prefill_s: seconds to read one token of a prompt.
        chunk: tokens of prompts in a round, at most.
        slots: requests that run at once; others wait.
        blocks: blocks that the prefix cache holds.
        block_size: tokens in a block.
    """

    round_s: float = 0.0285
    row_s: float = 0.0018
    prefill_s: float = 0.0025
    chunk: int = 512
    slots: int = 8
    blocks: int = 2048
    block_size: int = 32

    def to_json(self) -> dict[str, Any]:
        """The fields, for the fingerprint."""
        return asdict(self)


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through a replica.

    Attributes:
        keys: of the blocks of its prompt.
        later: of prompt and answer together.
        num_tokens: of the prompt.
        answer: tokens to write.
        cached: tokens of the prompt that the replica had.
        to_read: tokens still to be read.
    """

    keys: Sequence[bytes]
    later: Sequence[bytes]
    num_tokens: int
    answer: int
    cached: int = 0
    to_read: float = field(default=0.0)


class BlockCache:
    """The blocks that a replica has, least recently used first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._evicted: list[bytes] = []

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of the first blocks are there; they count as used."""
        blocks = self._blocks
        count = next((i for i, key in enumerate(keys) if key not in blocks), len(keys))
        for key in reversed(keys[:count]):
            blocks.move_to_end(key)
        return count

    def publish(self, keys: Sequence[bytes]) -> None:
        """Adds a chain; the end of the oldest one goes."""
        blocks = self._blocks
        for key in reversed(keys):
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self._size:
            self._evicted.append(blocks.popitem(last=False)[0])

    def take_evicted(self) -> list[bytes]:
        """What has gone since the last call, and has not come back."""
        gone = [key for key in self._evicted if key not in self._blocks]
        self._evicted.clear()
        return gone


class Replica:
    """Serves jobs; `advance` to a time, then look at `next_s`.

    Args:
        service: what it is.
        start_s: when it starts, with nothing cached.
    """

    def __init__(self, service: Service, start_s: float = 0.0) -> None:
        self._service = service
        self._now = start_s
        self._waiting: deque[Job] = deque()
        self._reading: deque[Job] = deque()
        self._writing: list[
            tuple[float, int, Job]
        ] = []  # heap by the value of `_written` at its end
        self._written = 0.0  # tokens that each writing request has got since the start
        self._serial = 0
        self.cache = BlockCache(service.blocks)
        self.busy_s = 0.0
        self.version = 0  # of `next_s`: it changes when a job comes or something happens

    def lost(self) -> list[tuple[Job, int]]:
        """What is left to others when it dies: its jobs, and tokens of the answer that are out."""
        writing = [(job, int(job.answer - (end - self._written))) for end, _, job in self._writing]
        return [*writing, *((job, 0) for job in (*self._reading, *self._waiting))]

    @property
    def load(self) -> tuple[int, int]:
        """Tokens to be read, and requests."""
        reading = sum(job.to_read for job in self._reading)
        waiting = sum(job.num_tokens for job in self._waiting)
        count = len(self._waiting) + len(self._reading) + len(self._writing)
        return round(reading) + waiting, count

    def submit(self, job: Job, now: float) -> tuple[list[Job], list[Job]]:
        """Queues a job; returns what happened until now, as `advance` does."""
        happened = self.advance(now)
        self._waiting.append(job)
        self._admit()
        return happened

    def next_s(self) -> float:
        """When something happens next, if no job comes; infinite for an idle replica."""
        read_rate, write_rate = self._rates()
        ends = [self._reading[0].to_read / read_rate] if self._reading else []
        if self._writing:
            ends.append((self._writing[0][0] - self._written) / write_rate)
        return self._now + max(0.0, min(ends)) if ends else _NEVER

    def advance(self, now: float) -> tuple[list[Job], list[Job]]:
        """Goes on to `now`, at most to `next_s`.

        Returns:
            Jobs that got their first token, and jobs that ended.
        """
        self.version += 1
        seconds = now - self._now
        self._now = now
        if self._reading or self._writing:
            self.busy_s += seconds
            read_rate, write_rate = self._rates()
            self._written += seconds * write_rate
            if self._reading:
                self._reading[0].to_read -= seconds * read_rate
        first, ended = self._read(), self._wrote()
        if ended:
            self._admit()
        return first, ended

    def _rates(self) -> tuple[float, float]:
        """Tokens a second: read of the first prompt, and written for each that writes."""
        service = self._service
        round_s = service.round_s + len(self._writing) * service.row_s
        if not self._reading:
            return 0.0, 1.0 / round_s
        round_s += service.chunk * service.prefill_s
        return service.chunk / round_s, 1.0 / round_s

    def _admit(self) -> None:
        service = self._service
        while self._waiting and len(self._reading) + len(self._writing) < service.slots:
            job = self._waiting.popleft()
            hit = self.cache.match(job.keys) * service.block_size
            job.cached = min(hit, job.num_tokens - 1)
            job.to_read = float(job.num_tokens - job.cached)
            self._reading.append(job)

    def _read(self) -> list[Job]:
        first = []
        while self._reading and self._reading[0].to_read <= _SETTLED:
            job = self._reading.popleft()
            self._serial += 1
            heapq.heappush(self._writing, (self._written + job.answer - 1, self._serial, job))
            first.append(job)
        return first

    def _wrote(self) -> list[Job]:
        ended = []
        while self._writing and self._writing[0][0] <= self._written + _SETTLED:
            job = heapq.heappop(self._writing)[2]
            self.cache.publish(job.later)
            ended.append(job)
        return ended
