"""One model, many ways to decode, in one process: every prompt is given to each in turn.

The order rotates from prompt to prompt, so that a machine that slows down or is busy with something
else for a while treats all alike. Each drafter keeps one engine for the whole run, as it would in
use, and no KV of a prompt is ever reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from draftwood.bench.contenders import (
    PLAIN,
    Contender,
    EngineContender,
    TransformersContender,
)
from draftwood.bench.data import BenchPrompt
from draftwood.bench.difference import Difference, explain
from draftwood.bench.fingerprint import Neighbours
from draftwood.bench.records import Run, RunRecord
from draftwood.draft.base import Drafter
from draftwood.draft.synthetic import OracleDrafter, RandomDrafter
from draftwood.errors import ConfigError, DraftwoodError
from draftwood.llm import LLM
from draftwood.models.sources import resolve
from draftwood.sampling import SamplingParams
from draftwood.text import Tokenizer

_WARM_UP = "the"
_WARM_UP_TOKENS = 8

Answers = dict[tuple[int, ...], list[int]]
Watch = Callable[[str, str], None]


class Encodable(Protocol):
    """A prompt that has a name, belongs to a kind, and becomes token ids."""

    @property
    def id(self) -> str:
        """Unique in a run."""

    @property
    def kind(self) -> str:
        """What results are grouped by."""

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Its token ids."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A prompt that was not run.

    Attributes:
        prompt: its id.
        reason: why not.
    """

    prompt: str
    reason: str


@dataclass(slots=True)
class Comparison:
    """A run in progress, and what has come of it.

    Attributes:
        llm: the model under test, and the judge of differences.
        contenders: who takes part; one of them is plain decoding.
        params: for every prompt.
        answers: what plain decoding said, by prompt token ids.
        records, skipped: results so far.
        interrupted: the user stopped it.
    """

    llm: LLM
    contenders: Sequence[Contender]
    params: SamplingParams
    answers: Answers = field(default_factory=dict)
    records: list[RunRecord] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    interrupted: bool = False

    def warm_up(self) -> None:
        """Lets every contender pay for its first run."""
        prompt_ids = self.llm.tokenizer.encode(_WARM_UP)
        params = self.params.but(max_tokens=_WARM_UP_TOKENS)
        for contender in self._in_order(0):
            self._answer(contender, contender.run(prompt_ids, params), prompt_ids)

    def start(
        self,
        prompts: Iterable[BenchPrompt],
        on_record: Callable[[RunRecord | Skip], None],
        watch: Watch,
    ) -> None:
        """Warms up and runs all prompts; an interrupt ends it with what is done so far.

        Args:
            prompts: in this order.
            on_record: told each result as soon as its comparison with plain decoding is known.
            watch: told (prompt id, contender) before each run.
        """
        try:
            self.warm_up()
            for turn, prompt in enumerate(prompts):
                for result in self.run_prompt(turn, prompt, watch):
                    on_record(result)
                if self.interrupted:
                    return
        except KeyboardInterrupt:
            self.interrupted = True

    def run_prompt(self, turn: int, prompt: Encodable, watch: Watch) -> Sequence[RunRecord | Skip]:
        """Gives one prompt to every contender; an interrupt leaves those that are done.

        Args:
            turn: number of the prompt; it says who goes first.
            prompt: what to generate for.
            watch: told (prompt id, contender) before each run.
        """
        runs: dict[str, Run] = {}
        neighbours: dict[str, float | None] = {}
        prompt_ids: list[int] = []
        try:
            prompt_ids = prompt.encode(self.llm.tokenizer)
            self._check_room(prompt_ids)
            for contender in self._in_order(turn):
                watch(prompt.id, contender.name)
                others = Neighbours()
                run = contender.run(prompt_ids, self.params)
                neighbours[contender.name] = others.cores()
                self._answer(contender, run, prompt_ids)
                runs[contender.name] = run
        except DraftwoodError as error:
            self.skipped.append(Skip(prompt.id, str(error)))
            return [self.skipped[-1]]
        except KeyboardInterrupt:
            self.interrupted = True
        records = [
            replace(
                self._record(prompt, prompt_ids, name, runs),
                order=order,
                neighbours=neighbours[name],
            )
            for order, name in enumerate(runs)
        ]
        self.records.extend(records)
        return records

    def _check_room(self, prompt_ids: Sequence[int]) -> None:
        """Refuses here what only some contenders would."""
        limit, wanted = self.llm.engine.max_length, self.params.max_tokens or 1
        if len(prompt_ids) + wanted > limit:
            raise ConfigError(
                f"{len(prompt_ids)} prompt tokens and {wanted} new ones do not fit the context of "
                f"{limit}"
            )

    def _in_order(self, turn: int) -> list[Contender]:
        """The contenders of this turn; who must know plain decoding's answer comes after it."""
        start = turn % len(self.contenders)
        order = [*self.contenders[start:], *self.contenders[:start]]
        names = [contender.name for contender in order]
        if "oracle" in names and names.index("oracle") < names.index(PLAIN):
            oracle = order.pop(names.index("oracle"))
            order.insert(names.index(PLAIN), oracle)
        return order

    def _answer(self, contender: Contender, run: Run, prompt_ids: Sequence[int]) -> None:
        if contender.name == PLAIN:
            self.answers[tuple(prompt_ids)] = [*prompt_ids, *run.token_ids]

    def _record(
        self,
        prompt: Encodable,
        prompt_ids: Sequence[int],
        name: str,
        runs: dict[str, Run],
    ) -> RunRecord:
        run, plain = runs[name], runs.get(PLAIN)
        difference = self._difference(prompt_ids, plain, run)
        return RunRecord(
            prompt=prompt.id,
            kind=prompt.kind,
            contender=name,
            order=0,
            num_prompt_tokens=len(prompt_ids),
            num_tokens=len(run.token_ids),
            first_token_s=run.first_token_s,
            total_s=run.total_s,
            cpu_s=run.cpu_s,
            rounds=run.rounds,
            identical=None if plain is None else difference is None,
            difference=difference,
        )

    def _difference(
        self, prompt_ids: Sequence[int], plain: Run | None, run: Run
    ) -> Difference | None:
        if plain is None or plain is run:
            return None
        return explain(
            self.llm.model,
            self.llm.pool,
            prompt_ids,
            plain.token_ids,
            run.token_ids,
            self.params,
        )


