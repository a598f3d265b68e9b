"""GGUF to a folder: exact values, exact names, all or nothing. Files are tiny and made here."""

from __future__ import annotations

import errno
import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftwood.errors import CapacityError, ModelError
from draftwood.models import cache, gguf_convert
from draftwood.models.gguf_convert import convert, iter_tensors, load_config
from draftwood.models.gguf_file import GgufFile
from draftwood.models.sources import resolve

HIDDEN, FEED, HEADS, KV_HEADS, LAYERS = 256, 512, 4, 2, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = list(bytes_to_unicode().values())
MERGES = ["Ġ Ġ", "h e", "l l", "he ll", "Ġ 1"]
TOKENS = [*CONTROL, *BYTES, *(merge.replace(" ", "") for merge in MERGES), "<think>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own for every test: the user's is never touched."""
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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


def converted(path: Path, root: Path) -> Path:
    return convert(path, root / "models" / "made", "tiny")


PLAIN = [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0]
BLOCKS = [Q.Q4_K, Q.Q6_K, Q.Q5_K, Q.Q2_K, Q.Q3_K, Q.IQ4_XS]


@pytest.mark.parametrize(
    ("arch", "kinds", "tied"),
    [
        ("llama", PLAIN, True),
        ("llama", BLOCKS, False),
        ("qwen2", PLAIN, False),
        ("qwen2", BLOCKS, True),
        ("qwen3", [Q.Q8_0], True),
    ],
)
def test_every_weight_equals_transformers_own(
    tmp_path: Path, root: Path, arch: str, kinds: list[Q], tied: bool
) -> None:
    """q and k of Llama stayed in llama.cpp's order, or those of Qwen, which has no such order,
    were sorted: the model then speaks nonsense and nothing fails."""
    path = write_gguf(tmp_path / "tiny.gguf", arch, kinds, tied=tied)
    folder = converted(path, root)
    ours, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    for name, value in ours.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, theirs[name]), name
    assert ours.config.tie_word_embeddings == tied


def test_iterated_tensors_are_those_of_the_folder(tmp_path: Path, root: Path) -> None:
    """The direct way to int8 got other names or an unsorted q."""
    path = write_gguf(tmp_path / "tiny.gguf", "llama", BLOCKS, tied=False)
    in_folder = load_file(converted(path, root) / "model.safetensors")
    iterated = dict(iter_tensors(path))
    assert iterated.keys() == in_folder.keys()
    assert all(torch.equal(value, in_folder[name]) for name, value in iterated.items())


