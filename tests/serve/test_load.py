"""`draftwood bench serve`: what it measures is what the server did."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.bench.data import BenchPrompt
from draftwood.bench.serve import LoadPlan, LoadRecord, _ratio, measure, percentile
from draftwood.bench.serve_overhead import OverheadPair, summarise
from draftwood.bench.serve_overhead import measure as measure_overhead
from draftwood.bench.sse import Target, Timed, ask
from draftwood.cli.app import run
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from tests.serve.conftest import Live

PROMPTS = [
    BenchPrompt("a", "text", ("the quick brown fox",), chat=False),
    BenchPrompt("b", "chat", ("a tree of tokens",), chat=True),
]


def test_every_text_is_measured_in_both_modes(live: Live) -> None:
    records: list[LoadRecord] = []
    plan = LoadPlan(concurrency=(1, 3), num_requests=4, num_blocks=2, max_tokens=9)
    load = measure(Target.of(live.url + "/v1/"), PROMPTS, plan, records.append)
    modes = [(point.concurrency, point.speculation) for point in load.points]
    assert modes == [(1, True), (1, False), (3, True), (3, False)]
    counts = [(point.num_requests, point.num_failed) for point in load.points]
    assert counts == [(8, 0)] * 2 + [(12, 0)] * 2  # two for each client at least
    assert len(records) == 40
    for record in records:
        assert record.error is None
        assert record.num_tokens == 9
        assert 0 < record.first_token_s <= record.total_s
        assert math.isclose(record.total_s - record.first_token_s, sum(record.gaps_s))
        plain = record.acceptance_length == 1.0
        assert plain or record.speculation
    assert [(one.concurrency, one.num_pairs) for one in load.ratios] == [(1, 2), (3, 2)]
    assert all(0 < one.worst <= one.ratio for one in load.ratios)
    order = [record.speculation for record in records if record.concurrency == 1]
    assert order == [True] * 4 + [False] * 8 + [True] * 4


def test_a_plain_server_gets_the_same_texts_without_the_field(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server stands for both; what each is asked differs in nothing."""
    asked: list[tuple[str | None, dict[str, Any]]] = []

    async def spy(
        target: Target, method: str, path: str, body: dict[str, Any], request_id: str | None
    ) -> Timed:
        assert request_id is None
        asked.append((target.key, body))
        return await ask(target, method, path, body)

    monkeypatch.setattr("draftwood.bench.serve.ask", spy)
    plan = LoadPlan(concurrency=(1,), num_requests=3, num_blocks=2, max_tokens=2)
    load = measure(Target.of(live.url, "on"), PROMPTS, plan, plain=Target.of(live.url, "off"))
    assert [point.speculation for point in load.points] == [True, False]
    assert not any("speculation" in body for _, body in asked)
    del asked[:2]
    assert [key for key, _ in asked] == ["on"] * 3 + ["off"] * 6 + ["on"] * 3
    bodies = [body for _, body in asked]
    assert bodies[:3] == bodies[3:6]
    assert bodies[6:9] == bodies[9:]
    texts = [json.dumps(body) for body in bodies]
    assert len(set(texts)) == 6


def test_a_ratio_is_that_of_blocks_side_by_side() -> None:
    """A machine that gets slower between pairs changes nothing."""
    one = _ratio(8, [100.0, 55.0, 9.0], [100.0, 50.0, 10.0])
    assert (one.ratio, one.worst, one.num_pairs) == (1.0, 0.9, 3)


def test_http_is_compared_with_the_engine_in_process(make_llm: Callable[..., LLM]) -> None:
    pairs: list[OverheadPair] = []
    llm = make_llm()
    overhead = measure_overhead(llm, PROMPTS, max_tokens=12, num_rounds=2, watch=pairs.append)
    assert [pair.prompt for pair in pairs] == ["a", "b", "a", "b"]
    for pair in pairs:
        assert pair.num_tokens == 12
        assert pair.same_text
        assert min(pair.process_s, pair.http_s, pair.process_cpu_s, pair.http_cpu_s) > 0
    assert (overhead.num_pairs, overhead.num_same_texts) == (4, 4)
    assert overhead.ratio > 1  # a tiny model's rounds are short: HTTP shows
    assert not llm.engine.observers


