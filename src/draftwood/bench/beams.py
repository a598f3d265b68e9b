"""Beam search beside transformers': the same weights, dtype and prompts, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from draftwood.bench.contenders import TRANSFORMERS
from draftwood.bench.fingerprint import Neighbours
from draftwood.bench.intervals import Estimate, estimate, middle
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from draftwood.models.sources import ModelFiles
from draftwood.sampling import SamplingParams

OURS = "draftwood"


@dataclass(frozen=True, slots=True)
class BeamPrompt:
    """What is continued.

    Attributes:
        id, kind: of the prompt.
        token_ids: of it.
    """

    id: str
    kind: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamRun:
    """One `beams` line: a prompt searched by one of the two.

    Attributes:
        prompt, kind: which.
        contender: "draftwood" or "transformers".
        order: its turn, 0 or 1.
        num_prompt_tokens, num_tokens: lengths; of the best text.
        total_s: seconds of the whole search, the prompt included.
        score: of the best text.
        identical: its tokens are those of the other one.
        neighbours: cores that other processes kept busy meanwhile; None where it is not known.
    """

    prompt: str
    kind: str
    contender: str
    order: int
    num_prompt_tokens: int
    num_tokens: int
    total_s: float
    score: float
    identical: bool
    neighbours: float | None

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        return {"type": "beams", **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSummary:
    """The `beams_summary` line.

    Attributes:
        num_beams: how many.
        tokens_per_s, transformers_tokens_per_s: of the best text, prompts included; medians.
        ratio: transformers' seconds over ours; the median over prompts.
        worst: the smallest of these.
        num_prompts, num_identical: prompts, and those whose best texts are the same.
        neighbours: cores that other processes kept busy, the median; None where it is not known.
    """

    num_beams: int
    tokens_per_s: float
    transformers_tokens_per_s: float
    ratio: Estimate
    worst: float
    num_prompts: int
    num_identical: int
    neighbours: float | None

    def to_json(self) -> dict[str, Any]:
        """The line's fields."""
        return {"type": "beams_summary", **asdict(self)}


@dataclass(frozen=True, slots=True)
class _Found:
    token_ids: tuple[int, ...]
    score: float
    seconds: float
    neighbours: float | None


class Beams:
    """Both searches.

    Args:
        llm: ours.
        module: a `PreTrainedModel` with the same weights, as transformers runs it.
        params: of every prompt, with `num_beams`.
    """

    def __init__(self, llm: LLM, module: Any, params: SamplingParams) -> None:
        self._llm, self._module, self._params = llm, module, params

    @classmethod
    def load(cls, llm: LLM, files: ModelFiles, params: SamplingParams) -> Beams:
        """Loads the model a second time, for transformers."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # it would break ours
        spec = llm.model.spec
        module = AutoModelForCausalLM.from_pretrained(
            files.path, dtype=spec.dtype, local_files_only=True
        )
        return cls(llm, module.to(spec.device).eval(), params)

    def measure(
        self,
        prompts: Sequence[BeamPrompt],
        on_run: Callable[[BeamRun], None] = lambda run: None,
        watch: Callable[[str, str], None] = lambda prompt, contender: None,
    ) -> list[BeamRun]:
        """Searches for every prompt, both in turns; who goes first alternates.

        Args:
            prompts: those that do not fit are left out.
            on_run: told the runs of a prompt when both are there.
            watch: told (prompt id, contender) before each run.

        Raises:
            ConfigError: no prompt fits.
        """
        room = self._llm.engine.max_length - (self._params.max_tokens or 1)
        fit = [prompt for prompt in prompts if len(prompt.token_ids) <= room]
        if not fit:
            raise ConfigError(f"no prompt fits the context with {self._params.max_tokens} tokens")
        searches = {OURS: self._ours, TRANSFORMERS: self._theirs}
        for search in searches.values():
            search(fit[0].token_ids[:16])  # warm
        runs: list[BeamRun] = []
        for turn, prompt in enumerate(fit):
            names = list(searches)[:: 1 if turn % 2 == 0 else -1]
            found = {}
            for name in names:
                watch(prompt.id, name)
                found[name] = searches[name](prompt.token_ids)
            for run in _runs(prompt, found):
                runs.append(run)
                on_run(run)
        return runs

    def _ours(self, token_ids: Sequence[int]) -> _Found:
        self._llm.engine.prefix.clear()
        others, begin = Neighbours(), perf_counter()
        [output] = self._llm.generate([list(token_ids)], self._params)
        seconds = perf_counter() - begin
        assert output.score is not None
        return _Found(tuple(output.token_ids), output.score, seconds, others.cores())

    def _theirs(self, token_ids: Sequence[int]) -> _Found:
        from transformers import GenerationConfig

        params, eos = self._params, sorted(self._llm.tokenizer.eos_token_ids)
        config = GenerationConfig(
            do_sample=False,
            num_beams=params.num_beams,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_new_tokens=params.max_tokens,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        ids = torch.tensor([list(token_ids)], device=self._module.device)
        others, begin = Neighbours(), perf_counter()
        found = self._module.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        seconds = perf_counter() - begin
        row = found.sequences[0, len(token_ids) :].tolist()
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        score = float(found.sequences_scores[0])
        return _Found(tuple(row[:end]), score, seconds, others.cores())


def _runs(prompt: BeamPrompt, found: dict[str, _Found]) -> list[BeamRun]:
    same = len({one.token_ids for one in found.values()}) == 1
    return [
        BeamRun(
            prompt=prompt.id,
            kind=prompt.kind,
            contender=name,
            order=order,
            num_prompt_tokens=len(prompt.token_ids),
            num_tokens=len(one.token_ids),
            total_s=one.seconds,
            score=one.score,
            identical=same,
            neighbours=one.neighbours,
        )
        for order, (name, one) in enumerate(found.items())
    ]


def summarise(runs: Sequence[BeamRun], num_beams: int) -> BeamSummary:
    """The summary of at least one prompt."""
    own = {run.prompt: run for run in runs if run.contender == OURS}
    theirs = {run.prompt: run for run in runs if run.contender == TRANSFORMERS}
    ratios = [theirs[prompt].total_s / run.total_s for prompt, run in own.items()]
    busy = [run.neighbours for run in runs if run.neighbours is not None]
    return BeamSummary(
        num_beams=num_beams,
        tokens_per_s=median(run.num_tokens / run.total_s for run in own.values()),
        transformers_tokens_per_s=median(run.num_tokens / run.total_s for run in theirs.values()),
        ratio=estimate(ratios, middle),
        worst=min(ratios),
        num_prompts=len(own),
        num_identical=sum(run.identical for run in own.values()),
        neighbours=median(busy) if busy else None,
    )
