"""Llama-shaped decoders on CPU in 8 bits, or with 4-bit weights; activations in 8 bits per group.

One call into the kernels runs all layers. A row's logits have the same bits whatever other rows are
in the batch, whatever the tree, and wherever its ancestors lie, so speculation changes no text, not
even by a last bit. The weights are mapped from the cache, not read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwood.attention import Batch
from draftwood.attention.exact import layout
from draftwood.errors import ConfigError, ModelError
from draftwood.kernels.build import why_unavailable
from draftwood.kernels.decoder import (
    Decoder,
    DecoderShape,
    DecoderWeights,
    LayerWeights,
    RotaryTable,
)
from draftwood.kernels.packing import Packed, PackedInt4, PackedInt8
from draftwood.kv import KVSpec, Plane
from draftwood.models.base import ModelSpec
from draftwood.models.formats import QUANTISED_VERSION, Bits, file_name
from draftwood.models.hf import checked_length
from draftwood.models.quantised_convert import count_parameters, head_dim
from draftwood.models.sources import ModelFiles


class QuantisedModel:
    """A quantised decoder behind the `Model` protocol.

    Args:
        config: the model's transformers config.
        path: the file that `quantised_convert` made.
        bits: what is in it.
        name, fingerprint: see `ModelSpec`.
        max_model_len: cap on the sequence length; None takes the model's own.
    """

    def __init__(
        self,
        config: Any,
        path: Path,
        bits: Bits,
        *,
        name: str = "model",
        fingerprint: str = "",
        max_model_len: int | None = None,
    ) -> None:
        weights, self._rotary, group = _read(path, config.num_hidden_layers)
        shape = _shape(config)
        self._decoder = Decoder(shape, weights)
        cpu = torch.device("cpu")
        self.spec = ModelSpec(
            name=name,
            fingerprint=f"{fingerprint}:{bits}:{QUANTISED_VERSION[bits]}:{group}",
            vocab_size=weights.head.n,
            max_model_len=checked_length(config, max_model_len),
            num_parameters=count_parameters(config),
            kv=KVSpec(
                config.num_hidden_layers, shape.kv_heads, shape.dim, shape.dim, torch.float32, cpu
            ),
            dtype=torch.float32,
            device=cpu,
            quantization=bits,
        )

    def forward(self, batch: Batch, plane: Plane) -> Tensor:
        """Runs the batch; see `Model.forward`."""
        cos, sin = self._rotary.at(batch.positions)
        return self._decoder.forward(
            batch.token_ids, cos, sin, layout(batch), plane.keys, plane.values, batch.logit_rows
        )


def load_quantised(
    files: ModelFiles, bits: Bits, *, max_model_len: int | None = None
) -> QuantisedModel:
    """Loads the 8-bit or 4-bit form of a model.

    Args:
        files: resolved with `form=bits`.
        bits: the form.
        max_model_len: cap on the sequence length.

    Raises:
        ConfigError: this machine has no kernels.
        ModelError: the files cannot be used.
    """
    from transformers import AutoConfig

    reason = why_unavailable()
    if reason:
        raise ConfigError(f"quantization {bits} needs the CPU kernels: {reason}")
    assert files.quantised is not None, "resolve in the same form"
    config = AutoConfig.from_pretrained(files.path)
    return QuantisedModel(
        config,
        files.quantised / file_name(bits),
        bits,
        name=files.name,
        fingerprint=files.fingerprint,
        max_model_len=max_model_len,
    )


def _shape(config: Any) -> DecoderShape:
    dim = head_dim(config)
    return DecoderShape(
        hidden=config.hidden_size,
        inter=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=dim,
        eps=config.rms_norm_eps,
        scale=dim**-0.5,
        window=getattr(config, "sliding_window", None),
    )


def _read(path: Path, num_layers: int) -> tuple[DecoderWeights, RotaryTable, int]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            sizes = json.loads(file.metadata()["sizes"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ModelError(f"{path} is damaged: delete its folder and load again") from error

    def packed8(key: str) -> PackedInt8:
        n, k, group = sizes[key]
        bias = tensors.get(f"{key}.bias")
        return PackedInt8(tensors[f"{key}.weight"], tensors[f"{key}.scale"], bias, n, k, group)

    def packed(key: str) -> Packed:
        group_scale = tensors.get(f"{key}.group_scale")
        if group_scale is None:
            return packed8(key)
        n, k, group = sizes[key]
        bias = tensors.get(f"{key}.bias")
        return PackedInt4(tensors[f"{key}.weight"], group_scale, bias, n, k, group)

    layers = [
        LayerWeights(
            attention_norm=tensors[f"{i}.attention_norm"],
            mlp_norm=tensors[f"{i}.mlp_norm"],
            qkv=packed(f"{i}.qkv"),
            o=packed(f"{i}.o"),
            gate_up=packed(f"{i}.gate_up"),
            down=packed(f"{i}.down"),
            q_norm=tensors.get(f"{i}.q_norm"),
            k_norm=tensors.get(f"{i}.k_norm"),
        )
        for i in range(num_layers)
    ]
    embedding = packed8("embedding")
    head = packed("head") if "head" in sizes else embedding
    rotary = RotaryTable(tensors["rotary.frequencies"], float(tensors["rotary.scaling"]))
    return DecoderWeights(embedding, layers, tensors["norm"], head), rotary, embedding.group
