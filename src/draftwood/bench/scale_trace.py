"""A made-up day of a chat service: who asks what, when, and which beginnings are shared.

Three things share prompts, as in traces that serving papers describe (Mooncake, arXiv 2407.00079;
SGLang, arXiv 2312.07104): *system prompts* of applications, few of which are popular (Zipf);
*few-shot templates* behind them, used by conversations and by *jobs* that send many requests in a
few seconds; and *conversations*, each turn of which begins with all turns before. Conversations
begin in bursts (a Poisson process that switches between calm and busy).

A conversation's next turn comes a while after its answer has been read, so when it comes depends on
how fast it was answered; what is said does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePlan:
    """What the traffic is like. Lengths are tokens: a median and the spread of a log-normal.

    Attributes:
        requests: turns of all conversations and jobs together, about.
        apps: applications, each with a system prompt.
        zipf: how unequally popular they are: the k-th has a share of k ** -zipf.
        templates: few-shot templates of each application.
        templated: share of conversations that use one; jobs always do.
        turns: mean turns of a conversation.
        think_s: median seconds between an answer and the next turn, and the spread.
        job_share: share of requests that come in jobs.
        job_size: median requests in a job, and the spread.
        job_s: seconds in which a job sends them.
        busy: arrivals in a busy spell, times those of a calm one.
        spell_s: mean seconds of calm and of busy spells.
        system, template, message, answer: lengths.
        context: most tokens of a prompt; a conversation ends there.
    """

    requests: int
    apps: int = 200
    zipf: float = 1.1
    templates: int = 4
    templated: float = 0.4
    turns: float = 4.0
    think_s: tuple[float, float] = (20.0, 0.9)
    job_share: float = 0.2
    job_size: tuple[float, float] = (30.0, 0.7)
    job_s: float = 5.0
    busy: float = 3.0
    spell_s: tuple[float, float] = (60.0, 20.0)
    system: tuple[float, float] = (500.0, 0.7)
    template: tuple[float, float] = (700.0, 0.5)
    message: tuple[float, float] = (60.0, 1.0)
    answer: tuple[float, float] = (120.0, 0.8)
    context: int = 8192

    def to_json(self) -> dict[str, Any]:
        """The fields, for the fingerprint."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation, or one request of a job.

    Attributes:
        number: names its own part of a prompt.
        start_s: when its first turn comes.
        shared: names of what it begins with (an application, or also a template) and how many
            tokens of a prompt each covers, from the beginning.
        messages, answers: tokens of each turn.
        thinks_s: seconds from an answer to the next turn; one less than turns.
    """

    number: int
    start_s: float
    shared: tuple[tuple[int, int], ...]
    messages: tuple[int, ...]
    answers: tuple[int, ...]
    thinks_s: tuple[float, ...]

    def prompt_tokens(self, turn: int) -> int:
        """Tokens of a turn's prompt: what is shared, and all that was said before."""
        return self.shared[-1][1] + sum(self.messages[: turn + 1]) + sum(self.answers[:turn])


@dataclass(frozen=True, slots=True)
class Trace:
    """Traffic.

    Attributes:
        talks: in the order in which they begin.
        num_requests: turns of all talks.
        prompt_tokens, answer_tokens: of all requests together.
        span_s: seconds from the first talk's beginning to the last one's.
    """

    talks: Sequence[Talk]
    num_requests: int
    prompt_tokens: int
    answer_tokens: int
    span_s: float


def make_trace(plan: TracePlan, seed: int, requests_per_s: float) -> Trace:
    """Draws traffic; the same plan, seed and rate give the same.

    Args:
        plan: what it is like.
        seed: of all that is drawn.
        requests_per_s: mean over the trace.
    """
    draws = _Draws(plan, np.random.default_rng(seed), plan.requests / requests_per_s)
    talks = sorted(draws.talks(), key=lambda talk: talk.start_s)
    turns = [(talk, turn) for talk in talks for turn in range(len(talk.messages))]
    return Trace(
        talks,
        len(turns),
        sum(talk.prompt_tokens(turn) for talk, turn in turns),
        sum(talk.answers[turn] for talk, turn in turns),
        draws.span_s,
    )


