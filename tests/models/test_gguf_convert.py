"""GGUF to a folder: exact values, exact names, all or nothing. Files are tiny and made here."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftwood import cache
from draftwood.errors import CapacityError
from draftwood.models import gguf_convert
from draftwood.models.gguf_convert import convert, iter_tensors, load_config
from draftwood.models.sources import resolve
from tests.tiny_gguf import HEADS, HIDDEN, TOKENS, Packed, write_gguf
from tests.tiny_package import FullDisk, files_in

pytestmark = pytest.mark.usefixtures("root")


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


# --- all or nothing ------------------------------------------------------------------------------


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
    assert files_in(root) == []


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
    assert files_in(root) == []

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError):
        converted(path, root)
    assert files_in(root) == []


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
