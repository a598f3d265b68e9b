"""What a GGUF file means to transformers: its config, and which parameter each tensor is.

Only architectures whose conversion by llama.cpp can be undone exactly are listed. Names and shapes
are checked against the model that transformers would build, so a file that does not fit it is an
error here and never a model with random weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from draftwood.errors import ModelError
from draftwood.models.gguf_file import GgufFile, GgufTensor

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp stores one kind of model: its `model_type` in transformers, and what differs.

    `rotary_pairs`: rows of q and k are interleaved in pairs and have to be sorted back.
    """

    model_type: str
    rotary_pairs: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", rotary_pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
}

# Texts of tokens that end a reply: the list llama.cpp looks for besides the declared one.
_END_TEXTS = {
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"),
    *("<end_of_turn>", "<EOT>", "</s>"),
}
_CONTROL = 3  # in tokenizer.ggml.token_type


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model and the tensor it comes from.

    `num_paired_heads`: how many heads have rows that are interleaved in pairs; 0 for none.
    """

    name: str
    tensor: GgufTensor
    num_paired_heads: int = 0


class Metadata:
    """Reads metadata with a clear error for what is missing or of the wrong type."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        return self._get(key, str, default)

    def count(self, key: str, default: int | None = None) -> int:
        return self._get(self._full(key), int, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(self._full(key), float, default)
        return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06

    def items(self, key: str) -> list[Any]:
        return self._get(key, list, [])

    def token_id(self, key: str) -> int | None:
        """A special token's id: None if the file names none, or none within its vocabulary."""
        value = self._file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        num_tokens = len(self.items("tokenizer.ggml.tokens"))
        return value if isinstance(value, int) and 0 <= value < num_tokens else None

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._file.metadata.get(key, default))

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _get(self, key: str, kind: type[_T], default: _T | None) -> _T:
        value = self._file.metadata.get(key, default)
        if not isinstance(value, kind):
            said = "missing" if value is None else f"{value!r}"
            raise ModelError(f"{self._file.path}: metadata {key} is {said}, not a {kind.__name__}")
        return value


def architecture(file: GgufFile) -> Architecture:
    """The architecture of a file. Raises ModelError, naming it, if it is not supported."""
    name = Metadata(file).architecture
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} has the architecture {name}, and GGUF files are read for "
            f"{', '.join(sorted(ARCHITECTURES))} only: use the model's Hugging Face folder instead"
        )
    return ARCHITECTURES[name]


def end_token_ids(file: GgufFile) -> list[int]:
    """Ids of all tokens that end a reply: the declared ones, then those known by their text."""
    meta = Metadata(file)
    declared = [meta.token_id(key) for key in ("eos", "eot", "eom")]
    tokens = meta.items("tokenizer.ggml.tokens")
    kinds = meta.items("tokenizer.ggml.token_type")
    known = [
        index
        for index, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and text in _END_TEXTS
    ]
    return list(dict.fromkeys([*(i for i in declared if i is not None), *known]))


def config_values(file: GgufFile) -> dict[str, Any]:
    """Keyword arguments of the transformers config that describes `file`."""
    meta, names = Metadata(file), {tensor.name for tensor in file.tensors}
    num_heads, hidden = meta.count("attention.head_count"), meta.count("embedding_length")
    if not num_heads:
        raise ModelError(f"{file.path}: metadata attention.head_count is 0")
    head_dim = meta.count("rope.dimension_count", hidden // num_heads)
    values = {
        "hidden_size": hidden,
        "num_hidden_layers": meta.count("block_count"),
        "intermediate_size": meta.count("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", num_heads),
        "head_dim": meta.count("attention.key_length", head_dim),
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, meta),
        "vocab_size": _num_embeddings(file),
        "tie_word_embeddings": "output.weight" not in names,
        **{f"{key}_token_id": meta.token_id(key) for key in ("bos", "eos")},
        "pad_token_id": meta.token_id("padding"),
    }
    if architecture(file).model_type == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in names
    return values


def _num_embeddings(file: GgufFile) -> int:
    for tensor in file.tensors:
        if tensor.name == "token_embd.weight":
            return tensor.shape[0]
    raise ModelError(f"{file.path} has no tensor token_embd.weight: it is not a language model")