def test_overhead_is_a_matter_of_ratios() -> None:
    def pair(process_s: float, http_s: float) -> OverheadPair:
        return OverheadPair(
            prompt="a",
            num_tokens=10,
            process_s=process_s,
            http_s=http_s,
            process_cpu_s=2 * process_s,
            http_cpu_s=3 * process_s,
            same_text=True,
        )

    overhead = summarise([pair(1.0, 1.02), pair(4.0, 4.04), pair(2.0, 2.2)])
    assert math.isclose(overhead.ratio, 1.02)
    assert math.isclose(overhead.cpu_ratio, 1.5)
    assert math.isclose(overhead.process_s, 0.2)


def test_what_fails_is_counted_and_nothing_answers_is_said(live: Live) -> None:
    plan = LoadPlan(concurrency=(1,), num_requests=1, num_blocks=1, max_tokens=9)
    with pytest.raises(ConfigError, match="gave no text: ConnectionRefusedError"):
        measure(Target.of("http://127.0.0.1:1"), PROMPTS, plan)
    too_long = LoadPlan(concurrency=(1,), num_requests=1, num_blocks=1, max_tokens=999)
    with pytest.raises(ConfigError, match=r"HTTP 400: .*max_tokens is 999"):
        measure(Target.of(live.url), PROMPTS, too_long)
    mixed = [PROMPTS[0], BenchPrompt("long", "text", ("the dog " * 300,), chat=False)]
    load = measure(
        Target.of(live.url),
        mixed,
        LoadPlan(concurrency=(1,), num_requests=2, num_blocks=1, max_tokens=2, compare=False),
    )
    [point] = load.points
    assert load.ratios == []
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
    assert kinds == ["fingerprint"] + ["request"] * 8 + ["load"] * 2 + ["load_ratio"]
    assert rows[0]["num_prompts"] == 1
    assert rows[0]["max_tokens"] == 4
    assert "127.0.0.1" not in out.read_text()
    assert run([*command, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3


def test_a_model_is_served_with_and_without_speculation(
    live: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With places for all clients, unless an option says otherwise."""
    commands: list[list[str]] = []

    @contextmanager
    def served(model: str, options: Sequence[str]) -> Iterator[str]:
        commands.append([model, *options])
        yield live.url

    monkeypatch.setattr("draftwood.bench.served.served", served)
    load = ["--concurrency", "1,2", "--requests", "1", "--blocks", "1", "--max-tokens", "2"]
    assert run(["bench", "serve", "smollm2-135m", "--server-option=--draft=x", *load]) == 0
    assert "x plain" in capsys.readouterr().out
    with_draft = ["smollm2-135m", "--max-num-seqs=2", "--draft=x"]
    assert commands == [with_draft, [*with_draft, "--no-speculation"]]


def test_the_command_measures_overhead(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "overhead.jsonl"
    few = ["--overhead", "--limit", "1", "--blocks", "1", "--max-tokens", "3"]
    assert run(["bench", "serve", str(tiny_folder), *few, "--out", str(out)]) == 0
    assert "over HTTP" in capsys.readouterr().out
    kinds = [json.loads(line)["type"] for line in out.read_text().splitlines()]
    assert kinds == ["fingerprint", "overhead_pair", "overhead"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ftp://host"], "http://host:port"),
        (["http://host:port"], "no URL"),
        (["no-such-model"], "no-such-model"),
        (["http://127.0.0.1:1", "--server-option=--port=1"], "--server-option"),
        (["http://127.0.0.1:1", "--concurrency", "0"], "concurrency"),
        (["http://127.0.0.1:1", "--overhead"], "MODEL"),
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
