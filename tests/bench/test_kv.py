"""`draftwood bench kv`: what is measured, what is written, and what is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftwood.bench import kv as measuring
from draftwood.bench.tables import console, kv_table
from draftwood.cli.app import run as run_command
from draftwood.errors import ConfigError, StoreError
from draftwood.kv.tiers import MemoryStore
from tests.redis_server import Redis
from tests.tiny import TinyLLM, save_tiny, tiny_llm


def llm() -> TinyLLM:
    return tiny_llm("llama", drafter="none", block_size=4)


def test_each_tier_serves_the_prefix(redis_server: Redis, tmp_path: Path) -> None:
    one, told = llm(), []
    points, missing = measuring.measure(
        one, 40, 2, told.append, disk=tmp_path, redis=redis_server.url
    )
    assert told == points
    assert missing == []
    assert [point.tier for point in points] == ["cold", "ram", "disk", "redis"]
    assert [point.num_cached_tokens for point in points] == [0, 40, 40, 40]
    assert all(point.same_token and point.ttft_s > 0 for point in points)
    block = 4 * one.model.spec.kv.bytes_per_token
    for point in points[2:]:
        assert point.num_bytes > 10 * block
        assert point.floor_s is not None
    assert points[0].speedup == 1.0
    assert one.pool.num_free == one.pool.num_blocks
    assert list(tmp_path.iterdir()) == []
    with redis_server.client() as client:
        assert client.dbsize() == 0
    screen = console()
    with screen.capture() as capture:
        screen.print(kv_table(points))
    assert "41 tokens" in capture.get()


def test_the_command_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save_tiny(tmp_path / "llama"))
    out = tmp_path / "kv.jsonl"
    options = ["--tokens", "100", "--repeats", "1", "--out", str(out)]
    assert run_command(["bench", "kv", folder, *options]) == 0
    first, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert (first["type"], first["command"], first["num_tokens"]) == ("fingerprint", "kv", 100)
    assert [row["type"] for row in rows] == ["kv"] * len(rows)
    text = capsys.readouterr().out
    assert "disk" in text
    assert ("not measured: redis" in text) is (len(rows) == 3)
    assert run_command(["bench", "kv", folder, *options, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(rows)


def test_without_a_server_redis_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_SERVER", "no-such-server")
    points, missing = measuring.measure(llm(), 20, 1, lambda point: None)
    assert [point.tier for point in points] == ["cold", "ram", "disk"]
    assert "no-such-server" in missing[0]


def test_what_cannot_be_measured_is_said() -> None:
    with pytest.raises(ConfigError, match="the context holds"):
        measuring.measure(llm(), 5000, 1, lambda point: None)
    bench = measuring.KVBench(llm(), 40, 1, lambda point: None)
    with pytest.raises(StoreError, match="too small"):
        bench.store(MemoryStore(max_bytes=1000))


def test_a_folder_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "kv", "no-model", "--disk", "/no/such/folder"]) == 2
    assert "no folder" in capsys.readouterr().err
