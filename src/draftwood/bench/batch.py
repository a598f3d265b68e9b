"""Several requests at once: what speculation gains or costs where rows are no longer free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from draftwood.bench.contenders import PLAIN
from draftwood.bench.together import run_together
from draftwood.engine.engine import Engine
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class BatchRun:
    """A group of prompts generated together by one engine.

    Attributes:
        concurrency: how many.
        group: number of the group.
        contender: "plain" or the drafter's name.
        num_tokens: generated, over all requests.
        total_s: from the first request to the last token.
        decode_s: the same without the time until every request had its first token.
        decode_tokens: tokens that came in that time.
        identical: every text is that of plain decoding; None for plain itself.
    """

    concurrency: int
    group: int
    contender: str
    num_tokens: int
    total_s: float
    decode_s: float
    decode_tokens: int
    identical: bool | None

    @property
    def tokens_per_s(self) -> float:
        """Over all requests, the prompts' computation included."""
        return self.num_tokens / self.total_s

    def to_json(self) -> dict[str, Any]:
        """A `batch` line."""
        return {"type": "batch", **asdict(self), "tokens_per_s": self.tokens_per_s}


def measure(
    llm: LLM,
    drafter: str,
    prompts: Sequence[Sequence[int]],
    concurrencies: Sequence[int],
    groups: int,
    params: SamplingParams,
    watch: Callable[[BatchRun], None] = lambda run: None,
) -> list[BatchRun]:
    """Runs groups of prompts with and without speculation, taking turns at going first.

    Args:
        llm: the model.
        drafter: its name; see `LLM.make_drafter`.
        prompts: token ids; groups are cut from them, round and round.
        concurrencies: sizes of a group.
        groups: of each size.
        params: for every prompt.
        watch: told every run.

    Raises:
        ConfigError: there are fewer prompts that fit the context than a group takes.
    """
    most, room = max(concurrencies), llm.engine.max_length - (params.max_tokens or 1)
    prompts = [prompt for prompt in prompts if len(prompt) <= room]
    if len(prompts) < most:
        raise ConfigError(
            f"{len(prompts)} prompts fit the context, and {most} are to run at once:"
            " give more, or ask for less"
        )
    engines = {
        PLAIN: llm.make_engine(llm.make_drafter("none")),
        drafter: llm.make_engine(llm.make_drafter(drafter)),
    }
    try:
        for engine in engines.values():
            run_together(engine, [prompts[0][:16]], params.but(max_tokens=4))
        runs, at = [], 0
        for concurrency in concurrencies:
            for group in range(groups):
                chosen = [prompts[(at + i) % len(prompts)] for i in range(concurrency)]
                at += concurrency
                for run in _take_turns(engines, chosen, group, params):
                    watch(run)
                    runs.append(run)
        return runs
    finally:
        for engine in engines.values():
            engine.close()


def _take_turns(
    engines: dict[str, Engine], prompts: Sequence[Sequence[int]], group: int, params: SamplingParams
) -> list[BatchRun]:
    names = list(engines) if group % 2 == 0 else list(engines)[::-1]
    results = {name: run_together(engines[name], prompts, params) for name in names}
    plain = results[PLAIN].texts
    return [
        BatchRun(
            concurrency=len(prompts),
            group=group,
            contender=name,
            num_tokens=sum(len(text) for text in result.texts),
            total_s=result.total_s,
            decode_s=result.decode_s,
            decode_tokens=result.decode_tokens,
            identical=None if name == PLAIN else result.texts == plain,
        )
        for name, result in results.items()
    ]


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """One size of a batch.

    Attributes:
        concurrency: requests at once.
        plain_tokens_per_s, tokens_per_s: medians over groups, prompts included.
        ratio: median over groups of speculative over plain, prompts included.
        decode_ratio: the same from where every request had its first token.
        worst: the smallest ratio of a group.
        num_texts, num_identical: texts compared with plain decoding's, by group.
    """

    concurrency: int
    plain_tokens_per_s: float
    tokens_per_s: float
    ratio: float
    decode_ratio: float
    worst: float
    num_texts: int
    num_identical: int

    def to_json(self) -> dict[str, Any]:
        """A `batch_summary` line."""
        return {"type": "batch_summary", **asdict(self)}


def summarise(runs: Sequence[BatchRun]) -> list[BatchSummary]:
    """One line for each concurrency."""
    lines = []
    for concurrency in dict.fromkeys(run.concurrency for run in runs):
        own = [run for run in runs if run.concurrency == concurrency]
        plain = {run.group: run for run in own if run.contender == PLAIN}
        others = [run for run in own if run.contender != PLAIN]
        ratios = [run.tokens_per_s / plain[run.group].tokens_per_s for run in others]
        decode = [_decode_ratio(run, plain[run.group]) for run in others]
        lines.append(
            BatchSummary(
                concurrency,
                median(run.tokens_per_s for run in plain.values()),
                median(run.tokens_per_s for run in others),
                median(ratios),
                median(decode),
                min(ratios),
                len(others) * concurrency,
                sum(concurrency for run in others if run.identical),
            )
        )
    return lines


def _decode_ratio(run: BatchRun, plain: BatchRun) -> float:
    if min(run.decode_s, plain.decode_s) <= 0 or plain.decode_tokens == 0:
        return 1.0
    return (run.decode_tokens / run.decode_s) / (plain.decode_tokens / plain.decode_s)
