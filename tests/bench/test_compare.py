"""`bench compare` on a tiny model: turns, texts, records, and an end before the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.bench.compare import Comparison, Skip, make_comparison
from draftwood.bench.contenders import Contender, EngineContender
from draftwood.bench.data import BenchPrompt
from draftwood.bench.difference import explain, first_difference, last_logits
from draftwood.bench.records import Run, RunRecord, read_records
from draftwood.cli.app import run as run_command
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from draftwood.sampling.noise import gumbel
from tests.tiny import TinyLLM, random_prompts, reference, save_tiny, tiny_llm

GREEDY = SamplingParams(max_tokens=12, seed=0)
SAMPLED = SamplingParams(max_tokens=12, seed=5, temperature=1.0)
PROMPT = random_prompts([9])[0]


def letters(tokens: Sequence[int]) -> str:
    """The text that the letter tokenizer makes of tokens."""
    return "".join(chr(ord("a") + token) for token in tokens)


PROMPTS = [
    BenchPrompt(f"p{i}", "odd" if i % 2 else "even", (letters(prompt),), chat=False)
    for i, prompt in enumerate(random_prompts([6, 9, 12, 15]))
]


def comparison(llm: LLM, drafters: Sequence[str], params: SamplingParams = GREEDY) -> Comparison:
    """Contenders without transformers."""
    return make_comparison(llm, "", drafters, params, transformers=False)


def started(one: Comparison, prompts: Sequence[BenchPrompt] = PROMPTS) -> list[Any]:
    """Runs a comparison; its results in order."""
    results: list[Any] = []
    one.start(prompts, results.append, lambda prompt, contender: None)
    return results


@pytest.fixture(scope="module")
def llm() -> TinyLLM:
    """A tiny model; its drafters propose and the controller is off."""
    return tiny_llm("llama", drafter="none")


class Liar(EngineContender):
    """An engine that changes one token of its output, or stops short of it."""

    def __init__(self, engine: Any, position: int, *, cut: bool = False) -> None:
        super().__init__("liar", engine)
        self._position, self._cut = position, cut

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> Run:
        """The engine's run with the change."""
        run = super().run(prompt_ids, params)
        i, tokens = self._position, run.token_ids
        wrong = () if self._cut else ((tokens[i] + 1) % 32, *tokens[i + 1 :])
        return Run(
            token_ids=(*tokens[:i], *wrong),
            first_token_s=run.first_token_s,
            total_s=run.total_s,
            cpu_s=run.cpu_s,
        )


class Stopper:
    """A contender at which the user presses Ctrl-C, at the n-th prompt after warming up."""

    name = "stopper"

    def __init__(self, nth: int) -> None:
        self._left = nth + 1

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> Run:
        """Two tokens, or an interrupt."""
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return Run(token_ids=(1, 2), first_token_s=0.1, total_s=0.2, cpu_s=0.2)

    def view(self) -> dict[str, Any]:
        """Nothing."""
        return {}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_every_drafter_gives_the_text_of_plain_decoding(
    llm: TinyLLM, params: SamplingParams
) -> None:
    names = ["suffix", "recycling", "auto", "random", "oracle"]
    records = started(comparison(llm, names, params))
    assert len(records) == 6 * len(PROMPTS)
    assert {record.contender for record in records} == {"plain", *names}
    assert all(record.identical and record.difference is None for record in records)
    assert all(record.num_tokens == 12 for record in records)
    llm.pool.check()


def test_the_oracle_follows_plain_decoding_and_is_always_right(llm: TinyLLM) -> None:
    records = started(comparison(llm, ["oracle", "suffix"]))
    for prompt in PROMPTS:
        order = {r.contender: r.order for r in records if r.prompt == prompt.id}
        assert order["oracle"] > order["plain"]
    for record in records:
        if record.contender == "oracle":
            # 12 tokens: one from the prompt's forward, 8 + 1, and the last two.
            assert record.rounds.num_rounds == 2
            assert record.rounds.num_accepted_tokens == record.rounds.num_draft_tokens == 9
            assert record.rounds.accepted_per_position[0] == 2


def test_the_order_rotates(llm: TinyLLM) -> None:
    records = started(comparison(llm, ["suffix", "auto"]))
    firsts = [record.contender for record in records if record.order == 0]
    assert firsts == ["plain", "suffix", "auto", "plain"]


