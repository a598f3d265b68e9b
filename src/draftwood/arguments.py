"""What users give to an `LLM`, checked and brought into form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from draftwood.config import EngineConfig
from draftwood.draft.base import Drafter
from draftwood.errors import ConfigError
from draftwood.sampling import SamplingParams

Prompt = str | Sequence[int]


def drafter_choice(drafter: str | Drafter | None, draft: str | None) -> str | Drafter:
    """Who drafts; raises ConfigError where that does not go with the draft model."""
    if drafter is None:
        return "auto"
    if drafter == "model" and draft is None:
        raise ConfigError("drafter 'model' needs a draft model: give draft=")
    if draft is not None and drafter not in ("auto", "model"):
        raise ConfigError(
            f"a draft model is given but drafter is {drafter!r}: use 'auto' or 'model'"
        )
    return drafter


def with_given(config: EngineConfig, **given: Any) -> EngineConfig:
    """The settings with what was given, which is what is not None."""
    return replace(config, **{name: value for name, value in given.items() if value is not None})


def device_of(name: str | None) -> torch.device:
    """The device of that name, CUDA for None where there is one; raises ConfigError."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}: use cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}: cpu and cuda are supported")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but this PyTorch sees no CUDA device")
    return device


def dtype_of(name: str | None) -> torch.dtype | None:
    """The type of that name, None for "auto"; raises ConfigError."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is None or name == "auto":
        return None
    if name not in known:
        raise ConfigError(f"dtype is {name!r}: use one of {', '.join(known)}")
    return known[name]


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; one alone counts as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def spread(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: Sequence[Prompt]
) -> list[SamplingParams]:
    """Parameters for each prompt; raises ConfigError if there are some and not as many."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ConfigError(f"{len(params)} params for {len(prompts)} prompts: give one or as many")
    return list(params)
