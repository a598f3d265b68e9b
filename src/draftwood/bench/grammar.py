"""What structured output costs: time a token with a grammar, over that of free text.

Free text goes on to the same number of tokens, whatever it says. With the grammar the text ends
where it is complete, and tokens that the grammar leaves no choice about come for free; time a
round tells what the mask itself costs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from draftwood.bench.contenders import PLAIN, EngineContender
from draftwood.bench.data import BenchPrompt
from draftwood.bench.fingerprint import Neighbours
from draftwood.bench.intervals import Estimate, estimate, middle
from draftwood.bench.records import Run
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams

# Long enough that the tokens run out first; most of it is for the model to find.
SCHEMA: Mapping[str, Any] = {
    "type": "array",
    "minItems": 8,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "description": {"type": "string"},
            "year": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["name", "description", "year", "tags"],
        "additionalProperties": False,
    },
}
_THINGS = (
    *("rivers", "planets", "novels", "inventions", "cities", "animals"),
    *("dishes", "composers", "bridges", "sports", "languages", "mountains"),
)
# What JSON may have at a place; its beginnings are no mistake at the end of a text.
_BEGUN = ("true", "false", "null", "-", ".", "e+", "e-", "E+", "E-")


def table_prompts() -> list[BenchPrompt]:
    """Twelve questions for a table as JSON."""
    return [BenchPrompt(thing, "table", (_question(thing),), chat=True) for thing in _THINGS]


def _question(thing: str) -> str:
    return (
        f"List ten {thing} as a JSON array of objects with the keys name, description, year and"
        " tags."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarRun:
    """One `grammar` line: a prompt, with or without the grammar.

    Attributes:
        prompt: its id.
        drafter: "plain" or the drafter's name.
        grammar: whether the grammar was there.
        order: its turn, from 0.
        num_tokens: generated.
        decode_s: seconds behind the first token.
        num_rounds: rounds that decoded, the one of the first token among them.
        identical: the text is that of plain decoding with the same grammar, or without; None for
            plain decoding.
        in_form: as far as the text goes it has the form; None without the grammar.
        neighbours: cores that other processes kept busy meanwhile; None where it is not known.
    """

    prompt: str
    drafter: str
    grammar: bool
    order: int
    num_tokens: int
    decode_s: float
    num_rounds: int
    identical: bool | None
    in_form: bool | None
    neighbours: float | None

    @property
    def per_token_s(self) -> float:
        """Seconds a token behind the first."""
        return self.decode_s / (self.num_tokens - 1)

    @property
    def per_round_s(self) -> float:
        """Seconds a round behind the first."""
        return self.decode_s / (self.num_rounds - 1)

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        return {"type": "grammar", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSummary:
    """One `grammar_summary` line: a way to decode.

    Attributes:
        drafter: "plain" or the drafter's name.
        free_ms, grammar_ms: milliseconds a token, medians over prompts.
        per_token: time a token with the grammar over without; the median over prompts.
        per_round: the same of a round.
        num_prompts: compared.
        num_identical, num_compared: texts with the grammar that are plain decoding's.
        num_in_form: texts that have the form.
        neighbours: cores that other processes kept busy, the median; None where it is not known.
    """

    drafter: str
    free_ms: float
    grammar_ms: float
    per_token: Estimate
    per_round: Estimate
    num_prompts: int
    num_identical: int
    num_compared: int
    num_in_form: int
    neighbours: float | None

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        return {"type": "grammar_summary", **asdict(self)}


def measure(
    llm: LLM,
    drafters: Sequence[str],
    prompts: Sequence[BenchPrompt],
    schema: Mapping[str, Any],
    max_tokens: int,
    on_run: Callable[[GrammarRun], None] = lambda run: None,
    watch: Callable[[str, str], None] = lambda prompt, contender: None,
) -> list[GrammarRun]:
    """Generates every prompt in every way, with and without the grammar, all in turns.

    Args:
        llm: the model.
        drafters: names; plain decoding takes part in any case.
        prompts: those that do not fit are left out.
        schema: a JSON schema.
        max_tokens: of a text.
        on_run: told the runs of a prompt when all are there.
        watch: told (prompt id, way) before each run.

    Raises:
        ConfigError: no prompt fits, or the schema cannot be used.
        MissingExtraError: llguidance is not installed.
    """
    free = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    form = SamplingParams(
        max_tokens=max_tokens, structured={"json": schema, "disable_any_whitespace": True}
    )
    encoded = [(prompt.id, prompt.encode(llm.tokenizer)) for prompt in prompts]
    fit = [(name, ids) for name, ids in encoded if len(ids) + max_tokens <= llm.engine.max_length]
    if not fit:
        raise ConfigError(f"no prompt fits the context with {max_tokens} tokens")
    names = dict.fromkeys(["none", *drafters])
    ways = [
        (EngineContender(PLAIN if n == "none" else n, llm.make_engine(llm.make_drafter(n))), params)
        for n in names
        for params in (free, form)
    ]
    for contender, params in ways:
        contender.run(fit[0][1][:8], params.but(max_tokens=8))  # warm; the grammar is compiled
    runs: list[GrammarRun] = []
    for turn, (prompt, ids) in enumerate(fit):
        first = turn % len(ways)
        results = {}
        for contender, params in (*ways[first:], *ways[:first]):
            watch(prompt, contender.name)
            others = Neighbours()
            run = contender.run(ids, params)
            results[contender.name, params is form] = (run, others.cores())
        for one in _runs(llm, prompt, results):
            runs.append(one)
            on_run(one)
    return runs


def _runs(
    llm: LLM, prompt: str, results: Mapping[tuple[str, bool], tuple[Run, float | None]]
) -> list[GrammarRun]:
    return [
        GrammarRun(
            prompt=prompt,
            drafter=name,
            grammar=grammar,
            order=order,
            num_tokens=len(run.token_ids),
            decode_s=run.total_s - run.first_token_s,
            num_rounds=run.rounds.num_rounds,
            identical=None
            if name == PLAIN
            else run.token_ids == results[PLAIN, grammar][0].token_ids,
            in_form=_in_form(llm.tokenizer.decode(run.token_ids)) if grammar else None,
            neighbours=neighbours,
        )
        for order, ((name, grammar), (run, neighbours)) in enumerate(results.items())
        if run.rounds is not None and run.rounds.num_rounds > 1
    ]


def _in_form(text: str) -> bool:
    """Whether the text is JSON, or the beginning of it: what is cut off fails at its end alone."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        escape = "escape" in error.msg and len(rest) < len(r"\\u0000")
        word = any(word.startswith(rest) for word in _BEGUN)
        return escape or word or "Unterminated string" in error.msg
    return True