def test_no_prompt_kv_is_reused_and_drafters_stay_warm(llm: TinyLLM) -> None:
    long = BenchPrompt("long", "k", (letters(random_prompts([64])[0]),), chat=False)
    again = BenchPrompt("again", "k", long.turns, chat=False)
    one = comparison(llm, ["recycling"])
    engines = [c.engine for c in one.contenders if isinstance(c, EngineContender)]
    cached: list[int] = []
    for engine in engines:
        engine.prefix.match = _spied(engine.prefix.match, cached)  # type: ignore[method-assign]
    records = [r for r in started(one, [long, again]) if r.contender == "recycling"]
    assert cached
    assert not any(cached)
    assert all(len(engine.prefix) == 0 for engine in engines)
    first, second = (r.rounds.num_accepted_tokens for r in records)
    assert second > first  # the second time the table knows the text


def _spied(match: Callable[..., Any], cached: list[int]) -> Callable[..., Any]:
    """The prefix index's match, noting how many blocks it found."""

    def spy(*arguments: Any, **keywords: Any) -> Any:
        found = match(*arguments, **keywords)
        cached.append(len(found.blocks))
        return found

    return spy


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_difference_is_found_with_its_place_and_margin(
    llm: TinyLLM, params: SamplingParams
) -> None:
    one = comparison(llm, [], params)
    plain = one.contenders[0]
    one.contenders = [plain, Liar(llm.engine, position=4)]
    [right, wrong] = started(one, PROMPTS[1:2])
    assert right.identical
    assert wrong.identical is False
    difference = wrong.difference
    prompt_ids = llm.tokenizer.encode(PROMPTS[1].turns[0])
    answer = one.answers[tuple(prompt_ids)]
    context = answer[: len(prompt_ids) + 4]
    assert (difference.position, difference.plain_token) == (4, answer[len(context)])
    assert difference.token == (difference.plain_token + 1) % 32
    with torch.inference_mode():
        logits = reference("llama")(torch.tensor([context])).logits[0, -1]
    if not params.greedy:
        noise = gumbel(5, len(context), torch.arange(32))
        logits = torch.log_softmax(logits, dim=-1).double() + noise
    best = logits.topk(2).values
    assert difference.margin == pytest.approx(float(best[0] - best[1]), abs=1e-3)
    gap = logits[difference.plain_token] - logits[difference.token]
    assert difference.gap == pytest.approx(float(gap), abs=1e-3)
    assert difference.gap >= difference.margin - 1e-6
    llm.pool.check()


def test_a_text_that_ends_early_differs_where_it_ends(llm: TinyLLM) -> None:
    one = comparison(llm, [])
    one.contenders = [one.contenders[0], Liar(llm.engine, position=7, cut=True)]
    difference = started(one, PROMPTS[:1])[1].difference
    assert (difference.position, difference.token, difference.gap) == (7, None, None)
    assert difference.margin > 0


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [1]) == 0


def test_equal_outputs_ask_nothing_of_the_target(llm: TinyLLM) -> None:
    assert explain(llm.model, llm.pool, PROMPT, [1, 2], [1, 2], GREEDY) is None


