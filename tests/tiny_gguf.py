"""GGUF files of tiny models with random weights, in any architecture and quantisation we read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from transformers.convert_slow_tokenizer import bytes_to_unicode

HIDDEN, FEED, HEADS, KV_HEADS, LAYERS = 256, 512, 4, 2, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = list(bytes_to_unicode().values())
MERGES = ["Ġ Ġ", "h e", "l l", "he ll", "Ġ 1"]
TOKENS = [*CONTROL, *BYTES, *(merge.replace(" ", "") for merge in MERGES), "<think>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


Packed = tuple[np.ndarray[Any, Any], Q]


def packed(shape: tuple[int, ...], kind: Q, seed: int) -> Packed:
    """Random packed weights. gguf packs no K-quants, so their bytes are random, scales too."""
    rng = np.random.default_rng(seed)
    if kind in (Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q2_K, Q.Q3_K, Q.IQ4_XS):
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows = shape[:-1]
        data = rng.integers(0, 256, (*rows, shape[-1] // block, num_bytes), dtype=np.uint8)
        # Each half float below 2: no infinities, which no real file has.
        scales = {Q.Q4_K: (1, 3), Q.Q5_K: (1, 3), Q.Q2_K: (-1, -3)}.get(kind, (-1,))
        data[..., [1] if kind is Q.IQ4_XS else list(scales)] &= 0x3B
        return data.reshape(*rows, -1), kind
    values = rng.standard_normal(shape).astype(np.float32)
    return gguf.quants.quantize(values, kind), kind


def tensors(arch: str, kinds: list[Q], tied: bool) -> dict[str, Packed]:
    """All tensors of a tiny model; the matrices take `kinds` in turn, vectors are float32."""
    head = 128 if arch == "qwen3" else HIDDEN // HEADS  # Qwen3's is not hidden / heads
    q, kv = HEADS * head, KV_HEADS * head
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN)}
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": (HIDDEN,),
            "ffn_norm.weight": (HIDDEN,),
            "attn_q.weight": (q, HIDDEN),
            "attn_k.weight": (kv, HIDDEN),
            "attn_v.weight": (kv, HIDDEN),
            "attn_output.weight": (HIDDEN, q),
            "ffn_gate.weight": (FEED, HIDDEN),
            "ffn_up.weight": (FEED, HIDDEN),
            "ffn_down.weight": (HIDDEN, FEED),
        }
        if arch == "qwen2":
            block |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if arch == "qwen3":
            block |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["output.weight"] = (len(TOKENS), HIDDEN)
    return {
        name: packed(shape, kinds[i % len(kinds)] if len(shape) > 1 else Q.F32, i)
        for i, (name, shape) in enumerate(shapes.items())
    }


def write_gguf(
    path: Path,
    arch: str = "llama",
    kinds: list[Q] | None = None,
    *,
    tied: bool = True,
    edit: Callable[[gguf.GGUFWriter, dict[str, Packed]], None] = lambda writer, table: None,
    pre: str = "smollm",
) -> Path:
    """A whole GGUF file of a tiny model. `edit` may add metadata or change the tensors."""
    table = tensors(arch, kinds or [Q.Q8_0], tied)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    if arch == "qwen3":
        writer.add_key_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 4) + [4])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    edit(writer, table)
    for name, (data, kind) in table.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
