"""`transformers.generate` as a peer: plain, with a draft model, and with prompt lookup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftwood.bench.contenders import TRANSFORMERS, TransformersContender
from draftwood.bench.peers import Absence, Peer, short
from draftwood.bench.records import Run
from draftwood.cache import human_bytes
from draftwood.errors import CapacityError, DraftwoodError, ModelError
from draftwood.models.memory import available_bytes
from draftwood.models.sources import ModelFiles, resolve
from draftwood.sampling import SamplingParams

_LOOKUP_TOKENS = 10  # transformers' documentation takes this number


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSettings:
    """What transformers is asked to do.

    Attributes:
        model, draft: names as for our own engine.
        dtype: of the weights.
        device: ours.
        eos_token_ids: tokens that end a text.
        prompts: ids of the prompts to run; None for all.
    """

    model: str
    draft: str | None
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: frozenset[int]
    prompts: frozenset[str] | None


def transformers_peers(settings: TransformersSettings) -> Iterator[Peer | Absence]:
    """One set of weights, three ways; two without a draft model."""
    try:
        module = _load(settings, settings.model)
    except _FAILURES as error:
        yield Absence(TRANSFORMERS, short(error))
        return
    yield _peer(settings, TRANSFORMERS, module, {})
    lookup: dict[str, Any] = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}
    yield _peer(settings, f"{TRANSFORMERS} lookup", module, lookup)
    if settings.draft is None:
        return
    name = f"{TRANSFORMERS} assisted"
    try:
        assistant = _load(settings, settings.draft)
    except _FAILURES as error:
        yield Absence(name, short(error))
        return
    yield _peer(settings, name, module, {"assistant_model": assistant})


_FAILURES = (DraftwoodError, OSError, ValueError, RuntimeError)


def _load(settings: TransformersSettings, model: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    files = resolve(model)
    _check_memory(files, settings.dtype)
    logging.disable_progress_bar()  # it would break ours
    module = AutoModelForCausalLM.from_pretrained(
        files.path, dtype=settings.dtype, local_files_only=True
    )
    return module.to(settings.device).eval()


def _check_memory(files: ModelFiles, dtype: torch.dtype) -> None:
    """Checkpoints hold 16 or 32 bits a weight; those of 32 are halved for a 16-bit type."""
    need = sum(file.stat().st_size for file in files.path.glob("*.safetensors"))
    free = available_bytes(torch.device("cpu"))
    if need > free:
        kind = str(dtype).removeprefix("torch.")
        raise CapacityError(
            f"its {kind} weights need {human_bytes(need)} of memory and {human_bytes(free)} are "
            "free: leave it out with --no-transformers"
        )


def _peer(settings: TransformersSettings, name: str, module: Any, options: dict[str, Any]) -> Peer:
    facts = {
        "dtype": str(settings.dtype).removeprefix("torch."),
        "options": {key: value for key, value in options.items() if isinstance(value, int)},
    }
    contender = TransformersPeer(name, module, options, settings.eos_token_ids)
    return Peer(contender=contender, system=TRANSFORMERS, prompts=settings.prompts, facts=facts)


class TransformersPeer:
    """`transformers.generate` with some options, greedy.

    Args:
        name: what tables call it.
        module: a `PreTrainedModel`, which others may share.
        options: further arguments of `generate`.
        eos_token_ids: tokens that end a text.
    """

    def __init__(
        self, name: str, module: Any, options: dict[str, Any], eos_token_ids: frozenset[int]
    ) -> None:
        self.name = name
        self._generating = TransformersContender(_Generate(module, options), eos_token_ids)

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> Run:
        """See `Contender.run`."""
        try:
            return self._generating.run(prompt_ids, params)
        except (ValueError, RuntimeError, TypeError) as error:
            raise ModelError(short(error)) from error

    def view(self) -> dict[str, Any]:
        """See `Contender.view`."""
        return self._generating.view()


class _Generate:
    """A module whose `generate` takes more arguments, and a configuration of its own."""

    def __init__(self, module: Any, options: dict[str, Any]) -> None:
        self._module, self._options = module, options
        self.generation_config: Any = None

    @property
    def device(self) -> torch.device:
        """The module's."""
        device: torch.device = self._module.device
        return device

    @property
    def config(self) -> Any:
        """The module's."""
        return self._module.config

    def generate(self, ids: Tensor, **arguments: Any) -> Tensor:
        """The module's, with what was set aside for it."""
        output: Tensor = self._module.generate(
            ids, generation_config=self.generation_config, **arguments, **self._options
        )
        return output
