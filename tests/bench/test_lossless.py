"""`bench lossless`: what is compared, that a difference is found, and what a share may be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftwood.bench.data import BenchPrompt
from draftwood.bench.lossless import ComparedText, measure, summarise, upper_bound
from draftwood.cli.app import run as run_command
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from tests.tiny import save_tiny, tiny_llm

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = GREEDY.but(temperature=0.8, seed=3)


def prompts(count: int, length: int = 4) -> list[BenchPrompt]:
    return [
        BenchPrompt(f"p{i}", "text", ("abc"[i] + "xyzzy" * length,), chat=False)
        for i in range(count)
    ]


def bushy_llm() -> LLM:
    """Its "auto" draws bushy random trees."""
    llm = tiny_llm(adaptive=False)
    llm.make_drafter = lambda name: llm._tiny_drafter("bushy" if name == "auto" else name)  # type: ignore[method-assign]
    return llm


def test_every_text_is_compared_for_every_drafter_and_temperature() -> None:
    llm = bushy_llm()
    free = llm.pool.num_free
    texts = measure(llm, ["none", "auto", "oracle"], prompts(3), [GREEDY, SAMPLED], together=2)
    assert sorted((t.temperature, t.drafter, t.prompt) for t in texts) == [
        (temperature, drafter, f"p{i}")
        for temperature in (0.0, 0.8) for drafter in ("auto", "oracle") for i in range(3)
    ]  # fmt: skip
    assert all(text.difference is None and text.num_tokens == 12 for text in texts)
    assert all(text.num_draft_tokens > 0 for text in texts)
    oracle = [text for text in texts if text.drafter == "oracle"]
    assert all(text.num_accepted_tokens > 0 for text in oracle)
    assert llm.pool.num_free == free


def test_a_changed_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafting engine's verdicts are spoilt: every text's third token becomes another."""
    from draftwood.bench import lossless

    honest = lossless._generate

    def spoilt(engine, asked, params):  # type: ignore[no-untyped-def]
        seqs = honest(engine, asked, params)
        if type(engine.drafter.inner).__name__ != "NoDrafter":
            for seq in seqs:
                seq.tokens[seq.num_prompt_tokens + 2] ^= 1
        return seqs

    monkeypatch.setattr(lossless, "_generate", spoilt)
    texts = measure(bushy_llm(), ["auto"], prompts(2), [GREEDY], together=2)
    assert [text.difference.position for text in texts if text.difference] == [2, 2]
    [line] = summarise(texts)
    assert (line.num_texts, line.num_different, line.rate) == (2, 2, 1.0)


def test_prompts_that_do_not_fit_are_left_out_and_none_that_fits_is_an_error() -> None:
    llm = bushy_llm()
    long = BenchPrompt("long", "text", ("x" * llm.engine.max_length,), chat=False)
    texts = measure(llm, ["auto"], [long, *prompts(1)], [GREEDY], together=2)
    assert [text.prompt for text in texts] == ["p0"]
    with pytest.raises(ConfigError, match="no prompt fits"):
        measure(llm, ["auto"], [long], [GREEDY], together=2)


def test_rates_are_by_drafter_and_temperature() -> None:
    def text(drafter: str, temperature: float) -> ComparedText:
        return ComparedText(
            prompt="p", kind="k", drafter=drafter, temperature=temperature, num_tokens=10,
            num_draft_tokens=8, num_accepted_tokens=3, difference=None,
        )  # fmt: skip

    lines = summarise([text("a", 0), text("b", 0), text("a", 0), text("a", 0.8)])
    assert [(one.drafter, one.temperature, one.num_texts, one.num_tokens) for one in lines] == [
        ("a", 0, 2, 20), ("b", 0, 1, 10), ("a", 0.8, 1, 10),
    ]  # fmt: skip


def test_the_bound_is_wilsons() -> None:
    """A share that would show as few hits as these at 1.6449 standard deviations, no more."""
    assert upper_bound(0, 100) == pytest.approx(2.70571 / 102.70571, rel=1e-4)
    assert upper_bound(5, 5) == 1.0
    share = upper_bound(10, 100)
    assert (share - 0.1) / (share * (1 - share) / 100) ** 0.5 == pytest.approx(1.6449, abs=1e-4)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny(tmp_path / "model")
    out = tmp_path / "texts.jsonl"
    arguments = ["bench", "lossless", str(model), "--limit", "2", "--max-tokens", "6"]
    assert run_command([*arguments, "--drafters", "suffix", "--out", str(out), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert [(line["temperature"], line["num_different"]) for line in lines] == [(0, 0), (0.8, 0)]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["type"] for row in rows] == ["fingerprint", *["text"] * 4, *["difference_rate"] * 2]
    assert rows[0]["command"] == "lossless"


def test_wrong_temperatures_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "lossless", "x", "--temperatures", "warm"]) == 2
    assert "temperatures is 'warm'" in capsys.readouterr().err
