"""Smaller records: the same bits with zstd, near ones with loss, and each under its own keys."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.errors import ConfigError, MissingExtraError
from draftwood.kv.tiers import Labels
from draftwood.kv.tiers.compression import (
    COMPRESSIONS,
    CompressionError,
    check_compression,
    pack,
    unpack,
)
from draftwood.kv.tiers.record import Block, PlaneKV, RecordError, decode, encode, peek
from draftwood.sampling import SamplingParams
from tests.redis_server import Redis
from tests.tiny import TinyLLM, hf_model, random_prompts, tiny_llm

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
MODEL = hf_model("llama")
KEY = b"k" * 16
SHAPE = (3, 4, 2, 8)  # layers, slots, heads, head size


def kv(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    return (values * torch.tensor([0.01, 30.0])[:, None]).to(dtype)


def block(dtype: torch.dtype = torch.float32) -> Block:
    draft = PlaneKV(kv(dtype, 3), kv(dtype, 4))
    return Block((1, 2, 3, 4), PlaneKV(kv(dtype, 1), kv(dtype, 2)), draft)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["none", "zstd"])
def test_the_same_bits_come_back(how: str, dtype: torch.dtype) -> None:
    before = block(dtype)
    after, labels = decode(KEY, encode(KEY, before, Labels("m", "d", how)))
    assert labels == Labels("m", "d", how)
    assert after.draft is not None
    assert before.draft is not None
    for one, other in ((before.target, after.target), (before.draft, after.draft)):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
        assert other.keys.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_within_half_a_step_of_its_vector(dtype: torch.dtype) -> None:
    tensor = kv(dtype)
    tensors, facts = pack("x", tensor, "int8")
    back = unpack("x", tensors, facts, "int8")
    step = tensor.float().abs().amax(-1, keepdim=True) / 127
    rounding = tensor.float().abs() * (2**-8 if dtype == torch.bfloat16 else 1e-6)
    assert back.dtype == dtype
    assert ((back.float() - tensor.float()).abs() <= 0.5 * step + rounding).all()
    assert not torch.equal(back, tensor)


def test_fp16_keeps_eleven_bits() -> None:
    back = unpack("x", *pack("x", kv(), "fp16"), "fp16")
    assert back.dtype == torch.float32
    torch.testing.assert_close(back, kv(), rtol=2**-11, atol=1e-7)


def test_a_head_vector_of_zeros_stays_one() -> None:
    zeros = torch.zeros(SHAPE)
    assert torch.equal(unpack("x", *pack("x", zeros, "int8"), "int8"), zeros)


@pytest.mark.parametrize(("how", "share"), [("fp16", 0.5), ("int8", 0.38)])
def test_records_get_smaller(how: str, share: float) -> None:
    def size(name: str) -> int:
        large = PlaneKV(torch.randn(4, 16, 2, 64), torch.randn(4, 16, 2, 64))
        return len(encode(KEY, Block(tuple(range(16)), large), Labels(compression=name)))

    assert size(how) < (share + 0.05) * size("none")


def test_the_head_says_how_it_is_stored() -> None:
    record = encode(KEY, block(), Labels("m", "", "int8"))
    assert peek(record[:4096]).compression == "int8"


@pytest.mark.parametrize("how", COMPRESSIONS)
def test_every_changed_byte_is_found(how: str) -> None:
    record = bytearray(encode(KEY, block(), Labels(compression=how)))
    for place in range(0, len(record), 97):
        record[place] ^= 16
        with pytest.raises(RecordError):
            decode(KEY, bytes(record))
        record[place] ^= 16
    with pytest.raises(RecordError):
        decode(KEY, bytes(record[:-3]))


@pytest.mark.parametrize(
    ("facts", "how"),
    [
        ("float32 3 4 2 9", "zstd"),
        ("float32 3 4 2 9", "int8"),
        ("float32 90000 90000 2 8", "zstd"),
        ("float32 0 4 2 8", "zstd"),
        ("float99 3 4 2 8", "zstd"),
        ("float32 three", "fp16"),
        ("float32 3 4 2 8", "lz77"),
    ],
)
def test_what_does_not_fit_is_no_block(facts: str, how: str) -> None:
    tensors, _ = pack("x", kv(), how if how in COMPRESSIONS else "fp16")
    with pytest.raises(CompressionError):
        unpack("x", tensors, {"x": facts}, how)


def test_a_small_record_cannot_grow_without_end() -> None:
    """A megabyte of zeros in a few bytes, which claims to be a small tensor."""
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    packed = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
    with pytest.raises(CompressionError):
        unpack("x", {"x": packed}, {"x": "float32 3 4 2 8"}, "zstd")


# --- engines ---------------------------------------------------------------------------------


def make(**settings: Any) -> TinyLLM:
    return tiny_llm(MODEL, **{"block_size": 4, "kv_timeout_s": 5.0, **settings})


@pytest.mark.parametrize("where", ["disk", "redis"])
def test_zstd_changes_nothing_but_the_bytes(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if where == "disk":
        place: dict[str, Any] = {"kv_disk": str(tmp_path)}
    else:
        redis: Redis = request.getfixturevalue("redis_server")
        place = {"kv_redis": redis.url}
    [prompt] = random_prompts([43])
    plain = tiny_llm(MODEL, drafter="none").run([prompt], GREEDY)
    # Whoever wrote it, everybody reads it: the keys are the same.
    for number, how in enumerate(("zstd", "none", "zstd")):
        with make(kv_compression=how, **place) as llm:
            [output] = llm.outputs([prompt], GREEDY)
            assert [list(output.token_ids)] == plain
            assert output.metrics.num_cached_tokens == (40 if number else 0)


@pytest.mark.parametrize("how", ["fp16", "int8"])
def test_what_lost_something_is_kept_apart(how: str, tmp_path: Path) -> None:
    [prompt] = random_prompts([43])
    with make(kv_compression=how, kv_disk=str(tmp_path)) as llm:
        llm.run([prompt], GREEDY)
    with make(kv_disk=str(tmp_path)) as llm:
        [output] = llm.outputs([prompt], GREEDY)
        assert output.metrics.num_cached_tokens == 0, "exact KV was wanted"
    with make(kv_compression=how, kv_disk=str(tmp_path)) as llm:
        [output] = llm.outputs([prompt], GREEDY)
        assert output.metrics.cached_by_tier["disk"] == 40


def test_without_the_package_a_record_is_missed_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    [prompt] = random_prompts([43])
    with make(kv_compression="zstd", kv_disk=str(tmp_path)) as llm:
        text = llm.run([prompt], GREEDY)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "draftwood"):
        patch.setitem(sys.modules, "zstandard", None)
        with make(kv_disk=str(tmp_path)) as llm:
            assert llm.run([prompt], GREEDY) == text
            assert llm.tiers is not None
            assert llm.tiers.counters["disk"].num_corrupt == 0
    assert "draftwood[zstd]" in caplog.text
    with make(kv_disk=str(tmp_path)) as llm:
        [output] = llm.outputs([prompt], GREEDY)
        assert output.metrics.cached_by_tier["disk"] == 40


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"kv_compression is 'lz77': use one of none, zstd"):
        check_compression("lz77")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"draftwood\[zstd\]"):
        check_compression("zstd")
