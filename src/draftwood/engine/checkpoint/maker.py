"""Who made a checkpoint: it goes on only where the same text would come out."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.metadata import version

import torch

import draftwood
from draftwood.errors import CheckpointError
from draftwood.models.base import ModelSpec


@dataclass(frozen=True, slots=True)
class Maker:
    """All that a text depends on besides its request. Weights are named, never copied.

    Attributes:
        draftwood: version of this package.
        model: the target's name, for people; it may have moved.
        weights: the target's fingerprint.
        quantization, dtype: how it computes.
        arithmetic: processor and packages whose last bits may differ.
        draft: identity of the draft model, for people; it changes no text.
    """

    draftwood: str
    model: str
    weights: str
    quantization: str
    dtype: str
    arithmetic: str
    draft: str = ""

    @classmethod
    def of(cls, spec: ModelSpec, draft: str = "") -> Maker:
        """This process with this model."""
        kind = spec.device.type
        kernels = torch.backends.cpu.get_cpu_capability() if kind == "cpu" else torch.version.cuda
        return cls(
            draftwood=draftwood.__version__,
            model=spec.name,
            weights=spec.fingerprint,
            quantization=spec.quantization,
            dtype=str(spec.dtype).removeprefix("torch."),
            arithmetic=f"{kind} {kernels}, torch {version('torch')}, "
            f"transformers {version('transformers')}",
            draft=draft,
        )

    def check(self, other: Maker, where: str) -> None:
        """Whether what `other` began can go on here.

        Raises:
            CheckpointError: it cannot; says in which point the two differ.
        """
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name in ("model", "draft") or mine == theirs:
                continue
            what = {"weights": "a model with other weights", "draftwood": "another version"}
            raise CheckpointError(
                f"the checkpoint in {where} is of {what.get(field.name, 'another ' + field.name)}: "
                f"{_shown(other, field.name)} there, {_shown(self, field.name)} here; use it as it "
                "was made, or another folder"
            )


def _shown(maker: Maker, name: str) -> str:
    value = getattr(maker, name)
    return f"{maker.model} ({value})" if name == "weights" else str(value)