class _Draws:
    """Everything that is drawn, in a fixed order, from one generator."""

    def __init__(self, plan: TracePlan, rng: np.random.Generator, span_s: float) -> None:
        self.span_s = span_s
        self._plan = plan
        self._rng = rng
        self._times, self._arrived = self._spells()
        self._systems = self._lengths(plan.system, plan.apps)
        self._templates = self._lengths(plan.template, plan.apps * plan.templates)
        self._templates = self._templates.reshape(plan.apps, plan.templates)

    def talks(self) -> list[Talk]:
        """Conversations, then the requests of jobs."""
        talks = self._conversations()
        return talks + self._jobs(len(talks))

    def _conversations(self) -> list[Talk]:
        plan, rng = self._plan, self._rng
        count = max(1, round(plan.requests * (1 - plan.job_share) / plan.turns))
        starts = self._starts(count)
        shared = self._shared(count, rng.random(count) < plan.templated)
        turns = rng.geometric(1 / plan.turns, count)
        return self._spoken(starts, shared, turns, 0)

    def _jobs(self, first: int) -> list[Talk]:
        plan, rng = self._plan, self._rng
        median, spread = plan.job_size
        mean = median * np.exp(spread**2 / 2)
        count = round(plan.requests * plan.job_share / mean)
        starts, shared = self._starts(count), self._shared(count, np.ones(count, bool))
        sizes = self._lengths(plan.job_size, count)
        starts = np.repeat(starts, sizes) + rng.random(sizes.sum()) * plan.job_s
        each = [names for names, size in zip(shared, sizes, strict=True) for _ in range(size)]
        return self._spoken(starts, each, np.ones(len(each), np.int64), first)

    def _spoken(
        self, starts: Floats, shared: list[tuple[tuple[int, int], ...]], turns: Ints, first: int
    ) -> list[Talk]:
        """Talks with these beginnings and so many turns, numbered from `first`."""
        plan, total = self._plan, int(turns.sum())
        messages = self._lengths(plan.message, total).tolist()
        answers = self._lengths(plan.answer, total).tolist()
        thinks = self._rng.lognormal(np.log(plan.think_s[0]), plan.think_s[1], total).tolist()
        talks, end = [], 0
        for i, (start, names, count) in enumerate(zip(starts.tolist(), shared, turns, strict=True)):
            begin, end = end, end + int(count)
            said = messages[begin:end], answers[begin:end]
            kept = self._kept(names[-1][1], *said)
            talks.append(
                Talk(
                    first + i,
                    start,
                    names,
                    tuple(said[0][:kept]),
                    tuple(said[1][:kept]),
                    tuple(thinks[begin : begin + kept - 1]),
                )
            )
        return talks

    def _kept(self, before: int, messages: list[int], answers: list[int]) -> int:
        """How many turns fit the context; the first always counts."""
        for turn, (message, answer) in enumerate(zip(messages, answers, strict=True)):
            before += message
            if turn and before > self._plan.context:
                return turn
            before += answer
        return len(messages)

    def _shared(
        self, count: int, templated: npt.NDArray[np.bool_]
    ) -> list[tuple[tuple[int, int], ...]]:
        plan = self._plan
        apps = self._popular(plan.apps, count).tolist()
        templates = self._popular(plan.templates, count).tolist()
        found = []
        for app, template, used in zip(apps, templates, templated.tolist(), strict=True):
            own = int(self._systems[app])
            names: tuple[tuple[int, int], ...] = ((app, own),)
            if used:
                name = plan.apps + app * plan.templates + template
                names = (*names, (name, own + int(self._templates[app, template])))
            found.append(names)
        return found

    def _popular(self, among: int, count: int) -> Ints:
        """[count] Who is asked for, by Zipf's law."""
        shares = np.arange(1, among + 1) ** -self._plan.zipf
        return self._rng.choice(among, count, p=shares / shares.sum())

    def _lengths(self, length: tuple[float, float], count: int) -> Ints:
        """[count] At least 1, at most half a context."""
        drawn = self._rng.lognormal(np.log(length[0]), length[1], count)
        return np.clip(np.rint(drawn), 1, self._plan.context // 2).astype(np.int64)

    def _spells(self) -> tuple[Floats, Floats]:
        """Times at which spells end, and the share of arrivals until then."""
        times, arrived, busy = [0.0], [0.0], False
        while times[-1] < self.span_s:
            mean = self._plan.spell_s[busy]
            long = min(float(self._rng.exponential(mean)), self.span_s - times[-1])
            times.append(times[-1] + max(long, 1e-6))
            arrived.append(arrived[-1] + long * (self._plan.busy if busy else 1.0))
            busy = not busy
        return np.array(times), np.array(arrived) / arrived[-1]

    def _starts(self, count: int) -> Floats:
        return np.interp(self._rng.random(count), self._arrived, self._times)