def test_pieces_do_not_show(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a matrix came in the order in which threads finished, or the last rows were lost."""
    path = write_gguf(tmp_path / "tiny.gguf", "llama", PLAIN, tied=False)
    whole = dict(iter_tensors(path))
    monkeypatch.setattr(gguf_convert, "_PIECE_BYTES", 7 * HIDDEN * 4)
    monkeypatch.setattr(gguf_convert, "_NUM_THREADS", 3)
    seen: list[tuple[int, int]] = []
    convert(path, root / "made", "tiny", lambda stage, done, total: seen.append((done, total)))
    for name, value in load_file(root / "made" / "model.safetensors").items():
        assert torch.equal(value, whole[name]), name
    assert len(seen) > 100
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(v.numel() * 4 for v in whole.values())


def test_config_and_generation_config(tmp_path: Path, root: Path) -> None:
    """Generation ran past <|endoftext|>: only one of two end tokens was kept. Marks of the GGUF
    quantisation made save_pretrained raise."""
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2", tied=False, pre="qwen2")
    folder = converted(path, root)
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["Qwen2ForCausalLM"],
        "dtype": "float32",
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": len(TOKENS),
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100_000.0}
    assert "quantization_config" not in config
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "saved")
    assert model.generation_config.eos_token_id == [2, 0]
    assert load_config(path).to_dict() == model.config.to_dict() | {
        "_name_or_path": "",
        "architectures": None,
    }


# --- the tokenizer -------------------------------------------------------------------------------


def test_tokenizer_survives(tmp_path: Path, root: Path) -> None:
    """The chat template or the special tokens were lost, or control tokens were cut in pieces."""
    folder = converted(write_gguf(tmp_path / "tiny.gguf"), root)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == {token: i for i, token in enumerate(TOKENS)}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    message = [{"role": "user", "content": "hell"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<|im_start|>hell<|im_end|>"
    text = "<|im_start|>hell<think>é 🙂<|im_end|>"
    ids = tokenizer(text).input_ids
    assert ids[:3] == [1, TOKENS.index("hell"), TOKENS.index("<think>")]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hell<think>é 🙂"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("smollm", ["ĠĠ", "1"]), ("gpt-2", ["Ġ", "Ġ1"]), ("qwen2", ["Ġ", "Ġ", "1"])],
)
def test_text_is_split_as_the_model_learned_it(
    tmp_path: Path, root: Path, pre: str, pieces: list[str]
) -> None:
    """transformers does not know "smollm" and takes GPT-2's way: "=  10" got tokens that the
    model never saw in training."""
    folder = converted(write_gguf(tmp_path / "tiny.gguf", pre=pre), root)
    assert AutoTokenizer.from_pretrained(folder).tokenize("  1") == pieces


def test_bos_is_added_where_the_file_says_so(tmp_path: Path, root: Path) -> None:
    """Llama 3 without its first token answers worse, and nothing fails."""
    path = write_gguf(tmp_path / "tiny.gguf", edit=lambda writer, _: writer.add_add_bos_token(True))
    tokenizer = AutoTokenizer.from_pretrained(converted(path, root))
    assert tokenizer("he").input_ids == [1, TOKENS.index("he")]
    assert tokenizer("he", add_special_tokens=False).input_ids == [TOKENS.index("he")]


def test_unknown_way_to_split_goes_through_transformers(tmp_path: Path, root: Path) -> None:
    """A vocabulary that we do not write ourselves had no tokenizer at all."""
    folder = converted(write_gguf(tmp_path / "tiny.gguf", pre="default"), root)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("hell").input_ids == [TOKENS.index("hell")]
    assert tokenizer.chat_template == TEMPLATE


# --- what is refused -----------------------------------------------------------------------------


def test_unknown_architecture_is_named(tmp_path: Path, root: Path) -> None:
    """A KeyError from a table of names."""
    path = write_gguf(tmp_path / "tiny.gguf", "mamba")
    with pytest.raises(ModelError, match=r"architecture mamba.*llama, qwen2, qwen3"):
        converted(path, root)


def test_unknown_quantisation_is_named_before_the_work(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of work, then NotImplementedError at the last tensor."""

    def cannot(data: Any, kind: Q) -> Any:
        raise NotImplementedError(kind.name)

    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf_convert, "dequantize", cannot)
    monkeypatch.setattr(gguf_convert, "_write_weights", None)
    with pytest.raises(ModelError, match="quantisation Q8_0, which cannot be unpacked"):
        converted(path, root)


def rename(old: str, new: str) -> Callable[[gguf.GGUFWriter, dict[str, Packed]], None]:
    return lambda writer, table: table.update({new: table.pop(old)})


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda w, t: t.pop("blk.1.ffn_up.weight"), r"no tensor for model\.layers\.1\.mlp\.up"),
        (lambda w, t: t.pop("token_embd.weight"), r"no tensor token_embd\.weight"),
        (rename("blk.1.ffn_up.weight", "blk.1.strange.weight"), r"strange\.weight has no place"),
        (
            lambda w, t: t.update({"blk.1.ffn_up.weight": packed((8, 8), Q.F32, 0)}),
            r"has shape \(8, 8\)",
        ),
        (lambda w, t: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "the method yarn"),
        (lambda w, t: t.update({"rope_freqs.weight": packed((32,), Q.F32, 0)}), "not Llama 3's"),
    ],
)
def test_file_that_does_not_fit_its_model_is_refused(
    tmp_path: Path, root: Path, edit: Callable[..., None], match: str
) -> None:
    """transformers fills a missing tensor with random numbers and drops one it does not know."""
    path = write_gguf(tmp_path / "tiny.gguf", edit=edit)
    with pytest.raises(ModelError, match=match):
        converted(path, root)
    assert not (root / "models").exists()


