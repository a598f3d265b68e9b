"""GGUF files that are damaged, cut short or of another kind: one clear error, nothing cached."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from draftwood.errors import ModelError
from draftwood.models import gguf_convert
from draftwood.models.gguf_convert import convert, load_config
from draftwood.models.gguf_file import GgufFile
from tests.tiny_gguf import Packed, packed, write_gguf

pytestmark = pytest.mark.usefixtures("root")


def converted(path: Path, root: Path) -> Path:
    return convert(path, root / "models" / "made", "tiny")


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
