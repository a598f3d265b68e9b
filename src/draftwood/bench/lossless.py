"""Whether speculation changes a text, over many prompts: every difference, and their rate.

Speed does not matter here, so that several requests run at once; as what is beside a request must
not matter either, that makes the test harder and not easier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

from draftwood.bench.compare import make_drafter
from draftwood.bench.data import BenchPrompt
from draftwood.bench.difference import Difference, explain
from draftwood.engine.engine import Engine
from draftwood.engine.sequence import Sequence as EngineSequence
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams

# Standard deviations of the 95 % bound, one-sided.
_Z = 1.6449


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedText:
    """One text of one drafter, beside that of plain decoding.

    Attributes:
        prompt, kind: which prompt, and what sort.
        drafter: who drafted.
        temperature: 0 was greedy.
        num_tokens: of plain decoding's text.
        num_draft_tokens, num_accepted_tokens: what speculation did for it.
        difference: where the texts part; None when they are the same.
    """

    prompt: str
    kind: str
    drafter: str
    temperature: float
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    difference: Difference | None

    def to_json(self) -> dict[str, Any]:
        """A `text` line."""
        return {"type": "text", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceRate:
    """How often a drafter changed a text.

    Attributes:
        drafter, temperature: of these texts.
        num_texts, num_tokens: compared.
        num_draft_tokens, num_accepted_tokens: verified, and right: with none accepted the
            comparison says nothing.
        num_different: texts.
        rate: their share.
        rate_below: upper end of the share's 95 % interval (Wilson 1927, one-sided).
    """

    drafter: str
    temperature: float
    num_texts: int
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_different: int
    rate: float
    rate_below: float

    def to_json(self) -> dict[str, Any]:
        """A `difference_rate` line."""
        return {"type": "difference_rate", **asdict(self)}


def measure(
    llm: LLM,
    drafters: Sequence[str],
    prompts: Sequence[BenchPrompt],
    settings: Sequence[SamplingParams],
    together: int,
    watch: Callable[[ComparedText], None] = lambda text: None,
) -> list[ComparedText]:
    """Generates every prompt's text with each drafter and without.

    Args:
        llm: the model.
        drafters: names, as for `bench compare`; plain decoding is always run.
        prompts: those that do not fit the context with their answer are left out.
        settings: parameters to do it with; a seed where sampled.
        together: requests that run at once.
        watch: told each text.

    Raises:
        ConfigError: no prompt fits the context.
    """
    room = llm.engine.max_length - max(one.max_tokens or 1 for one in settings)
    encoded = [(prompt, prompt.encode(llm.tokenizer)) for prompt in prompts]
    fitting = [(prompt, ids) for prompt, ids in encoded if len(ids) <= room]
    if not fitting:
        raise ConfigError(f"no prompt fits the context of {llm.engine.max_length} with its answer")
    answers: dict[tuple[int, ...], list[int]] = {}
    names = [name for name in dict.fromkeys(drafters) if name != "none"]
    engines = {name: llm.make_engine(make_drafter(name, llm, answers)) for name in ("none", *names)}
    texts: list[ComparedText] = []
    try:
        for params in settings:
            for start in range(0, len(fitting), together):
                group = fitting[start : start + together]
                for text in _compare(llm, engines, group, params, answers):
                    watch(text)
                    texts.append(text)
    finally:
        for engine in engines.values():
            engine.close()
    return texts


def _compare(
    llm: LLM,
    engines: dict[str, Engine],
    group: Sequence[tuple[BenchPrompt, list[int]]],
    params: SamplingParams,
    answers: dict[tuple[int, ...], list[int]],
) -> Iterator[ComparedText]:
    asked = [ids for _, ids in group]
    plain = [seq.output_ids for seq in _generate(engines["none"], asked, params)]
    for ids, text in zip(asked, plain, strict=True):
        answers[tuple(ids)] = [*ids, *text]
    for name, engine in engines.items():
        if name == "none":
            continue
        seqs = _generate(engine, asked, params)
        for (prompt, ids), text, seq in zip(group, plain, seqs, strict=True):
            yield ComparedText(
                prompt=prompt.id,
                kind=prompt.kind,
                drafter=name,
                temperature=params.temperature,
                num_tokens=len(text),
                num_draft_tokens=seq.metrics.num_draft_tokens,
                num_accepted_tokens=seq.metrics.num_accepted_tokens,
                difference=explain(llm.model, llm.pool, ids, text, seq.output_ids, params),
            )


def _generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[EngineSequence]:
    """The ended requests. Nothing of them stays cached: the engines share one pool."""
    seqs = [engine.add(prompt, params) for prompt in prompts]
    try:
        while not all(seq.finished for seq in seqs):
            engine.step()
    finally:
        for seq in seqs:
            engine.abort(seq)
        engine.prefix.clear()
    return seqs


def summarise(texts: Sequence[ComparedText]) -> list[DifferenceRate]:
    """One line for each drafter and temperature."""
    lines = []
    for key in dict.fromkeys((text.temperature, text.drafter) for text in texts):
        own = [text for text in texts if (text.temperature, text.drafter) == key]
        different = sum(text.difference is not None for text in own)
        lines.append(
            DifferenceRate(
                drafter=key[1],
                temperature=key[0],
                num_texts=len(own),
                num_tokens=sum(text.num_tokens for text in own),
                num_draft_tokens=sum(text.num_draft_tokens for text in own),
                num_accepted_tokens=sum(text.num_accepted_tokens for text in own),
                num_different=different,
                rate=different / len(own),
                rate_below=upper_bound(different, len(own)),
            )
        )
    return lines


def upper_bound(hits: int, trials: int) -> float:
    """Upper end of the one-sided 95 % Wilson interval of a share.

    Args:
        hits: how often it happened.
        trials: how often it could have; at least 1.
    """
    share, square = hits / trials, _Z * _Z
    middle = share + square / (2 * trials)
    spread = _Z * sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    return min(1.0, (middle + spread) / (1 + square / trials))
