"""`bench mlperf`: the real LoadGen over a tiny model, and the small ROUGE."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.bench.mlperf import (
    Conf,
    EngineSUT,
    Lengths,
    read_details,
    read_settings,
    reference_answers,
    run_test,
)
from draftwood.bench.mlperf_run import Plan, run_plan
from draftwood.bench.records import read_records
from draftwood.bench.rouge import mean_rouge, rouge_1, rouge_l
from draftwood.cli.app import run as run_command
from draftwood.errors import ConfigError, PromptError
from draftwood.sampling import SamplingParams
from tests.tiny import TinyLLM, random_prompts, save_tiny, tiny_llm

PARAMS = SamplingParams(max_tokens=4, min_tokens=2)
RULES = "llama3_1-8b"
LOGS = ("mlperf_log_summary.txt", "mlperf_log_detail.txt", "mlperf_log_accuracy.json")


@pytest.fixture(scope="module")
def llm() -> TinyLLM:
    """A tiny model that some drafter drafts for."""
    made = tiny_llm("llama", drafter="none", adaptive=False)
    made.make_drafter = lambda name: made._tiny_drafter(name)  # type: ignore[method-assign]
    return made


def samples() -> list[list[int]]:
    """Five prompts."""
    return random_prompts([6, 9, 12, 15, 18])


def lengths(**changes: float) -> Lengths:
    """A run of a moment."""
    values = {
        "seconds": 0.2, "min_queries": 70, "offline_qps": 400.0, "server_qps": 200.0,
        "latency_ms": 1, "samples": 5,
    }  # fmt: skip
    return Lengths(**{**values, **changes})  # type: ignore[arg-type]


def plan(out: Path, **changes: object) -> Plan:
    """Everything, short. A 90th percentile is sure after 70 queries; the 99th after 459."""
    conf = out / "short.conf"
    extra = "*.Server.target_latency_percentile = 90\n"
    conf.write_text(lengths().user_conf(RULES) + extra, encoding="utf-8")
    values = {
        "drafters": ["none", "bushy"],
        "scenarios": ["Offline", "SingleStream", "Server"],
        "modes": ["performance", "accuracy"],
        "rules": RULES,
        "seconds": 0.2,
        "min_queries": 70,
        "server_qps": None,
        "user_conf": conf,
        "mlperf_conf": None,
        "out": out,
    }
    return Plan(**{**values, **changes})  # type: ignore[arg-type]


def test_all_scenarios_in_both_modes(llm: TinyLLM, tmp_path: Path) -> None:
    results = list(run_plan(llm, samples(), PARAMS, plan(tmp_path)))
    assert len(results) == 2 * 3 * 2
    for result in results:
        folder = tmp_path / result.contender / result.scenario / result.mode
        assert all((folder / name).is_file() for name in LOGS)
        if result.mode == "accuracy":
            assert (result.num_identical, result.num_samples) == (5, 5)
            assert result.metrics["rouge1"] == result.metrics["rougeL"] == 100.0
            assert result.metrics["tokens_per_sample"] == 4.0
        else:
            # On a machine that is very fast or very busy LoadGen may say one of these.
            assert set(result.reason.split("; ")) <= {"", "too short", "latency above the limit"}
            assert result.metrics["tokens_per_s"] > result.metrics["samples_per_s"] > 0
            if result.scenario != "Offline":
                assert 0 < result.metrics["ttft_p99_s"] < result.metrics["latency_p99_s"]
                assert result.metrics["tpot_p99_s"] > 0
    assert any(result.valid for result in results), "LoadGen accepts short settings"
    assert all(
        bool(result.reason) != result.valid for result in results if result.valid is not None
    )
    assert llm.pool.num_free == llm.pool.num_blocks
    llm.pool.check()


def test_a_run_that_was_planned_too_short_is_repeated(llm: TinyLLM, tmp_path: Path) -> None:
    short = plan(
        tmp_path,
        user_conf=None,
        drafters=["none"],
        scenarios=["Offline"],
        modes=["performance"],
        min_queries=1,
    )
    [result] = run_plan(llm, samples(), PARAMS, short)
    assert result.valid, result.reason
    assert (tmp_path / "plain/Offline/performance/user.conf").is_file()


def test_rules_are_mlperfs_and_lengths_ours(tmp_path: Path) -> None:
    path = tmp_path / "user.conf"
    path.write_text(lengths(seconds=7, server_qps=2.5).user_conf(RULES), encoding="utf-8")
    for scenario in ("Offline", "Server"):  # both: LoadGen reads its own file once a process
        settings = read_settings(Conf(path, RULES), scenario)
        assert settings.use_token_latencies
        assert settings.sample_concatenate_permutation
        assert (settings.min_duration_ms, settings.min_query_count) == (7000, 70)
    assert (settings.ttft_latency, settings.tpot_latency) == (2_000_000_000, 100_000_000)
    assert settings.server_target_qps == 2.5
    with pytest.raises(ConfigError, match="LoadGen cannot read"):
        read_settings(Conf(tmp_path / "none.conf", RULES), "Server")


def test_a_mlperf_conf_of_ones_own_stands_between(tmp_path: Path) -> None:
    """Its limits replace the built-in ones; what it leaves out stays; user.conf is above it."""
    path, own = tmp_path / "user.conf", tmp_path / "mlperf.conf"
    path.write_text("*.Server.target_qps = 3\n*.*.min_query_count = 9\n", encoding="utf-8")
    own.write_text(
        f"{RULES}.*.ttft_latency = 555\n*.*.min_query_count = 5\n*.*.min_duration = 77\n",
        encoding="utf-8",
    )
    settings = read_settings(Conf(path, RULES, own), "Server")
    assert (settings.ttft_latency, settings.tpot_latency) == (555_000_000, 100_000_000)
    assert (settings.min_query_count, settings.min_duration_ms) == (9, 77)
    assert settings.server_target_qps == 3
    own.unlink()
    with pytest.raises(ConfigError, match=r"LoadGen cannot read .*mlperf\.conf"):
        read_settings(Conf(path, RULES, own), "Server")


@pytest.mark.parametrize("scenario", ["Offline", "SingleStream", "Server"])
def test_a_user_conf_decides_how_long_a_run_is(llm: TinyLLM, tmp_path: Path, scenario: str) -> None:
    conf = tmp_path / "mine.conf"
    text = lengths(min_queries=3, seconds=0.05).user_conf(RULES)
    conf.write_text(text.replace("min_query_count = 3", "min_query_count = 12"), encoding="utf-8")
    [result] = run_plan(
        llm, samples(), PARAMS,
        plan(
            tmp_path, user_conf=conf, scenarios=[scenario], modes=["performance"], drafters=["none"]
        ),
    )  # fmt: skip
    details = read_details(tmp_path / "plain" / scenario / "performance")
    assert details["requested_min_query_count"] == 12
    assert details["requested_min_duration_ms"] == 50
    if scenario != "Offline":
        assert result.metrics["queries"] >= 12


def test_an_error_ends_the_run_and_is_told(llm: TinyLLM, tmp_path: Path) -> None:
    """LoadGen would wait for ever for a sample that nobody answers."""
    engine = llm.make_engine(llm.make_drafter("none"))
    sut = EngineSUT(engine, [[1, 2], [3] * 1000, [4]], PARAMS)
    conf = tmp_path / "user.conf"
    conf.write_text(lengths(samples=3).user_conf(RULES), encoding="utf-8")
    with pytest.raises(PromptError):
        run_test(sut, "Offline", "accuracy", Conf(conf, RULES), tmp_path / "logs")
    assert llm.pool.num_free == llm.pool.num_blocks


def test_the_reference_is_plain_decoding(llm: TinyLLM) -> None:
    engine = llm.make_engine(llm.make_drafter("none"))
    answers = reference_answers(engine, samples(), PARAMS)
    assert [list(answer) for answer in answers] == llm.run(samples(), PARAMS)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = save_tiny(tmp_path / "llama"), tmp_path / "out"
    arguments = ["bench", "mlperf", str(model), "--out", str(out), "--drafters", "suffix"]
    more = ["--scenarios", "offline", "--limit", "3", "--max-tokens", "4", "--seconds", "0.2"]
    assert run_command([*arguments, *more, "--min-queries", "1"]) == 0
    shown = capsys.readouterr().out
    assert "not an MLPerf result" in shown
    rows = read_records(out / "record.jsonl")
    assert [row["type"] for row in rows] == ["fingerprint", "mlperf", "mlperf"]
    assert {row["mode"] for row in rows[1:]} == {"performance", "accuracy"}
    assert run_command([*arguments, "--scenarios", "MultiStream"]) == 2
    assert "use Offline, SingleStream, Server" in capsys.readouterr().err
    assert run_command([*arguments, "--kind", "poem"]) == 2
    assert "no prompt is of kind 'poem'" in capsys.readouterr().err


def test_without_loadgen_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_loadgen", None)
    assert run_command(["bench", "mlperf", "x", "--out", str(tmp_path / "o")]) == 2
    assert "pip install 'draftwood[mlperf]'" in capsys.readouterr().err


def test_rouge_by_hand() -> None:
    """Lin 2004, section 3: "police killed the gunman" against "police kill the gunman"."""
    reference = "police killed the gunman"
    assert rouge_l("police kill the gunman", reference) == 0.75
    assert rouge_l("the gunman kill police", reference) == 0.5
    assert rouge_1("the gunman kill police", reference) == 0.75
    assert rouge_1("Police, police!", "police") == pytest.approx(2 / 3)
    assert rouge_1("", "") == 1.0
    assert rouge_1("", "word") == 0.0
    assert mean_rouge([("a b", "a b"), ("c", "d")]) == {"rouge1": 50.0, "rougeL": 50.0}


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc")))
def test_order_can_only_cost(a: list[str], b: list[str]) -> None:
    ours, theirs = " ".join(a), " ".join(b)
    assert 0 <= rouge_l(ours, theirs) <= rouge_1(ours, theirs) <= 1
    assert rouge_l(ours, theirs) == rouge_l(theirs, ours)
    assert rouge_l(ours, ours) == 1
