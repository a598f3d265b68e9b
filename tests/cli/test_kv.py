"""`draftwood kv`, and the options that fill what it looks after."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.redis_server import Redis

WORDS = "the quick brown fox jumps over the lazy dog and the tree of tokens is verified " * 2
ARGUMENTS = ("--max-tokens", "8", "--ignore-eos")


def test_a_second_process_starts_from_the_disk(call: Call, tiny: str, tmp_path: Path) -> None:
    disk = ("--kv-disk", str(tmp_path / "kv"))
    one = call("generate", tiny, WORDS, *ARGUMENTS, *disk, "--json").json
    two = call("generate", tiny, WORDS, *ARGUMENTS, *disk, "--json").json
    [first], [second] = one["outputs"], two["outputs"]
    assert second["text"] == first["text"]
    assert first["num_cached_tokens"] == 0
    assert second["num_cached_tokens"] >= 16
    assert second["cached_by_tier"]["disk"] == second["num_cached_tokens"]
    assert one["kv_tiers"]["disk"]["num_stored"] >= 1
    assert two["kv_tiers"]["disk"]["num_hits"] >= 1
    third = call("generate", tiny, WORDS, *ARGUMENTS, *disk, "--stats", "--kv-memory", "1M")
    assert "from disk" in third.err
    assert "KV on disk: " in third.err
    assert "blocks restored" in third.err


def test_chat_keeps_kv_too(call: Call, tiny: str, tmp_path: Path) -> None:
    answer = call(
        "chat", tiny, "--kv-disk", str(tmp_path), "--max-tokens", "8", stdin="the quick brown fox\n"
    )
    assert answer.code == 0
    assert call("kv", "stats", "--kv-disk", str(tmp_path), "--json").json[0]["num_blocks"] >= 1


def test_list_stats_verify_clear(call: Call, tiny: str, tmp_path: Path) -> None:
    disk = ("--kv-disk", str(tmp_path))
    call("generate", tiny, WORDS, *ARGUMENTS, *disk)
    listed = call("kv", "ls", *disk, "--json").json
    assert listed
    assert {block["model"] for block in listed} == {tiny}
    [stats] = call("kv", "stats", *disk, "--json").json
    assert stats["num_blocks"] == len(listed)
    assert stats["num_bytes"] == sum(block["num_bytes"] for block in listed)
    assert listed[0]["key"] in call("kv", "ls", *disk).out
    assert str(tmp_path) in call("kv", "stats", *disk).out
    sound = call("kv", "verify", *disk)
    assert (sound.code, "0 damaged" in sound.out) == (0, True)
    victim = next(tmp_path.rglob("*.kv"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert call("kv", "verify", *disk, "--json").code == 1
    other = tmp_path / "mine.txt"
    other.write_text("not a block")
    cleared = call("kv", "clear", *disk)
    assert cleared.out == f"disk: {len(listed) - 1} blocks deleted\n"
    assert call("kv", "ls", *disk, "--json").json == []
    assert other.exists()


def test_redis(call: Call, tiny: str, redis_server: Redis) -> None:
    redis = ("--kv-redis", redis_server.url)
    call("generate", tiny, WORDS, *ARGUMENTS, *redis)
    [stats] = call("kv", "stats", *redis, "--json").json
    assert stats["num_blocks"] >= 1
    apart = call("kv", "stats", *redis, "--kv-namespace", "other", "--json").json
    assert apart[0]["num_blocks"] == 0
    assert call("kv", "clear", *redis, "--json").json == {"redis": stats["num_blocks"]}


@pytest.mark.parametrize("command", ["ls", "stats", "clear", "verify"])
def test_mistakes_are_one_line(call: Call, command: str, tmp_path: Path) -> None:
    call("kv", command).assert_mistake("--kv-disk", "--kv-redis")
    file = tmp_path / "file"
    file.touch()
    call("kv", command, "--kv-disk", str(file)).assert_mistake("is a file")
    call("kv", command, "--kv-redis", "http://host").assert_mistake("redis://")
    call("kv", command, "--kv-redis", "redis://host/0?foo=1").assert_mistake("'foo'")
    secret = f"unix://:secret@{tmp_path}/nothing"
    absent = call("kv", command, "--kv-redis", secret)
    absent.assert_mistake("is it there")
    assert "secret" not in absent.err


def test_a_wrong_url_is_said_before_it_matters(call: Call, tiny: str) -> None:
    call("generate", tiny, "the", "--kv-redis", "localhost").assert_mistake("redis://")
