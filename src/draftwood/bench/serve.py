"""Load on a server: how soon texts begin, how steadily they go on, how many tokens come in all.

So many clients ask at a time, each for its next text when it has the last one. With and without
speculation take turns in short blocks, so that a machine that gets slower meanwhile slows both.
Every prompt begins with a number of its own: no text was seen before, by a cache or by a drafter.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from draftwood.bench.data import BenchPrompt
from draftwood.bench.sse import Target, Timed, ask
from draftwood.errors import ConfigError

_READY = " at http"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What is asked.

    Attributes:
        concurrency: how many clients, for one measurement each.
        num_requests: texts in a block; at least one for each client.
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
        tokens_per_s: of all clients together; the median over blocks.
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


@contextmanager
def served(model: str, options: Sequence[str]) -> Iterator[str]:
    """Starts `draftwood serve` in a process of its own; the URL. Ends it afterwards.

    Raises:
        ConfigError: it did not start; the message is its own.
    """
    command = [sys.executable, "-m", "draftwood.cli", "serve", model, "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            if _READY not in line:
                child.wait()
                log.seek(0)
                last = (log.read().strip().splitlines() or ["the server did not start"])[-1]
                raise ConfigError(last.removeprefix("error: "))
            yield "http" + line.strip().partition(_READY)[2]
        finally:
            _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(60)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    assert child.stdout is not None
    child.stdout.close()


def measure(
    target: Target,
    prompts: Sequence[BenchPrompt],
    plan: LoadPlan,
    on_record: Callable[[LoadRecord], None] = lambda record: None,
) -> list[LoadPoint]:
    """Loads a server by a plan; a point for each number of clients and mode.

    Raises:
        ConfigError: nothing answers there, or the server refuses the very first request.
    """
    return asyncio.run(Loader(target, prompts, plan, on_record).run())


class Loader:
    """Sends what a plan asks for.

    Args:
        target: to whom.
        prompts: taken in turns.
        plan: what.
        on_record: told each text.
        name: begins the ids of requests, by which they could be asked for again; None sends none.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[BenchPrompt],
        plan: LoadPlan,
        on_record: Callable[[LoadRecord], None],
        name: str | None = None,
    ) -> None:
        self._target = target
        self._name = name
        self._prompts = itertools.cycle(prompts)
        self._plan = plan
        self._on_record = on_record
        self._numbers = itertools.count(1)

    async def run(self) -> list[LoadPoint]:
        """All blocks, one after the other."""
        await self.warm_up()
        points = []
        for clients in self._plan.concurrency:
            speeds: dict[bool | None, list[float]] = {mode: [] for mode in self._plan.modes}
            records: dict[bool | None, list[LoadRecord]] = {mode: [] for mode in self._plan.modes}
            for block in range(self._plan.num_blocks):
                # Each mode comes first every other time.
                for mode in self._plan.modes[:: 1 if block % 2 == 0 else -1]:
                    begin = perf_counter()
                    done = await self.block(clients, mode, block)
                    tokens = sum(record.num_tokens for record in done)
                    speeds[mode].append(tokens / (perf_counter() - begin))
                    records[mode] += done
            points += [
                _point(clients, mode, speeds[mode], records[mode]) for mode in self._plan.modes
            ]
        return points

    async def warm_up(self) -> None:
        """One text, to see that the server gives any and to have it warm."""
        record = await self._one(1, self._plan.modes[0], -1)
        if record.error is not None:
            raise ConfigError(f"the server gave no text: {record.error}")

    async def block(self, clients: int, mode: bool | None, block: int) -> list[LoadRecord]:
        """A block's texts; a client asks for its next one when it has the last."""
        left = iter(range(max(self._plan.num_requests, clients)))
        records: list[LoadRecord] = []

        async def client() -> None:
            for _ in left:
                records.append(await self._one(clients, mode, block))
                self._on_record(records[-1])

        await asyncio.gather(*(client() for _ in range(clients)))
        return records

    async def _one(self, clients: int, mode: bool | None, block: int) -> LoadRecord:
        path, body = self._request(mode)
        known: dict[str, Any] = {"concurrency": clients, "speculation": mode, "block": block}
        try:
            request_id = None if self._name is None else f"{self._name}-{body['seed']}"
            answer = await ask(self._target, "POST", path, body, request_id)
            if answer.status != 200:
                return LoadRecord(**known, error=f"HTTP {answer.status}: {_message(answer)}")
            return LoadRecord(**known, **_times(answer))
        except (OSError, EOFError, ValueError, LookupError) as error:
            return LoadRecord(**known, error=f"{type(error).__name__}: {error}")

    def _request(self, mode: bool | None) -> tuple[str, dict[str, Any]]:
        prompt, number = next(self._prompts), next(self._numbers)
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


def ratios(points: Sequence[LoadPoint]) -> dict[int, float]:
    """By number of clients: tokens/s with speculation over those without, where both are known."""
    speeds = {(point.concurrency, point.speculation): point.tokens_per_s for point in points}
    return {
        clients: speeds[clients, True] / speeds[clients, False]
        for clients, mode in speeds
        if mode is True and speeds.get((clients, False))
    }
