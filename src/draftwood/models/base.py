"""What the engine knows of a model."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from typing import Protocol

import torch
from torch import Tensor

from draftwood.attention import Batch
from draftwood.kv import KVSpec, Plane

_KV_FORMAT = 1
"""Raised when a release computes or lays out KV in another way."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts about a loaded model.

    Attributes:
        name: what the user called it.
        fingerprint: changes whenever its KV would.
        vocab_size: width of its logits.
        max_model_len: the longest sequence its positions allow.
        num_parameters: weights, tied ones counted once.
        kv: shape of its KV.
        dtype: of its activations.
        device: where it runs.
        quantization: the scheme of its weights, or "none".
    """

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    num_parameters: int
    kv: KVSpec
    dtype: torch.dtype
    device: torch.device
    quantization: str = "none"

    @property
    def kv_identity(self) -> str:
        """Equal where KV is interchangeable: same weights, types, shapes and arithmetic.

        Two machines share KV when their processors have the same instructions; with others, or
        another version of what computes, the last bits differ, and with them perhaps a text.
        """
        kind = self.device.type
        kernels = torch.backends.cpu.get_cpu_capability() if kind == "cpu" else torch.version.cuda
        facts = (
            _KV_FORMAT,
            self.fingerprint,
            self.quantization,
            self.dtype,
            (self.kv.num_layers, self.kv.num_kv_heads, self.kv.key_dim, self.kv.value_dim),
            self.kv.dtype,
            (kind, kernels, version("torch"), version("transformers")),
        )
        return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


class Model(Protocol):
    """A causal language model that can run a packed batch of trees."""

    @property
    def spec(self) -> ModelSpec:
        """Facts about the model."""

    def forward(self, batch: Batch, plane: Plane) -> Tensor:
        """Runs the batch, writing its KV to `plane`.

        Returns:
            [len(batch.logit_rows), vocab_size] float32 logits.
        """