def _rope(file: GgufFile, meta: Metadata) -> dict[str, Any]:
    """The rotary embedding's parameters. Raises ModelError for a scaling that is not known."""
    theta = meta.number("rope.freq_base", 10000.0)
    scaling = meta.text(f"{meta.architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(
            f"{file.path} scales rotary positions by the method {scaling}, which is not read from "
            "GGUF: use the model's Hugging Face folder instead"
        )
    for tensor in file.tensors:
        if tensor.name == "rope_freqs.weight":
            return _llama3_rope(file, tensor, theta)
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(file: GgufFile, tensor: GgufTensor, theta: float) -> dict[str, Any]:
    """Llama 3's scaling: the file holds the resulting factors, transformers wants its parameters.

    The factor is the last of them; with the constants that all Llama 3 models share it has to give
    all the others back, or the scaling is another one.
    """
    factors = file.packed_rows(tensor).view(np.float32).ravel()
    factor = float(factors[-1])
    if not np.allclose(factors, _llama3_factors(len(factors), theta, factor), rtol=1e-4):
        raise ModelError(
            f"{file.path} scales rotary positions by factors that are not Llama 3's: use the "
            "model's Hugging Face folder instead"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _llama3_factors(count: int, theta: float, factor: float) -> list[float]:
    """What Llama 3.1 divides each of `count` rotary frequencies by (its paper's constants)."""
    waves = [2 * math.pi * theta ** (i / count) for i in range(count)]
    smooth = [min(1.0, max(0.0, (8192 / wave - 1.0) / 3.0)) for wave in waves]
    return [1 / ((1 - s) / factor + s) for s in smooth]


def parameters(file: GgufFile, shapes: dict[str, tuple[int, ...]]) -> list[Parameter]:
    """The tensors of `file` under their names in transformers, in the file's order.

    `shapes` are the parameters of the model to fill. Raises ModelError if one of them has no
    tensor, a tensor has no parameter, or the two differ in shape.
    """
    names = _names(file, shapes)
    found = [tensor for tensor in file.tensors if not _is_derived(tensor.name)]
    _check(file, shapes, names, found)
    return [Parameter(names[t.name], t, _num_paired_heads(file, t.name)) for t in found]


def _is_derived(name: str) -> bool:
    """Whether a tensor only repeats what the config says (rotary frequencies)."""
    return name == "rope_freqs.weight" or name.endswith(".attn_rot_embd.weight")


def _names(file: GgufFile, shapes: Iterable[str]) -> dict[str, str]:
    """GGUF name -> transformers name, from gguf's own table."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    meta = Metadata(file)
    arch = {name: key for key, name in MODEL_ARCH_NAMES.items()}[meta.architecture]
    table = get_tensor_name_map(arch, meta.count("block_count"))
    named = {table.get_name(name, try_suffixes=(".weight", ".bias")): name for name in shapes}
    return {gguf_name: name for gguf_name, name in named.items() if gguf_name is not None}


def _check(
    file: GgufFile,
    shapes: dict[str, tuple[int, ...]],
    names: dict[str, str],
    tensors: list[GgufTensor],
) -> None:
    unknown = [tensor.name for tensor in tensors if tensor.name not in names]
    if unknown:
        raise ModelError(f"{file.path}: tensor {unknown[0]} has no place in the model")
    missing = shapes.keys() - {names[tensor.name] for tensor in tensors}
    if missing:
        raise ModelError(f"{file.path} has no tensor for {min(missing)}")
    for tensor in tensors:
        expected = shapes[names[tensor.name]]
        if tensor.shape != expected:
            raise ModelError(
                f"{file.path}: tensor {tensor.name} has shape {tensor.shape}, not {expected}"
            )


def _num_paired_heads(file: GgufFile, name: str) -> int:
    if not architecture(file).rotary_pairs:
        return 0
    meta = Metadata(file)
    if ".attn_q." in name:
        return meta.count("attention.head_count")
    if ".attn_k." in name:
        return meta.count("attention.head_count_kv", meta.count("attention.head_count"))
    return 0