def test_rotary_scaling_of_llama3_is_found_again(tmp_path: Path) -> None:
    """transformers ignores rope_freqs.weight: Llama 3.2 from GGUF was wrong beyond 8192 tokens."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def scale(writer: gguf.GGUFWriter, table: dict[str, Packed]) -> None:
        config = LlamaConfig(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 100_000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        )
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = 1 / 100_000.0 ** (torch.arange(32) / 32)
        table["rope_freqs.weight"] = (plain / scaled).numpy(), Q.F32

    path = write_gguf(tmp_path / "tiny.gguf", edit=scale)
    rope = load_config(path).rope_parameters
    assert rope["rope_type"] == "llama3"
    assert rope["factor"] == pytest.approx(32.0, rel=1e-5)
    assert dict(iter_tensors(path))  # the extra tensor is no parameter


@pytest.mark.parametrize("keep", [0, 3, 20, 60, 400, 5000, -1])
def test_truncated_file_is_a_model_error(tmp_path: Path, root: Path, keep: int) -> None:
    """A download that ended early gave struct.error, IndexError or a model of zeros."""
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"tiny\.gguf .*read"):
        converted(path, root)


def test_damaged_header_never_gives_another_error(tmp_path: Path) -> None:
    """A flipped byte in a length asked for 16 EB of memory."""
    content = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for position in rng.integers(4, 12_000, 150):
        damaged = bytearray(content)
        damaged[position] ^= int(rng.integers(1, 256))
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            GgufFile.open(tmp_path / "damaged.gguf")
        except ModelError:
            refused += 1
    assert refused > 20


def test_absurd_counts_are_refused_at_once(tmp_path: Path) -> None:
    """An array of 2**60 strings was a loop without end."""
    key = b"general.x"
    array = struct.pack("<IIQ", 9, 8, 1 << 60)
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + array
    (tmp_path / "x.gguf").write_bytes(head)
    with pytest.raises(ModelError, match="claims 1152921504606846976 elements"):
        GgufFile.open(tmp_path / "x.gguf")


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    """KeyError: 'llama.block_count' says nothing about the file."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_embedding_length(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"x\.gguf: metadata llama\.attention\.head_count is miss"):
        load_config(tmp_path / "x.gguf")


# --- all or nothing ------------------------------------------------------------------------------


class FullDisk(io.FileIO):
    """A file on a disk that has room for `room` bytes more."""

    room = 0

    def write(self, data: Any, /) -> int:
        FullDisk.room -= memoryview(data).nbytes
        if FullDisk.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("room", [0, 10_000, 1_000_000])
def test_disk_that_fills_up_leaves_nothing(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """A folder with half the weights was taken for a model by the next run."""
    path = write_gguf(tmp_path / "tiny.gguf")
    FullDisk.room = room
    monkeypatch.setattr(gguf_convert, "open", FullDisk, raising=False)
    with pytest.raises(CapacityError, match=r"tiny needs .*DRAFTWOOD_CACHE"):
        converted(path, root)
    assert [p for p in root.rglob("*") if p.is_file()] == []


def test_interrupt_and_full_disk_at_the_end_leave_nothing(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder got its name before its bytes were on the disk."""
    path = write_gguf(tmp_path / "tiny.gguf")

    def interrupt(stage: str, done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(path, root / "models" / "made", "tiny", interrupt)
    assert [p for p in root.rglob("*") if p.is_file()] == []

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError):
        converted(path, root)
    assert [p for p in root.rglob("*") if p.is_file()] == []


def test_too_small_a_disk_is_refused_before_the_work(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 GB were written before the disk was found too small."""
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(cache, "_free_bytes", lambda folder: 1_000_000)
    monkeypatch.setattr(gguf_convert, "write_tokenizer", None)
    with pytest.raises(CapacityError, match=r"tiny needs .* and 1\.0 MB are free"):
        converted(path, root)


def test_gguf_file_resolves_to_a_folder_that_loads(tmp_path: Path) -> None:
    """The parts fit one by one and not together."""
    path = write_gguf(tmp_path / "my tiny.gguf", "qwen2")
    seen: list[str] = []
    files = resolve(str(path), progress=lambda stage, done, total: seen.append(stage))
    assert set(seen) == {"unpacking my-tiny"}
    assert AutoModelForCausalLM.from_pretrained(files.path).config.model_type == "qwen2"
    assert resolve(str(path)) == files


# --- the real model ------------------------------------------------------------------------------


@pytest.mark.real_model
def test_smollm2_equals_the_file_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have regular shapes; this is the file that people use."""
    monkeypatch.delenv("DRAFTWOOD_CACHE")
    files = resolve("smollm2-135m")
    path = cache.cache_dir() / "gguf" / "smollm2-135m.gguf"
    if not path.exists():
        pytest.skip("the GGUF was removed from the cache")
    stored = load_file(files.path / "model.safetensors")
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    down = reader["blk.29.ffn_down.weight"]
    expected = gguf.dequantize(down.data, down.tensor_type)
    assert np.array_equal(stored["model.layers.29.mlp.down_proj.weight"].numpy(), expected)
    query = reader["blk.3.attn_q.weight"]
    rows = gguf.dequantize(query.data, query.tensor_type).reshape(9, 32, 2, 576)
    expected = rows.transpose(0, 2, 1, 3).reshape(576, 576)
    assert np.array_equal(stored["model.layers.3.self_attn.q_proj.weight"].numpy(), expected)
    assert len(stored) == 272
    tokenizer = AutoTokenizer.from_pretrained(files.path)
    assert tokenizer("x =  10").input_ids == tokenizer.convert_tokens_to_ids(
        ["x", "Ġ=", "ĠĠ", "1", "0"]
    )
