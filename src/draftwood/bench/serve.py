"""Load on a server: how soon texts begin, how steadily they go on, how many tokens come in all.

So many clients ask at a time, each for its next text when it has the last one. With and without
speculation take turns in short blocks, so that a machine that gets slower meanwhile slows both.
Every prompt begins with a number of its own, so that no cache has its KV. A server without
speculation beside it gets the same texts; one that serves both modes is asked for others, as its
drafter would know them. With fewer prompts than texts, a drafter meets nearly the same text again.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from draftwood.bench.data import BenchPrompt
from draftwood.bench.sse import Target, Timed, ask
from draftwood.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What is asked.

    Attributes:
        concurrency: how many clients, for one measurement each.
        num_requests: texts in a block; at least two for each client.
        num_blocks: blocks of each mode, in turns.
        max_tokens: of each text, whatever the model would say.
        temperature: of sampling.
        compare: with and without speculation; else only as the server does by itself.
    """

    concurrency: tuple[int, ...]
    num_requests: int
    num_blocks: int
    max_tokens: int
    temperature: float = 0.0
    compare: bool = True

    @property
    def modes(self) -> tuple[bool | None, ...]:
        """Values of `speculation`; None sends none."""
        return (True, False) if self.compare else (None,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """One `request` line.

    Attributes:
        concurrency, speculation, block: where it belongs.
        num_prompt_tokens, num_tokens: lengths; 0 when it failed.
        first_token_s, total_s: seconds from the request to its first text and to its end.
        gaps_s: seconds between the chunks that carried text.
        cached_tokens: of the prompt.
        acceptance_length: tokens a round; None where the server does not say.
        error: what went wrong, if something did.
    """

    concurrency: int
    speculation: bool | None
    block: int
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    cached_tokens: int = 0
    acceptance_length: float | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        return {"type": "request", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One `load` line: a mode at a number of clients.

    Attributes:
        concurrency, speculation: which.
        tokens_per_s: of all clients together, while every one of them was busy; the median over
            blocks. A block's end, where the last clients have the server to themselves, is left
            out.
        num_requests, num_failed: texts asked for, and those that did not come.
        ttft_p50_s, ttft_p99_s: seconds to the first text.
        itl_p50_s, itl_p99_s: seconds between chunks of a text.
        tpot_p50_s, tpot_p99_s: seconds a token after the first, by text.
        acceptance_length: tokens a round, averaged over texts.
    """

    concurrency: int
    speculation: bool | None
    tokens_per_s: float
    num_requests: int
    num_failed: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    acceptance_length: float | None

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        return {"type": "load", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRatio:
    """One `load_ratio` line: what speculation is worth at a number of clients.

    Attributes:
        concurrency: how many clients.
        ratio: total tokens/s with speculation over those without; the median over pairs of blocks.
        worst: the smallest of them.
        num_pairs: how many.
    """

    concurrency: int
    ratio: float
    worst: float
    num_pairs: int

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        return {"type": "load_ratio", **asdict(self)}


@dataclass(frozen=True, slots=True)
class Load:
    """What was measured.

    Attributes:
        points: one for each number of clients and mode.
        ratios: one for each number of clients; none where modes are not compared.
    """

    points: list[LoadPoint]
    ratios: list[LoadRatio]


def measure(
    target: Target,
    prompts: Sequence[BenchPrompt],
    plan: LoadPlan,
    on_record: Callable[[LoadRecord], None] = lambda record: None,
    plain: Target | None = None,
) -> Load:
    """Loads a server by a plan.

    Args:
        target: the server.
        prompts: taken in turns.
        plan: how.
        on_record: told of every text.
        plain: a server without speculation, which then gets what is asked without; None asks the
            same server, by a field of the request.

    Raises:
        ConfigError: nothing answers there, or the server refuses the very first request.
    """
    return asyncio.run(Loader(target, prompts, plan, on_record, plain).run())


class Loader:
    """Sends what a plan asks for.

    Args:
        target: to whom.
        prompts: taken in turns.
        plan: what.
        on_record: told each text.
        plain: the same model without speculation, asked where a mode wants that; None for the same
            server.
        name: begins the ids of requests, by which they could be asked for again; None sends none.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[BenchPrompt],
        plan: LoadPlan,
        on_record: Callable[[LoadRecord], None],
        plain: Target | None = None,
        name: str | None = None,
    ) -> None:
        self._target = target
        self._plain = plain
        self._name = name
        self._prompts = prompts
        self._plan = plan
        self._on_record = on_record
        self._next = 0  # number of the next prompt; its text is `_prompts[number % len]`

    async def run(self) -> Load:
        """All blocks, one after the other."""
        await self.warm_up()
        points, ratios = [], []
        for clients in self._plan.concurrency:
            speeds: dict[bool | None, list[float]] = {mode: [] for mode in self._plan.modes}
            records: dict[bool | None, list[LoadRecord]] = {mode: [] for mode in self._plan.modes}
            for block in range(self._plan.num_blocks):
                numbers = self.take(clients)
                # Each mode comes first every other time.
                for turn, mode in enumerate(self._plan.modes[:: 1 if block % 2 == 0 else -1]):
                    if turn and self._plain is None:
                        numbers = self.take(clients)
                    speed, done = await self.block(clients, mode, block, numbers)
                    speeds[mode].append(speed)
                    records[mode] += done
            points += [
                _point(clients, mode, speeds[mode], records[mode]) for mode in self._plan.modes
            ]
            if self._plan.compare:
                ratios.append(_ratio(clients, speeds[True], speeds[False]))
        return Load(points, ratios)

    def take(self, clients: int) -> range:
        """Numbers of the texts of the next block."""
        first, self._next = self._next, self._next + max(self._plan.num_requests, 2 * clients)
        return range(first, self._next)

    async def warm_up(self) -> None:
        """A text of each mode, to see that there is any and to have all of it warm."""
        for mode in self._plan.modes:
            record = (await self._one(1, mode, -1, self._next)).record
            self._next += 1
            if record.error is not None:
                raise ConfigError(f"the server gave no text: {record.error}")

    async def block(
        self, clients: int, mode: bool | None, block: int, numbers: Sequence[int]
    ) -> tuple[float, list[LoadRecord]]:
        """A block's speed and texts; a client asks for its next one when it has the last."""
        left = iter(numbers)
        texts: list[_Text] = []
        idle: list[float] = []

        async def client() -> None:
            for number in left:
                texts.append(await self._one(clients, mode, block, number))
                self._on_record(texts[-1].record)
            idle.append(perf_counter())

        begin = perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        tokens = sum(text.num_tokens_by(idle[0]) for text in texts)
        return tokens / (idle[0] - begin), [text.record for text in texts]

    async def _one(self, clients: int, mode: bool | None, block: int, number: int) -> _Text:
        target = self._target
        if mode is False and self._plain is not None:
            target = self._plain
        path, body = self._request(None if self._plain else mode, number)
        known: dict[str, Any] = {"concurrency": clients, "speculation": mode, "block": block}
        try:
            request_id = None if self._name is None else f"{self._name}-{body['seed']}"
            answer = await ask(target, "POST", path, body, request_id)
            if answer.status != 200:
                return _Text(LoadRecord(**known, error=f"HTTP {answer.status}: {_message(answer)}"))
            return _Text(LoadRecord(**known, **_times(answer)), answer.begin)
        except (OSError, EOFError, ValueError, LookupError) as error:
            return _Text(LoadRecord(**known, error=f"{type(error).__name__}: {error}"))

    def _request(self, mode: bool | None, number: int) -> tuple[str, dict[str, Any]]:
        prompt = self._prompts[number % len(self._prompts)]
        text = f"[{number}] {prompt.turns[0]}"
        body: dict[str, Any] = {
            "max_tokens": self._plan.max_tokens,
            "temperature": self._plan.temperature,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if mode is not None:
            body["speculation"] = mode
        if prompt.chat:
            messages = [{"role": "user", "content": text}]
            return "/v1/chat/completions", body | {"messages": messages}
        return "/v1/completions", body | {"prompt": text}


@dataclass(frozen=True, slots=True)
class _Text:
    """A text and when it was asked for."""

    record: LoadRecord
    begin: float = 0.0

    def num_tokens_by(self, moment: float) -> float:
        """Tokens that had come by then, as if each chunk brought as many."""
        gaps = self.record.gaps_s
        times = itertools.accumulate(gaps, initial=self.begin + self.record.first_token_s)
        share = sum(time <= moment for time in times) / (len(gaps) + 1)
        return self.record.num_tokens * share


def _message(answer: Timed) -> str:
    text = answer.events[0][1].decode("utf-8", "replace") if answer.events else ""
    return text[:300]


def _times(answer: Timed) -> dict[str, Any]:
    """Fields of a record from the events of a good stream."""
    events = answer.json()
    failed = next((event for _, event in events if "error" in event), None)
    if failed is not None:
        return {"error": str(failed["error"].get("message"))}
    told = [when for when, event in events if event["choices"]]
    last = events[-1][1]
    spec = (last.get("metrics") or {}).get("speculative_decoding") or {}
    details = last["usage"].get("prompt_tokens_details") or {}
    return {
        "num_prompt_tokens": last["usage"]["prompt_tokens"],
        "num_tokens": last["usage"]["completion_tokens"],
        "first_token_s": told[0] - answer.begin,
        "total_s": told[-1] - answer.begin,
        "gaps_s": tuple(b - a for a, b in itertools.pairwise(told)),
        "cached_tokens": details.get("cached_tokens") or 0,
        "acceptance_length": spec.get("mean_acceptance_length"),
    }


def _point(
    clients: int, mode: bool | None, speeds: Sequence[float], records: Sequence[LoadRecord]
) -> LoadPoint:
    good = [record for record in records if record.error is None]
    ttft = [record.first_token_s for record in good]
    gaps = [gap for record in good for gap in record.gaps_s]
    each = [
        (record.total_s - record.first_token_s) / (record.num_tokens - 1)
        for record in good
        if record.num_tokens > 1
    ]
    lengths = [one.acceptance_length for one in good if one.acceptance_length is not None]
    return LoadPoint(
        concurrency=clients,
        speculation=mode,
        tokens_per_s=statistics.median(speeds),
        num_requests=len(records),
        num_failed=len(records) - len(good),
        ttft_p50_s=percentile(ttft, 50),
        ttft_p99_s=percentile(ttft, 99),
        itl_p50_s=percentile(gaps, 50),
        itl_p99_s=percentile(gaps, 99),
        tpot_p50_s=percentile(each, 50),
        tpot_p99_s=percentile(each, 99),
        acceptance_length=statistics.fmean(lengths) if lengths else None,
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that so many percent do not exceed; None of nothing."""
    if not values:
        return None
    ranked = sorted(values)
    return ranked[max(math.ceil(len(ranked) * percent / 100) - 1, 0)]


def _ratio(clients: int, on: Sequence[float], off: Sequence[float]) -> LoadRatio:
    pairs = [a / b if b else math.nan for a, b in zip(on, off, strict=True)]
    return LoadRatio(
        concurrency=clients,
        ratio=statistics.median(pairs),
        worst=min(pairs),
        num_pairs=len(pairs),
    )
