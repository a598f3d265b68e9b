"""Which form of a model to run here, and loading it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from draftwood.errors import ConfigError
from draftwood.models.base import Model
from draftwood.models.formats import Form
from draftwood.models.progress import Progress
from draftwood.models.sources import ModelFiles, peek_config, resolve

INT8_FROM_PARAMETERS = 300_000_000
"""On a CPU, models from this size on run in 8 bits unless told otherwise."""

INT4_FROM_PARAMETERS = 300_000_000
"""On a CPU, draft models from this size on run in 4 bits unless told otherwise, others in 8."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a model shall run.

    Attributes:
        device: cpu or cuda.
        dtype: None takes float32 on CPU and the checkpoint's own type elsewhere.
        quantization: "int8", "int4", "none", or None to decide by size and machine.
        max_model_len: cap on the sequence length.
        draft: it is to draft: what it says may be wrong, so the form that is fastest is taken.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    quantization: str | None = None
    max_model_len: int | None = None
    draft: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The form a model is run in, and why."""

    form: Form
    reason: str


def choose_form(name: str, placement: Placement, progress: Progress | None) -> Choice:
    """Quantised weights for large and for draft models on a CPU that can run them, else floats.

    Raises:
        ConfigError: quantised weights are asked for and cannot be had.
    """
    if placement.quantization not in (None, "none", "int8", "int4"):
        raise ConfigError(
            f"quantization is {placement.quantization!r}: use int8, int4, none, or leave it out"
        )
    if placement.quantization == "none":
        return Choice("float32", "as asked")
    config = cache(lambda: peek_config(name, progress=progress))
    obstacle = _obstacle(placement, config)
    if placement.quantization is not None:
        if obstacle:
            raise ConfigError(f"quantization {placement.quantization} cannot be had: {obstacle}")
        return Choice("int8" if placement.quantization == "int8" else "int4", "as asked")
    if obstacle:
        return Choice("float32", obstacle)
    from draftwood.models.quantised_convert import count_parameters

    count = count_parameters(config())
    if placement.draft:
        # A small model loses too much of what it knows to 4 bits, and is fast in 8.
        form: Form = "int8" if count < INT4_FROM_PARAMETERS else "int4"
        return Choice(form, "a draft model on a CPU")
    if count < INT8_FROM_PARAMETERS:
        return Choice("float32", "small enough for float32")
    return Choice("int8", f"{count / 1e6:.0f} M parameters on a CPU")


def _obstacle(placement: Placement, config: Callable[[], Any]) -> str | None:
    """Why quantised weights cannot be had, cheapest reasons first."""
    if placement.device.type != "cpu":
        return "it is for CPUs"
    if placement.dtype not in (None, torch.float32):
        return f"a dtype is given ({placement.dtype})"
    from draftwood.kernels.build import why_unavailable
    from draftwood.models.quantised_convert import why_not_quantised

    return why_unavailable() or why_not_quantised(config())


def load_model(
    name: str, placement: Placement, progress: Progress | None = None
) -> tuple[Model, ModelFiles, Choice]:
    """Finds, converts if need be, and loads a model.

    Raises:
        ModelError, ConfigError, CapacityError: see `resolve`, `load_hf` and `load_quantised`.
    """
    choice = choose_form(name, placement, progress)
    files = resolve(name, progress=progress, form=choice.form)
    model: Model
    if choice.form != "float32":
        from draftwood.models.quantised import load_quantised

        model = load_quantised(files, choice.form, max_model_len=placement.max_model_len)
    else:
        from draftwood.models.hf import load_hf

        model = load_hf(
            files,
            device=placement.device,
            dtype=placement.dtype,
            max_model_len=placement.max_model_len,
        )
    return model, files, choice
