"""What the commands do when they are used as meant."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from draftwood.cli import generate as generate_module
from draftwood.cli.app import app
from draftwood.cli.running import Request, complete
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams
from tests.cli.conftest import Call

SAMPLED = ("--temperature", "0.8", "--seed", "7", "--max-tokens", "40", "--ignore-eos")


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, (*path, name))


@pytest.mark.parametrize("path", list(_commands(typer.main.get_command(app))), ids=" ".join)
def test_every_help_shows_an_example(call: Call, path: tuple[str, ...]) -> None:
    answer = call(*path, "--help")
    assert answer.code == 0
    group = path in (("bench",), ("kv",))
    assert group or "Example" in answer.out
    assert " ".join(["draftwood", *path]) in answer.out


@pytest.mark.parametrize("path", [(), ("bench",), ("kv",)])
def test_nothing_to_do_shows_the_help(call: Call, path: tuple[str, ...]) -> None:
    """It printed "error: " and nothing behind it."""
    answer = call(*path)
    assert (answer.code, answer.err) == (0, "")
    assert "Commands" in answer.out


def test_version(call: Call) -> None:
    answer = call("--version")
    assert (answer.code, answer.out.split()[0]) == (0, "draftwood")


def test_help_and_mistakes_import_neither_torch_nor_transformers() -> None:
    """Importing the parameters once imported torch: help took 1.5 seconds."""
    code = (
        "import sys; from draftwood.cli.app import run; run(['--help']); "
        "run(['generate', 'nothing-of-this-name', 'hi']); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("options", [(), ("--chat",), SAMPLED])
def test_the_text_is_the_same_without_speculation(
    call: Call, tiny: str, options: tuple[str, ...]
) -> None:
    one = call("generate", tiny, "the quick brown fox", *options)
    other = call("generate", tiny, "the quick brown fox", "--no-speculation", *options)
    assert one.code == other.code == 0
    assert len(one.out) > 10
    assert one.out == other.out
    assert one.err == other.err == ""


def test_json_agrees_with_the_stream(call: Call, tiny: str) -> None:
    streamed = call("generate", tiny, "the", *SAMPLED)
    record = call("generate", tiny, "the", *SAMPLED, "--json").json
    [output] = record["outputs"]
    assert output["text"] + "\n" == streamed.out
    assert output["num_tokens"] == len(output["token_ids"]) == 40
    assert (output["seed"], output["finish_reason"]) == (7, "length")
    assert (record["drafter"], record["interrupted"]) == ("auto", False)


def test_stats_go_to_stderr(call: Call, tiny: str) -> None:
    plain, stats = call("generate", tiny, "the"), call("generate", tiny, "the", "--stats")
    assert stats.out == plain.out
    for words in ("tokens/s", "mean acceptance length", "time: draft", "cached", "rows: target"):
        assert words in stats.err
    drafted = call("generate", tiny, "the", "--stats", "--draft", tiny)
    assert drafted.out == plain.out
    assert "ms; draft " in drafted.err


def test_a_draft_of_another_vocabulary_gives_the_same_text(
    call: Call, tiny: str, other_vocabulary: str
) -> None:
    """The vocabularies have the same size, and only two of their tokens differ."""
    plain = call("generate", tiny, "the dog", "--no-speculation")
    drafted = call("generate", tiny, "the dog", "--draft", other_vocabulary)
    assert (drafted.code, drafted.out) == (0, plain.out)
    assert plain.out.strip()


@pytest.mark.parametrize("match", ["tokens", "text"])
def test_how_the_draft_is_matched_and_stored_changes_no_text(
    call: Call, tiny: str, other_vocabulary: str, match: str
) -> None:
    """--show-tree tells how it was matched: only text has tokens that are the last of a path."""
    plain = call("generate", tiny, "the dog", "--no-speculation")
    draft = ("--draft", other_vocabulary, "--draft-match", match, "--drafter", "model")
    drafted = call("generate", tiny, "the dog", *draft, "--draft-quantization", "none")
    assert (drafted.code, drafted.out) == (0, plain.out)
    shown = call("generate", tiny, "the dog", *draft, "--show-tree", "--max-tokens", "12")
    assert ("last" in shown.err) == (match == "text")


def test_draft_depth_and_one_prompts_own_limits(call: Call, tiny: str, tmp_path: Path) -> None:
    """A limit for all on the command line; a prompt of a file may have another."""
    limits: list[dict[str, object]] = [{}, {"max_draft_depth": 1}, {"speculation": False}]
    lines = [json.dumps({"prompt": "the dog", "params": limit}) for limit in limits]
    (tmp_path / "job.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = ("--draft", tiny, "--drafter", "model", "--draft-depth", "3", "--json")
    answer = call("generate", tiny, "--prompt-file", str(tmp_path / "job.jsonl"), *options)
    outputs = answer.json["outputs"]
    assert len({one["text"] for one in outputs}) == 1
    accepted = [one["accepted_per_position"] for one in outputs]
    assert [len(one) for one in accepted] == [3, 1, 0]


@pytest.mark.parametrize(
    "option", ["--repetition-penalty=1.5", "--presence-penalty=2", "--frequency-penalty=1.5"]
)
def test_penalties_change_the_text_and_speculation_does_not(
    call: Call, tiny: str, option: str
) -> None:
    free = call("generate", tiny, "the dog the dog")
    one = call("generate", tiny, "the dog the dog", option)
    other = call("generate", tiny, "the dog the dog", option, "--no-speculation")
    assert one.code == 0, one.err
    assert one.out == other.out != free.out


def test_the_tree_goes_to_stderr_with_the_accepted_path_marked(call: Call, tiny: str) -> None:
    """A model that drafts for itself is always right, so every round has a path."""
    plain = call("generate", tiny, "the")
    answer = call("generate", tiny, "the", "--draft", tiny, "--show-tree")
    assert answer.out == plain.out
    assert "✓" in answer.err
    assert "⇒" in answer.err
    assert "round 2" in answer.err


def test_beams_find_a_likelier_text(call: Call, tiny: str) -> None:
    options = ("--max-tokens", "12", "--ignore-eos")
    plain = call("generate", tiny, "the quick", *options)
    beams = ("--beams", "4", "--length-penalty", "0.5", "--early-stopping", "never")
    text = call("generate", tiny, "the quick", *options, *beams)
    record = call("generate", tiny, "the quick", *options, *beams, "--json").json["outputs"][0]
    params = SamplingParams(
        max_tokens=12, ignore_eos=True, num_beams=4, length_penalty=0.5, early_stopping="never"
    )
    [expected] = LLM(tiny).generate("the quick", params)
    assert text.out == record["text"] + "\n" == expected.text + "\n" != plain.out
    assert record["score"] == expected.score
    many = call("generate", tiny, "the dog " * 50, "--beams", "3", "--json", "--ignore-eos").json
    assert many["outputs"][0]["num_tokens"] > 20, "with no --max-tokens it is what KV has room for"


def test_the_prompt_can_come_through_a_pipe(call: Call, tiny: str) -> None:
    expected = call("generate", tiny, "the dog")
    assert call("generate", tiny, stdin="the dog\n").out == expected.out
    assert call("generate", tiny, "-", stdin="the dog\n").out == expected.out


def test_a_prompt_of_special_tokens_only_is_answered(call: Call, tiny: str) -> None:
    answer = call("generate", tiny, "<|im_start|><|im_start|>", "--json")
    assert answer.code == 0
    assert answer.json["outputs"][0]["num_prompt_tokens"] == 2


def test_max_tokens_left_out_is_what_the_context_has_room_for(call: Call, tiny: str) -> None:
    """128 tokens behind a long prompt do not fit 256: the default alone must not be an error."""
    [output] = call("generate", tiny, "the dog " * 50, "--json", "--ignore-eos").json["outputs"]
    assert output["num_prompt_tokens"] + output["num_tokens"] == 256


def test_many_prompts_give_what_each_gives_alone(call: Call, tiny: str, tmp_path: Path) -> None:
    prompts = ["the quick", "a tree of", "def add("]
    text = tmp_path / "prompts.txt"
    text.write_text("\n".join(prompts) + "\n", encoding="utf-8")
    alone = [call("generate", tiny, prompt).out for prompt in prompts]
    answer = call("generate", tiny, "--prompt-file", str(text))
    expected = [f"==> {i} <==\n{one}\n" for i, one in enumerate(alone, start=1)]
    assert answer.out == "".join(expected)


def test_lines_of_json_may_be_chats_and_carry_parameters(
    call: Call, tiny: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        "a tree of",
        {"id": "talk", "messages": [{"role": "user", "content": "the dog"}]},
        {"prompt": [5, 6, 7], "params": {"max_tokens": 3, "ignore_eos": True}},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    outputs = call("generate", tiny, "--prompt-file", str(file), "--json").json["outputs"]
    assert [output["id"] for output in outputs[1:2]] == ["talk"]
    assert outputs[1]["text"] + "\n" == call("generate", tiny, "the dog", "--chat").out
    assert (outputs[2]["num_prompt_tokens"], outputs[2]["num_tokens"]) == (3, 3)


def test_a_chat_keeps_its_history_and_its_kv(call: Call, tiny: str) -> None:
    answer = call(
        "chat", tiny, "--json", "--max-tokens", "20", stdin="the fox\n\nthe dog\n/reset\nthe fox\n"
    )
    first, second, again = [json.loads(line) for line in answer.out.splitlines()]
    assert second["num_prompt_tokens"] > first["num_prompt_tokens"] + first["num_tokens"]
    assert second["num_cached_tokens"] >= first["num_prompt_tokens"] // 16 * 16 > 0
    assert again["text"] == first["text"]
    assert again["num_prompt_tokens"] == first["num_prompt_tokens"]


def test_a_chat_ends_with_quit(call: Call, tiny: str) -> None:
    answer = call("chat", tiny, "--max-tokens", "4", stdin="the fox\n/quit\nthe dog\n")
    assert answer.code == 0
    assert answer.out == call("generate", tiny, "the fox", "--chat", "--max-tokens", "4").out


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Presses Ctrl-C when the third piece of text comes; holds the pieces."""
    pieces: list[str] = []
    transcript = generate_module.Transcript

    class Pressing(transcript):  # type: ignore[misc, valid-type]
        def add(self, index: int, text: str, ended: bool) -> None:
            super().add(index, text, ended)
            pieces.append(text)
            if len(pieces) == 3:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(generate_module, "Transcript", Pressing)
    return pieces


