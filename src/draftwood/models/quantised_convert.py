"""From float weights to the file of quantised ones that the CPU kernels map into memory.

Tensors come one at a time, are joined to the matrices the kernels want (q, k, v in one, gate and up
in one), packed, and dropped; only the packed ones stay. The file is safetensors, its metadata say
how to read it, and nothing in it depends on the machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwood import cache
from draftwood.errors import UnsupportedModelError
from draftwood.kernels.packing import Packed, PackedInt8, pack_int4, pack_int8
from draftwood.models.formats import QUANTISED_VERSION, Bits, file_name
from draftwood.models.progress import Progress, silent

_MODEL_TYPES = {"llama", "qwen2", "qwen3", "mistral"}
_JOINED = {
    "self_attn.q_proj": ("qkv", 0),
    "self_attn.k_proj": ("qkv", 1),
    "self_attn.v_proj": ("qkv", 2),
    "self_attn.o_proj": ("o", 0),
    "mlp.gate_proj": ("gate_up", 0),
    "mlp.up_proj": ("gate_up", 1),
    "mlp.down_proj": ("down", 0),
}
_NUM_PARTS = {"qkv": 3, "o": 1, "gate_up": 2, "down": 1}
_NORMS = {
    "input_layernorm.weight": "attention_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
}


def why_not_quantised(config: Any) -> str | None:
    """Why the quantised decoder cannot run a model of this config, one line; None if it can."""
    if config.model_type not in _MODEL_TYPES:
        known = ", ".join(sorted(_MODEL_TYPES))
        return f"the quantised decoder knows {known}, not {config.model_type}"
    if config.hidden_act != "silu":
        return f"the quantised decoder has no {config.hidden_act} activation"
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return "the quantised decoder has no layers of different windows"
    heads, dim = config.num_attention_heads, head_dim(config)
    sizes = (dim % 16, config.hidden_size % 16, config.intermediate_size % 64)
    if any(sizes) or dim > 256 or heads % config.num_key_value_heads:
        return "the quantised decoder does not take its sizes"
    if _rope_type(config) not in ("default", "linear", "llama3", "yarn"):
        return f"the quantised decoder has no rotary scaling of type {_rope_type(config)!r}"
    return None


def head_dim(config: Any) -> int:
    """Width of one attention head."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _rope_type(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type") or "default")