def summarise(runs: Sequence[GrammarRun]) -> list[GrammarSummary]:
    """A line for each way to decode."""
    return [_line([r for r in runs if r.drafter == name]) for name in _names(runs)]


def _names(runs: Sequence[GrammarRun]) -> list[str]:
    return sorted({run.drafter for run in runs}, key=lambda name: (name != PLAIN, name))


def _line(own: Sequence[GrammarRun]) -> GrammarSummary:
    form = {run.prompt: run for run in own if run.grammar}
    free = {run.prompt: run for run in own if not run.grammar and run.prompt in form}
    form = {prompt: run for prompt, run in form.items() if prompt in free}
    compared = [run for run in form.values() if run.identical is not None]
    busy = [run.neighbours for run in own if run.neighbours is not None]
    return GrammarSummary(
        drafter=own[0].drafter,
        free_ms=1000 * median(run.per_token_s for run in free.values()),
        grammar_ms=1000 * median(run.per_token_s for run in form.values()),
        per_token=estimate([form[p].per_token_s / free[p].per_token_s for p in form], middle),
        per_round=estimate([form[p].per_round_s / free[p].per_round_s for p in form], middle),
        num_prompts=len(form),
        num_identical=sum(bool(run.identical) for run in compared),
        num_compared=len(compared),
        num_in_form=sum(bool(run.in_form) for run in form.values()),
        neighbours=median(busy) if busy else None,
    )