def test_ctrl_c_prints_what_was_generated(call: Call, tiny: str, interrupted: list[str]) -> None:
    answer = call("generate", tiny, "the", "--no-speculation", "--ignore-eos")
    assert (answer.code, answer.err) == (130, "interrupted\n")
    assert answer.out == "".join(interrupted) + "\n"
    assert len(interrupted) >= 3


def test_ctrl_c_with_json_gives_whole_json(call: Call, tiny: str, interrupted: list[str]) -> None:
    answer = call("generate", tiny, "the", "--no-speculation", "--ignore-eos", "--json")
    assert answer.code == 130
    assert answer.json["interrupted"] is True
    assert answer.json["outputs"][0]["finish_reason"] == "abort"
    assert answer.json["outputs"][0]["text"] == "".join(interrupted)


@pytest.mark.parametrize("fails", [True, False])
def test_ctrl_c_while_loading_is_never_a_traceback(
    call: Call, tiny: str, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """numpy swallowed it while it was imported, and an unrelated import error came out."""

    def swallowing(*arguments: object, **options: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if fails:
            raise ModuleNotFoundError("Could not import module 'LlamaConfig'")

    monkeypatch.setattr("draftwood.llm.LLM", swallowing)
    answer = call("generate", tiny, "the")
    assert (answer.code, answer.out, answer.err) == (130, "", "interrupted\n")


def test_ctrl_c_leaves_no_half_state(tiny: str) -> None:
    llm = LLM(tiny)
    request = Request(llm.tokenizer.encode("the quick brown fox"), SamplingParams(ignore_eos=True))
    whole = complete(llm.engine, [request])
    free = llm.pool.num_free + len(llm.engine.prefix)
    handler = signal.getsignal(signal.SIGINT)

    def press(index: int, text: str, ended: bool) -> None:
        if not ended:
            signal.raise_signal(signal.SIGINT)

    cut = complete(llm.engine, [request], press)
    assert cut.interrupted
    assert len(cut.outputs[0].token_ids) < len(whole.outputs[0].token_ids)
    assert not llm.engine.has_work
    assert llm.pool.num_free + len(llm.engine.prefix) == free
    assert signal.getsignal(signal.SIGINT) is handler
    again = complete(llm.engine, [request])
    assert again.outputs[0].token_ids == whole.outputs[0].token_ids


def test_a_reader_that_goes_away_is_no_error(tiny: str) -> None:
    """`draftwood generate ... | head -c 1` printed a traceback from the flush at exit."""
    command = [sys.executable, "-m", "draftwood.cli", "generate", tiny, "the", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_pull_lists_what_there_is(call: Call) -> None:
    listed = call("pull")
    records = call("pull", "--json").json
    for record in records:
        assert record["name"] in listed.out
        assert record["licence"] in listed.out
        assert record["state"] == "not cached"
    assert "smollm2-135m" in [record["name"] for record in records]


def test_pull_tells_where_a_model_is(call: Call, tiny: str) -> None:
    assert call("pull", tiny).out == f"{tiny}\n"


def test_doctor_tells_what_will_be_used(call: Call) -> None:
    text, record = call("doctor"), call("doctor", "--json").json
    assert text.code == 0
    for words in ("torch", "packed float32", "auto", "smollm2-135m", "device"):
        assert words in text.out
    assert record["Software"]["torch"]["state"] == "ok"


def test_demo_compares_three_prompts(call: Call, tiny: str, tmp_path: Path) -> None:
    for path in Path(tiny).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 1024  # the demo's prompts are longer than 256
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    answer = call("demo", "--model", str(tmp_path), "--max-tokens", "12")
    assert answer.code == 0
    for words in ("chat", "rewrite code", "continue a list", "ratio", "identical"):
        assert words in answer.out
    results = call("demo", "--model", str(tmp_path), "--max-tokens", "12", "--json").json
    assert [result["identical"] for result in results] == [True, True, True]


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--choice", "the fox", "--choice", "a dog"], "the fox|a dog"),
        (["--regex", "[0-9]{3}-[a-c]+d"], "[0-9]{3}-[a-c]+d"),
        (["--json-schema", '{"enum": ["fox", 12]}'], '"fox"|12'),
        (["--json-schema", "schema.json"], '"fox"|12'),
        (["--grammar", "sum.lark"], r"[0-9](\+[0-9])*"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_text_has_the_form_that_was_asked_for(
    call: Call,
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    pattern: str,
) -> None:
    """A random model would write nothing like it; with and without speculation it is the same."""
    (tmp_path / "schema.json").write_text('{"enum": ["fox", 12]}', encoding="utf-8")
    (tmp_path / "sum.lark").write_text(
        'start: num ("+" num)~0..4\nnum: /[0-9]/\n', encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    sampled = ("--temperature", "0.8", "--seed", "7", "--max-tokens", "60", *options)
    answer = call("generate", tiny, "the", *sampled)
    assert answer.code == 0, answer.err
    assert re.fullmatch(pattern, answer.out.removesuffix("\n"))
    record = call("generate", tiny, "the", *sampled, "--no-speculation", "--json").json
    [output] = record["outputs"]
    assert output["text"] == answer.out.removesuffix("\n")
    assert output["finish_reason"] == "stop"


def test_prompts_of_a_file_have_forms_of_their_own(call: Call, tiny: str, tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "params": {"structured": {"choice": ["fox"]}}},
        {"prompt": "a", "params": {"structured": {"json": {"type": "boolean"}}}},
        {"prompt": "a"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    record = call("generate", tiny, "--prompt-file", str(file), "--regex", "dog", "--json").json
    texts = [output["text"] for output in record["outputs"]]
    assert texts[0] == "fox"
    assert texts[1] in ("true", "false")
    assert texts[2] == "dog"
