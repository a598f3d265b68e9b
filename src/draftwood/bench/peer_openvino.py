"""OpenVINO GenAI as a peer, where it is installed: plain, with prompt lookup, with a draft model.

It reads a folder in OpenVINO's own format, or a `.gguf` of the kinds it knows; a draft model only
from a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from draftwood.bench.peers import Absence, Peer, short
from draftwood.bench.records import Run
from draftwood.cache import human_bytes
from draftwood.errors import CapacityError, ModelError
from draftwood.models.memory import available_bytes
from draftwood.sampling import SamplingParams

OPENVINO = "openvino"
HOW_TO_GET = "OpenVINO GenAI is not installed:  pip install openvino-genai"

_DEVICE = "CPU"
_DRAFT_TOKENS = 3
_LOOKUP_TOKENS, _LOOKUP_NGRAM = 5, 3
# It converts the weights while it reads them, and compiles from a copy.
_MEMORY_PER_WEIGHTS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVinoSettings:
    """What OpenVINO GenAI is asked to do.

    Attributes:
        weights: a folder in its format or a `.gguf`.
        draft: a folder in its format.
        threads: of the CPU.
        prompts: ids of the prompts to run; None for all.
    """

    weights: Path
    draft: Path | None
    threads: int
    prompts: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class _Way:
    name: str
    pipeline: Callable[[Any], dict[str, Any]]
    generation: dict[str, int]


def openvino_peers(settings: OpenVinoSettings) -> Iterator[Peer | Absence]:
    """One pipeline for each way; those that cannot be made are absences."""
    try:
        genai, openvino = import_module("openvino_genai"), import_module("openvino")
    except ImportError:
        yield Absence(OPENVINO, HOW_TO_GET)
        return
    for way in _ways(settings):
        try:
            _check_memory(settings.weights)
            pipeline = _make(genai, settings, way)
        except (CapacityError, RuntimeError, OSError, ValueError) as error:
            yield Absence(way.name, short(error))
            continue
        facts = {
            "version": str(genai.__version__),
            "weights": settings.weights.name,
            "options": way.generation,
            "threads": settings.threads,
        }
        contender = OpenVinoContender(way.name, pipeline, genai, openvino, way.generation)
        yield Peer(contender=contender, system=OPENVINO, prompts=settings.prompts, facts=facts)


def _ways(settings: OpenVinoSettings) -> Iterator[_Way]:
    yield _Way(OPENVINO, lambda _: {}, {})
    yield _Way(
        f"{OPENVINO} lookup",
        lambda _: {"prompt_lookup": True},
        {"num_assistant_tokens": _LOOKUP_TOKENS, "max_ngram_size": _LOOKUP_NGRAM},
    )
    if (draft := settings.draft) is not None:
        yield _Way(
            f"{OPENVINO} draft-{_DRAFT_TOKENS}",
            lambda genai: {"draft_model": genai.draft_model(str(draft), _DEVICE)},
            {"num_assistant_tokens": _DRAFT_TOKENS},
        )


def _make(genai: Any, settings: OpenVinoSettings, way: _Way) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    return genai.LLMPipeline(
        str(settings.weights),
        _DEVICE,
        scheduler_config=scheduler,
        INFERENCE_NUM_THREADS=settings.threads,
        **way.pipeline(genai),
    )


def _check_memory(weights: Path) -> None:
    files = weights.glob("*.bin") if weights.is_dir() else [weights]
    need = int(_MEMORY_PER_WEIGHTS * sum(file.stat().st_size for file in files))
    free = available_bytes(torch.device("cpu"))
    if need > free:
        raise CapacityError(
            f"it needs about {human_bytes(need)} of memory and {human_bytes(free)} are free: "
            "leave it out with --no-openvino"
        )


class OpenVinoContender:
    """A pipeline of OpenVINO GenAI.

    Args:
        name: what tables call it.
        pipeline: an `LLMPipeline`.
        genai, openvino: the two modules.
        generation: further fields of its `GenerationConfig`.
    """

    def __init__(
        self, name: str, pipeline: Any, genai: Any, openvino: Any, generation: dict[str, int]
    ) -> None:
        self.name = name
        self._pipeline, self._genai, self._openvino = pipeline, genai, openvino
        self._generation = generation

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> Run:
        """See `Contender.run`."""
        config = self._pipeline.get_generation_config()
        config.do_sample, config.max_new_tokens = False, params.max_tokens
        config.repetition_penalty = 1.0
        config.apply_chat_template = False
        config.ignore_eos = params.ignore_eos
        for key, value in self._generation.items():
            setattr(config, key, value)
        ids = torch.tensor([list(prompt_ids)]).numpy()
        inputs = self._genai.TokenizedInputs(
            self._openvino.Tensor(ids), self._openvino.Tensor(ids * 0 + 1)
        )
        begin, cpu = perf_counter(), process_time()
        try:
            result = self._pipeline.generate(inputs, config)
        except (RuntimeError, ValueError) as error:
            raise ModelError(short(error)) from error
        total, cpu = perf_counter() - begin, process_time() - cpu
        return Run(
            token_ids=tuple(int(token) for token in result.tokens[0]),
            first_token_s=min(result.perf_metrics.get_ttft().mean / 1000, total),
            total_s=total,
            cpu_s=cpu,
        )

    def view(self) -> dict[str, Any]:
        """Nothing beyond its speed."""
        return {}
