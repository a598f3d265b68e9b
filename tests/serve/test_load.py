"""`draftwood bench serve`: what it measures is what the server did."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.bench.data import BenchPrompt
from draftwood.bench.serve import LoadPlan, LoadRecord, measure, percentile, ratios
from draftwood.bench.sse import Target
from draftwood.cli.app import run
from draftwood.errors import ConfigError
from tests.serve.conftest import Live

PROMPTS = [
    BenchPrompt("a", "text", ("the quick brown fox",), chat=False),
    BenchPrompt("b", "chat", ("a tree of tokens",), chat=True),
]


def test_every_text_is_measured_in_both_modes(live: Live) -> None:
    records: list[LoadRecord] = []
    plan = LoadPlan(concurrency=(1, 3), num_requests=4, num_blocks=2, max_tokens=9)
    points = measure(Target.of(live.url + "/v1/"), PROMPTS, plan, records.append)
    modes = [(point.concurrency, point.speculation) for point in points]
    assert modes == [(1, True), (1, False), (3, True), (3, False)]
    assert [(point.num_requests, point.num_failed) for point in points] == [(8, 0)] * 4
    assert len(records) == 32
    for record in records:
        assert record.error is None
        assert record.num_tokens == 9
        assert 0 < record.first_token_s <= record.total_s
        assert math.isclose(record.total_s - record.first_token_s, sum(record.gaps_s))
        plain = record.acceptance_length == 1.0
        assert plain or record.speculation
    assert set(ratios(points)) == {1, 3}
    order = [record.speculation for record in records if record.concurrency == 1]
    assert order == [True] * 4 + [False] * 8 + [True] * 4


def test_what_fails_is_counted_and_nothing_answers_is_said(live: Live) -> None:
    plan = LoadPlan(concurrency=(1,), num_requests=1, num_blocks=1, max_tokens=9)
    with pytest.raises(ConfigError, match="gave no text: ConnectionRefusedError"):
        measure(Target.of("http://127.0.0.1:1"), PROMPTS, plan)
    too_long = LoadPlan(concurrency=(1,), num_requests=1, num_blocks=1, max_tokens=999)
    with pytest.raises(ConfigError, match=r"HTTP 400: .*max_tokens is 999"):
        measure(Target.of(live.url), PROMPTS, too_long)
    mixed = [PROMPTS[0], BenchPrompt("long", "text", ("the dog " * 300,), chat=False)]
    [point] = measure(
        Target.of(live.url),
        mixed,
        LoadPlan(concurrency=(1,), num_requests=2, num_blocks=1, max_tokens=2, compare=False),
    )
    assert (point.num_requests, point.num_failed, point.speculation) == (2, 1, None)


def test_the_command_writes_a_record_and_a_table(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "prompts.txt", tmp_path / "load.jsonl"
    data.write_text("the quick\n", encoding="utf-8")
    load = ["--concurrency", "2", "--requests", "2", "--blocks", "1", "--max-tokens", "4"]
    command = ["bench", "serve", live.url, "--data", str(data), "--out", str(out), *load]
    assert run(command) == 0
    assert "tokens/s" in capsys.readouterr().out
    rows: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
    kinds = [row["type"] for row in rows]
    assert kinds == ["fingerprint"] + ["request"] * 4 + ["load"] * 2
    assert "127.0.0.1" not in out.read_text()
    assert run([*command, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ftp://host"], "http://host:port"),
        (["http://host:port"], "no URL"),
        (["no-such-model"], "no-such-model"),
        (["http://127.0.0.1:1", "--server-option=--port=1"], "--server-option"),
        (["http://127.0.0.1:1", "--concurrency", "0"], "concurrency"),
    ],
)
def test_a_wrong_option_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


@given(st.lists(st.floats(0, 1), min_size=1), st.floats(1, 100))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(
    values: list[float], percent: float
) -> None:
    value = percentile(values, percent)
    assert value in values
    share = sum(one <= value for one in values) / len(values)
    assert share * 100 >= percent - 1e-9
    assert percentile([], percent) is None