def count_parameters(config: Any) -> int:
    """Weights of a Llama-shaped decoder, tied ones counted once; 0 for any other shape."""
    if config.model_type not in _MODEL_TYPES:
        return 0
    hidden, dim = config.hidden_size, head_dim(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config.intermediate_size
    tables = 1 if config.tie_word_embeddings else 2
    return config.num_hidden_layers * layer + tables * config.vocab_size * hidden  # type: ignore[no-any-return]


@dataclass(slots=True)
class _Packer:
    """Collects the parts of each joined matrix until it is whole."""

    emit: Callable[[str, Packed], None]
    pack: Callable[[Tensor, Tensor | None], Packed]
    own_head: bool = False  # the head is tied to the embedding, but has other bits
    weights: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    biases: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    has_bias: set[str] = field(default_factory=set)

    def add(self, layer: str, part: str, kind: str, value: Tensor) -> None:
        """Takes one weight or bias; packs the matrix when nothing is missing."""
        matrix, place = _JOINED[part]
        key = f"{layer}.{matrix}"
        store = self.weights if kind == "weight" else self.biases
        store.setdefault(key, {})[place] = value
        complete = len(self.weights.get(key, ())) == _NUM_PARTS[matrix]
        if complete and (key not in self.has_bias or self._biases_complete(key, matrix)):
            self._pack(key)

    def _biases_complete(self, key: str, matrix: str) -> bool:
        return len(self.biases.get(key, ())) == _NUM_PARTS[matrix]

    def _pack(self, key: str) -> None:
        weight = torch.cat([value for _, value in sorted(self.weights.pop(key).items())])
        parts = self.biases.pop(key, None)
        bias = torch.cat([value for _, value in sorted(parts.items())]) if parts else None
        self.emit(key, self.pack(weight, bias))


def _biased_parts(config: Any) -> set[str]:
    """Joined matrices that have biases in this architecture."""
    if config.model_type == "qwen2":
        return {"qkv"}
    biased = set()
    if getattr(config, "attention_bias", False):
        biased |= {"qkv", "o"}
    if getattr(config, "mlp_bias", False):
        biased |= {"gate_up", "down"}
    return biased


def pack_checkpoint(
    config: Any,
    tensors: Iterable[tuple[str, Tensor]],
    path: Path,
    name: str,
    bits: Bits,
    progress: Progress = silent,
) -> None:
    """Packs all tensors of a checkpoint into the file `path`.

    Args:
        config: the model's transformers config.
        tensors: names as transformers has them, with their values.
        path: the file to write.
        name: of the model, for messages.
        bits: of the matrices; the embedding always has 8, as only rows of it are read.
        progress: told how many tensors are done.

    Raises:
        UnsupportedModelError: there is a tensor the decoder has no place for, or one is missing.
    """
    from safetensors.torch import save_file

    out: dict[str, Tensor] = {}
    sizes: dict[str, tuple[int, int, int]] = {}

    def emit(key: str, packed: Packed) -> None:
        out[f"{key}.weight"] = packed.weight
        if isinstance(packed, PackedInt8):
            out[f"{key}.scale"] = packed.scale
        else:
            out[f"{key}.group_scale"] = packed.group_scale
        if packed.bias is not None:
            out[f"{key}.bias"] = packed.bias
        sizes[key] = (packed.n, packed.k, packed.group)

    num_layers = config.num_hidden_layers
    biased = {f"{i}.{part}" for i in range(num_layers) for part in _biased_parts(config)}
    pack = pack_int8 if bits == "int8" else pack_int4
    own_head = bits == "int4" and config.tie_word_embeddings
    packer = _Packer(emit, pack, own_head=own_head, has_bias=biased)
    label = f"packing {name} into {bits.removeprefix('int')} bits"
    done, total = 0, 4 * count_parameters(config)
    for tensor_name, value in tensors:
        _place(tensor_name, value, packer, out)
        done = min(done + 4 * value.numel(), total - 1)
        progress(label, done, total)
    _check_complete(out, sizes, config, name)
    out.update(_rotary(config))
    save_file(out, path, {"sizes": json.dumps(sizes), "version": str(QUANTISED_VERSION[bits])})
    progress(label, total, total)


def _place(name: str, value: Tensor, packer: _Packer, out: dict[str, Tensor]) -> None:
    """Finds a tensor's place by its name."""
    if name == "model.embed_tokens.weight":
        packer.emit("embedding", pack_int8(value))
        if packer.own_head:
            packer.emit("head", packer.pack(value, None))
    elif name == "lm_head.weight":
        packer.emit("head", packer.pack(value, None))
    elif name == "model.norm.weight":
        out["norm"] = value.float()
    elif name.startswith("model.layers."):
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        part, _, kind = rest.rpartition(".")
        if rest in _NORMS:
            out[f"{layer}.{_NORMS[rest]}"] = value.float()
        elif part in _JOINED:
            packer.add(layer, part, kind, value.float())
        elif not rest.endswith("rotary_emb.inv_freq"):
            raise UnsupportedModelError(f"the quantised decoder has no place for the tensor {name}")
    else:
        raise UnsupportedModelError(f"the quantised decoder has no place for the tensor {name}")


def _check_complete(out: dict[str, Tensor], sizes: dict[str, Any], config: Any, name: str) -> None:
    wanted = {"embedding", "norm"}
    if not config.tie_word_embeddings:
        wanted.add("head")
    for layer in range(config.num_hidden_layers):
        wanted |= {f"{layer}.{part}" for part in (*_NUM_PARTS, "attention_norm", "mlp_norm")}
    missing = sorted(wanted - set(sizes) - set(out))
    if missing:
        raise UnsupportedModelError(f"{name}: the checkpoint has nothing for {missing[0]}")


def _rotary(config: Any) -> dict[str, Tensor]:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    scaling = torch.tensor([float(rotary.attention_scaling)])
    return {"rotary.frequencies": rotary.inv_freq.float().clone(), "rotary.scaling": scaling}


def convert_gguf(
    path: Path, target: Path, name: str, bits: Bits, progress: Progress = silent
) -> Path:
    """Makes the folder `target` from a GGUF file: config, tokenizer and quantised weights.

    Call it under `cache.locked(target.name)`. Raises like `gguf_convert.convert`, and
    UnsupportedModelError if the quantised decoder cannot run the model.
    """
    from draftwood.models.gguf_convert import iter_tensors, write_small_files

    with cache.staging(target.name, name, 2 * path.stat().st_size + (64 << 20)) as folder:
        made = folder / "model"
        made.mkdir()
        config = write_small_files(path, made)
        reason = why_not_quantised(config)
        if reason:
            raise UnsupportedModelError(f"{name}: {reason}")
        pack_checkpoint(config, iter_tensors(path), made / file_name(bits), name, bits, progress)
        return cache.publish(made, target)


def convert_folder(
    folder: Path, target: Path, name: str, bits: Bits, progress: Progress = silent
) -> Path:
    """Makes the folder `target` with the quantised weights of a folder of safetensors files.

    Call it under `cache.locked(target.name)`; raises like `convert_gguf`.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    reason = why_not_quantised(config)
    if reason:
        raise UnsupportedModelError(f"{name}: {reason}")
    with cache.staging(target.name, name, count_parameters(config) + (64 << 20)) as staged:
        made = staged / "model"
        made.mkdir()
        pack_checkpoint(
            config, _folder_tensors(folder), made / file_name(bits), name, bits, progress
        )
        return cache.publish(made, target)


def _folder_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModelError(
            f"{folder} has no safetensors files: quantised weights are made from those"
        )
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)