def make_comparison(
    llm: LLM,
    model: str,
    drafters: Sequence[str],
    params: SamplingParams,
    *,
    transformers: bool,
) -> Comparison:
    """Sets up the contenders: transformers if wanted, plain decoding always, each drafter.

    Args:
        llm: the model; with a draft model if "model" is among the drafters.
        model: its name, to load it again for transformers.
        drafters: names; "none" is plain decoding.
        params: for every prompt; with a seed if sampled.
        transformers: `transformers.generate` takes part; it cannot where tokens are sampled, as
            its noise is not ours.
    """
    answers: Answers = {}
    contenders: list[Contender] = []
    if transformers and params.greedy:
        eos = frozenset() if params.ignore_eos else llm.tokenizer.eos_token_ids
        spec = llm.model.spec
        contenders.append(TransformersContender.load(resolve(model), spec.device, spec.dtype, eos))
    for name in dict.fromkeys(["none", *drafters]):
        engine = llm.make_engine(make_drafter(name, llm, answers))
        contenders.append(EngineContender(PLAIN if name == "none" else name, engine))
    return Comparison(llm, contenders, params, answers)


def make_drafter(name: str, llm: LLM, answers: Answers) -> Drafter:
    """The drafter called `name`: a registered one, "random" or "oracle".

    Raises:
        ConfigError: there is none.
    """
    if name == "random":
        return RandomDrafter(llm.model.spec.vocab_size)
    if name == "oracle":
        return OracleDrafter(answers)
    return llm.make_drafter(name)
