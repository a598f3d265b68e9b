"""Who takes part: our engine with some drafter, or another program. All speak in token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any, Protocol

import torch
from torch import Tensor

from draftwood.bench.records import Rounds, Run
from draftwood.engine.engine import Engine
from draftwood.engine.observers import Round, RoundTimer
from draftwood.engine.sequence import Sequence as EngineSequence
from draftwood.models.sources import ModelFiles
from draftwood.sampling import SamplingParams

PLAIN = "plain"
TRANSFORMERS = "transformers"


class Contender(Protocol):
    """Generates, one prompt at a time."""

    @property
    def name(self) -> str:
        """What the tables call it."""

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> Run:
        """Generates for a prompt, measured. Interrupted, it leaves nothing behind."""

    def view(self) -> dict[str, Any]:
        """What else is worth recording about it at the end, ready for JSON."""


class EngineContender:
    """Our engine with one drafter, which stays warm from prompt to prompt.

    Args:
        name: what the tables call it.
        engine: its own; the KV of a prompt is never reused, neither from itself nor from others.
    """

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> Run:
        """See `Contender.run`."""
        timer, depths = RoundTimer(), DepthCounter()
        self.engine.observers[:] = [timer, depths]
        self.engine.prefix.clear()
        begin, cpu = perf_counter(), process_time()
        seq = self.engine.add(prompt_ids, params)
        try:
            while not seq.finished:
                self.engine.step()
            end, cpu = perf_counter(), process_time() - cpu
        finally:
            self.engine.close()
            self.engine.observers.clear()
        return _engine_run(seq, begin, end, cpu, timer, depths)

    def view(self) -> dict[str, Any]:
        """The controller's state: what it believes rows to cost, and the sizes it chose."""
        failures = self.engine.drafter.num_failures
        return {**self.engine.controller.view(), "num_drafter_failures": failures}


@dataclass(slots=True)
class DepthCounter:
    """Counts how deep trees reached and how deep they were accepted. An engine observer."""

    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def on_round(self, round_: Round) -> None:
        """Counts a round that decoded."""
        for outcome in round_.outcomes:
            _count(self.proposed, max(outcome.tree.depths))
            _count(self.accepted, min(outcome.verdict.num_accepted, len(outcome.tokens)))


class TransformersContender:
    """`transformers.generate` as anyone would call it, greedy.

    Args:
        module: a `PreTrainedModel` with its default attention.
        eos_token_ids: tokens that end a text.
    """

    name = TRANSFORMERS

    def __init__(self, module: Any, eos_token_ids: frozenset[int]) -> None:
        from transformers import GenerationConfig

        self._module = module
        eos = sorted(eos_token_ids)
        # A fresh configuration: a checkpoint's own may sample or penalise repetition.
        module.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0
        )

    @classmethod
    def load(
        cls, files: ModelFiles, device: torch.device, dtype: torch.dtype, eos: frozenset[int]
    ) -> TransformersContender:
        """Loads the model a second time, untouched by ours."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # it would break ours
        module = AutoModelForCausalLM.from_pretrained(
            files.path, dtype=dtype, local_files_only=True
        )
        return cls(module.to(device).eval(), eos)

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> Run:
        """See `Contender.run`."""
        ids = torch.tensor([list(prompt_ids)], device=self._module.device)
        clock = _TokenClock()
        begin, cpu = perf_counter(), process_time()
        output: Tensor = self._module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            streamer=clock,
        )
        end, cpu = perf_counter(), process_time() - cpu
        return Run(
            token_ids=tuple(output[0, len(prompt_ids) :].tolist()),
            first_token_s=(clock.first_s or end) - begin,
            total_s=end - begin,
            cpu_s=cpu,
        )

    def view(self) -> dict[str, Any]:
        """Its attention implementation."""
        return {"attention": self._module.config._attn_implementation}


@dataclass(slots=True)
class _TokenClock:
    """Notes when the first token came: a streamer that transformers hands every token to."""

    first_s: float | None = None
    _seen_prompt: bool = False

    def put(self, value: Tensor) -> None:
        """Called with the prompt, then with each token."""
        if self._seen_prompt and self.first_s is None:
            self.first_s = perf_counter()
        self._seen_prompt = True

    def end(self) -> None:
        """Called at the end."""


def _engine_run(
    seq: EngineSequence,
    begin: float,
    end: float,
    cpu_s: float,
    timer: RoundTimer,
    depths: DepthCounter,
) -> Run:
    metrics = seq.metrics
    first = metrics.first_token_s or end
    return Run(
        token_ids=tuple(seq.output_ids),
        first_token_s=first - begin,
        total_s=end - begin,
        cpu_s=cpu_s,
        rounds=Rounds(
            num_rounds=metrics.num_rounds,
            num_draft_tokens=metrics.num_draft_tokens,
            num_accepted_tokens=metrics.num_accepted_tokens,
            proposed_per_position=tuple(depths.proposed),
            accepted_per_position=tuple(depths.accepted),
            draft_s=timer.draft_s,
            target_s=timer.target_s,
            verify_s=timer.verify_s,
            commit_s=timer.commit_s,
        ),
    )


def _count(counts: list[int], depth: int) -> None:
    """Adds one to each of the first `depth` counts."""
    counts.extend([0] * (depth - len(counts)))
    for i in range(depth):
        counts[i] += 1