def test_logits_are_the_same_in_chunks(llm: TinyLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = last_logits(llm.model, llm.pool, PROMPT)
    monkeypatch.setattr("draftwood.bench.difference._CHUNK", 4)
    chunked = last_logits(llm.model, llm.pool, PROMPT)
    assert torch.allclose(whole, chunked, atol=1e-3)
    assert int(whole.argmax()) == int(chunked.argmax())


def test_an_interrupt_keeps_what_is_done(llm: TinyLLM) -> None:
    one = comparison(llm, ["suffix"])
    contenders: list[Contender] = [one.contenders[0], Stopper(1), one.contenders[1]]
    one.contenders = contenders
    results = started(one)
    assert one.interrupted
    assert one.records == results
    # The second prompt is the stopper's turn to begin: nothing of it was finished.
    assert [(r.prompt, r.contender) for r in results] == [
        ("p0", "plain"),
        ("p0", "stopper"),
        ("p0", "suffix"),
    ]
    llm.pool.check()


def test_an_interrupt_amid_a_prompt_keeps_its_finished_runs(llm: TinyLLM) -> None:
    one = comparison(llm, ["suffix"])
    one.contenders = [one.contenders[0], one.contenders[1], Stopper(0)]
    results = started(one)
    assert [(r.contender, r.identical) for r in results] == [("plain", True), ("suffix", True)]


def test_without_plain_decoding_nothing_is_said_about_the_text(llm: TinyLLM) -> None:
    one = comparison(llm, ["suffix"])
    one.contenders = [one.contenders[1], Stopper(0), one.contenders[0]]
    [record] = started(one)
    assert (record.contender, record.identical) == ("suffix", None)


def test_a_prompt_too_long_is_skipped_and_the_rest_runs(llm: TinyLLM) -> None:
    long = BenchPrompt("long", "k", ("a" * 250,), chat=False)
    empty = BenchPrompt("empty", "k", ("",), chat=False)
    results = started(comparison(llm, []), [long, empty, PROMPTS[0]])
    assert [type(result) for result in results] == [Skip, Skip, RunRecord]
    assert "250 prompt tokens and 12 new ones do not fit the context of 256" in results[0].reason
    assert "empty" in results[1].reason


# --- the command, with a model from a folder ----------------------------------------------------


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path_factory.getbasetemp() / "compare-cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model on disk."""
    return str(save_tiny(tmp_path_factory.mktemp("model") / "llama"))


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    """Three prompts of two kinds."""
    rows = [
        {"id": "a", "kind": "x", "prompt": "the quick brown fox"},
        {"id": "b", "kind": "y", "turns": ["the lazy dog"]},
        {"id": "c", "kind": "x", "prompt": "a tree of tokens is verified"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_the_command_compares_all_and_its_records_read_back(
    folder: str, prompt_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    options = ["--data", prompt_file, "--max-tokens", "8", "--out", str(out), "--json"]
    names = "none,suffix,recycling,auto,random,oracle"
    assert run_command(["bench", "compare", folder, "--drafters", names, *options]) == 0
    first, *runs, summary = read_records(out)
    everybody = {"transformers", "plain", *names.split(",")[1:]}
    assert first["type"] == "fingerprint"
    assert (first["model"]["name"], first["model"]["dtype"]) == ("llama", "float32")
    assert first["prompts"] == {"source": "prompts.jsonl", "count": 3}
    assert first["environment"]["torch"] == torch.__version__
    assert str(tmp_path) not in out.read_text()
    assert {(run["prompt"], run["contender"]) for run in runs} == {
        (prompt, name) for prompt in "abc" for name in everybody
    }
    for run in runs:
        record = RunRecord.from_json(run)
        assert record.identical, (record.prompt, record.contender, record.difference)
        again = json.loads(json.dumps(record.to_json()))
        assert {**again, "tokens_per_s": 0, "decode_tokens_per_s": 0} == {
            **run,
            "tokens_per_s": 0,
            "decode_tokens_per_s": 0,
        }
    assert set(summary["contenders"]) == everybody
    assert summary["contenders"]["oracle"]["texts"]["num_identical"] == 3
    assert json.loads(capsys.readouterr().out)["contenders"].keys() == everybody


def test_the_command_shows_a_table_of_all_contenders(
    folder: str, prompt_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", prompt_file, "--limit", "2", "--max-tokens", "4"]
    assert run_command(["bench", "compare", folder, "--drafters", "auto", *options]) == 0
    text = capsys.readouterr().out
    for name in ("transformers", "plain", "auto"):
        assert name in text


def test_transformers_is_left_out_where_tokens_are_sampled(
    folder: str, prompt_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", prompt_file, "--temperature", "0.8", "--max-tokens", "4", "--json"]
    assert run_command(["bench", "compare", folder, "--drafters", "suffix", *options]) == 0
    assert list(json.loads(capsys.readouterr().out)["contenders"]) == ["plain", "suffix"]


def test_a_draft_model_takes_part(
    folder: str, prompt_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", prompt_file, "--max-tokens", "6", "--json", "--no-transformers"]
    assert run_command(["bench", "compare", folder, "--draft", folder, *options]) == 0
    contenders = json.loads(capsys.readouterr().out)["contenders"]
    assert list(contenders) == ["plain", "suffix", "recycling", "lookup", "auto", "model"]
    assert contenders["model"]["texts"]["num_identical"] == 3


def test_ctrl_c_writes_and_shows_what_is_done(
    folder: str,
    prompt_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    run = EngineContender.run

    def interrupted(self: EngineContender, ids: Sequence[int], params: SamplingParams) -> Run:
        calls.append(self.name)
        if len(calls) == 6:  # two to warm up, then the second contender at the second prompt
            raise KeyboardInterrupt
        return run(self, ids, params)

    monkeypatch.setattr(EngineContender, "run", interrupted)
    out = tmp_path / "out.jsonl"
    options = ["--data", prompt_file, "--max-tokens", "4", "--no-transformers", "--out", str(out)]
    assert run_command(["bench", "compare", folder, "--drafters", "suffix", *options]) == 130
    rows = read_records(out)
    assert [row["type"] for row in rows] == ["fingerprint", "run", "run", "run", "summary"]
    assert rows[-1]["interrupted"] is True
    assert "Interrupted: the tables show what was done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafters", "magic"], "unknown drafter 'magic'"),
        (["--drafters", "model"], "give --draft"),
        (["--limit", "0"], "limit is 0"),
        (["--threads", "0"], "threads is 0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--data", "no-such.jsonl"], "no-such.jsonl cannot be read"),
        (["--out", "no/such/folder.jsonl"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(
    folder: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", "compare", folder, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
