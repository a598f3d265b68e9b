"""What checkpoints cost a server: two of them, with and without, take turns under the same load."""

from __future__ import annotations

import asyncio
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from draftwood.bench.data import BenchPrompt
from draftwood.bench.intervals import estimate, middle
from draftwood.bench.serve import Loader, LoadPlan
from draftwood.bench.served import served
from draftwood.bench.sse import Target, ask

_SECONDS = re.compile(rb'draftwood:checkpoint_seconds_total\{[^}]*thread="engine"\} (\S+)')
_WRITTEN = re.compile(rb"draftwood:checkpoints_written_total\{[^}]*\} (\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPair:
    """One `kept_pair` line: the same texts from both servers, one after the other.

    Attributes:
        concurrency, block: where it belongs.
        off_tokens_per_s, on_tokens_per_s: of all clients together, without and with checkpoints.
        num_failed: texts that did not come.
        engine_share: of the second server's time, what its engine's thread spent on checkpoints.
        num_checkpoints: that it wrote meanwhile.
    """

    concurrency: int
    block: int
    off_tokens_per_s: float
    on_tokens_per_s: float
    num_failed: int
    engine_share: float
    num_checkpoints: int

    @property
    def ratio(self) -> float:
        """Speed with checkpoints over that without."""
        return self.on_tokens_per_s / self.off_tokens_per_s

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        return {"type": "kept_pair", **asdict(self)}


def measure(
    model: str,
    options: Sequence[str],
    prompts: Sequence[BenchPrompt],
    plan: LoadPlan,
    every_s: float,
    on_pair: Callable[[KeptPair], None] = lambda pair: None,
) -> list[KeptPair]:
    """Loads two servers in turns by a plan; all pairs in order.

    Args:
        model, options: as `draftwood serve` takes them, for both.
        prompts, plan: the load; its `compare` is not looked at.
        every_s: seconds between two checkpoints.
        on_pair: told each pair when it is done.

    Raises:
        ConfigError: a server does not start, or gives no text.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        saved = ["--checkpoint", folder, "--checkpoint-every", str(every_s)]
        off = stack.enter_context(served(model, options))
        on = stack.enter_context(served(model, [*options, *saved]))
        return asyncio.run(_Pairs(off, on, prompts, plan).run(on_pair))


class _Pairs:
    """Two servers, asked the same."""

    def __init__(self, off: str, on: str, prompts: Sequence[BenchPrompt], plan: LoadPlan) -> None:
        self._plan = plan
        self._on = Target.of(on)
        self._loaders = [
            Loader(target, prompts, plan, lambda record: None, name="kept")
            for target in (Target.of(off), self._on)
        ]

    async def run(self, on_pair: Callable[[KeptPair], None]) -> list[KeptPair]:
        """All pairs; each server comes first every other time."""
        for loader in self._loaders:
            await loader.warm_up()
        pairs = []
        for clients in self._plan.concurrency:
            for block in range(self._plan.num_blocks):
                pairs.append(await self._pair(clients, block))
                on_pair(pairs[-1])
        return pairs

    async def _pair(self, clients: int, block: int) -> KeptPair:
        speeds, num_failed = [0.0, 0.0], 0
        seconds, written = await self._counts()
        on_s = 0.0
        for which in (0, 1) if block % 2 == 0 else (1, 0):
            loader, begin = self._loaders[which], perf_counter()
            speeds[which], done = await loader.block(clients, None, block, loader.take(clients))
            spent_s = perf_counter() - begin
            num_failed += sum(record.error is not None for record in done)
            on_s = spent_s if which else on_s
        later, more = await self._counts()
        return KeptPair(
            concurrency=clients,
            block=block,
            off_tokens_per_s=speeds[0],
            on_tokens_per_s=speeds[1],
            num_failed=num_failed,
            engine_share=(later - seconds) / on_s,
            num_checkpoints=round(more - written),
        )

    async def _counts(self) -> tuple[float, float]:
        """Seconds of the engine's thread for checkpoints, and checkpoints, so far."""
        answer = await ask(self._on, "GET", "/metrics")
        text = b"".join(data for _, data in answer.events)
        seconds, written = _SECONDS.search(text), _WRITTEN.search(text)
        return float(seconds[1]) if seconds else 0.0, float(written[1]) if written else 0.0


def summary(pairs: Sequence[KeptPair], clients: int) -> dict[str, Any]:
    """The `kept` line of a number of clients: ratio on over off, medians, and its interval."""
    mine = [pair for pair in pairs if pair.concurrency == clients]
    ratio = estimate([pair.ratio for pair in mine], middle)
    return {
        "type": "kept",
        "concurrency": clients,
        "num_pairs": len(mine),
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "off_tokens_per_s": statistics.median(pair.off_tokens_per_s for pair in mine),
        "on_tokens_per_s": statistics.median(pair.on_tokens_per_s for pair in mine),
        "engine_share": statistics.fmean(pair.engine_share for pair in mine),
        "num_checkpoints": sum(pair.num_checkpoints for pair in mine),
        "num_failed": sum(pair.num_failed for pair in mine),
    }
