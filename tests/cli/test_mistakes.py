"""Whatever a user gets wrong: exit code 2, one line that says what and what to do, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], ["temperature is -1.0", "at least 0"]),
        (["--temperature", "nan"], ["temperature is nan"]),
        (["--temperature", "hot"], ["--temperature"]),
        (["--top-p", "0"], ["top_p is 0.0"]),
        (["--top-p", "1.1"], ["top_p is 1.1"]),
        (["--top-k", "-2"], ["top_k is -2"]),
        (["--min-p", "2"], ["min_p is 2.0"]),
        (["--seed", "-1"], ["seed is -1"]),
        (["--stop", ""], ["stop"]),
        (["--beams", "0"], ["num_beams is 0", "at least 1"]),
        (["--beams", "2", "--temperature", "1"], ["num_beams is 2", "temperature is 1.0"]),
        (["--beams", "2", "--early-stopping", "soon"], ["early_stopping is 'soon'", "never"]),
        (["--beams", "2", "--show-tree"], ["--show-tree", "beams", "leave one out"]),
        (["--beams", "2", "--length-penalty", "nan"], ["length_penalty is nan"]),
        (["--max-tokens", "0"], ["--max-tokens", "1"]),
        (["--max-tokens", "300"], ["max_tokens is 300", "256"]),
        (["--tree-nodes", "-1"], ["max_tree_nodes is -1"]),
        (["--kv-memory", "-1"], ["kv-memory is '-1'", "above 0"]),
        (["--kv-memory", "much"], ["kv-memory is 'much'", "512M"]),
        (["--kv-memory", "1"], ["kv_memory is 1"]),
        (["--drafter", "oracle"], ["unknown drafter 'oracle'", "suffix"]),
        (["--drafter", "model"], ["draft model"]),
        (["--device", "tpu"], ["device is 'tpu'"]),
        (["--dtype", "float8"], ["dtype is 'float8'"]),
        (["--quantization", "int2"], ["quantization is 'int2'"]),
        (["--draft-match", "words"], ["--draft-match", "'words'", "tokens"]),
        (["--draft", "smollm2-135m", "--draft-match", ""], ["--draft-match"]),
        (["--draft-depth", "-1"], ["--draft-depth", "0"]),
        (["--repetition-penalty", "0"], ["repetition_penalty is 0.0", "above 0"]),
        (["--presence-penalty", "3"], ["presence_penalty is 3.0"]),
        (["--frequency-penalty", "nan"], ["frequency_penalty is nan"]),
        (["--max-model-len", "100000"], ["max_model_len is 100000", "256"]),
        (["--prompt-file", "nowhere.txt"], ["use one of them"]),
        (["--no-such-option"], ["--no-such-option"]),
        (["--draft", "nothing-of-this-name"], ["nothing-of-this-name"]),
        (["--regex", "("], ["regex cannot be used", "unclosed group"]),
        (["--regex", ""], ["regex is ''"]),
        (["--regex", "a", "--choice", "b"], ["regex and choice", "exactly one"]),
        (["--choice", ""], ["choice is ['']"]),
        (["--regex", "a", "--ignore-eos"], ["ignore_eos", "structured"]),
        (["--json-schema", "{"], ["not valid JSON"]),
        (["--json-schema", '{"type": "objekt"}'], ["objekt"]),
        (["--json-schema", "nowhere.json"], ["--json-schema", "nowhere.json", "cannot be read"]),
        (["--grammar", "nowhere.lark"], ["--grammar", "nowhere.lark", "cannot be read"]),
    ],
)
def test_a_wrong_option_is_one_line(
    call: Call, tiny: str, arguments: list[str], words: list[str]
) -> None:
    call("generate", tiny, "the", *arguments).assert_mistake(*words)


def test_a_wrong_form_of_the_draft_is_one_line(call: Call, tiny: str) -> None:
    wrong = call("generate", tiny, "the", "--draft", tiny, "--draft-quantization", "int2")
    wrong.assert_mistake("quantization is 'int2'")


def test_an_unknown_command_is_one_line(call: Call) -> None:
    call("generat").assert_mistake("generat")


def test_a_missing_model_is_one_line(call: Call) -> None:
    call("generate").assert_mistake("MODEL")


@pytest.mark.parametrize("command", [["generate", "x", "hi"], ["chat", "x"], ["pull", "x"]])
def test_an_unknown_model_is_one_line_that_names_those_there_are(
    call: Call, command: list[str]
) -> None:
    command = [part if part != "x" else "smollm3" for part in command]
    call(*command).assert_mistake("'smollm3'", "smollm2-135m")


def test_a_model_the_hub_does_not_give_is_one_line(call: Call) -> None:
    call("generate", "nobody/nothing", "hi").assert_mistake("nobody/nothing")


def test_a_folder_without_a_model_is_one_line(call: Call, tmp_path: Path) -> None:
    call("generate", str(tmp_path), "hi").assert_mistake("config.json")


def test_an_empty_prompt_is_one_line(call: Call, tiny: str) -> None:
    call("generate", tiny, "").assert_mistake("the prompt is empty")
    call("generate", tiny, stdin="\n").assert_mistake("the prompt is empty")


def test_a_prompt_longer_than_the_context_is_one_line(call: Call, tiny: str) -> None:
    call("generate", tiny, "the dog " * 300).assert_mistake("256", "shorten")


def test_a_prompt_that_is_no_text_is_one_line(call: Call, tiny: str) -> None:
    call("generate", tiny, "\udcff").assert_mistake("UTF-8")
    call("generate", tiny, stdin=b"\xff").assert_mistake("UTF-8")


def test_a_draft_whose_tokens_are_no_bytes_is_one_line(
    call: Call, tiny: str, wordpiece: str
) -> None:
    answer = call("generate", tiny, "the", "--draft", wordpiece)
    answer.assert_mistake("another vocabulary", "WordPiece", "drafter 'auto'")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["not valid JSON"]),
        ("3", ["a string, or an object"]),
        ('{"text": "a"}', ["prompt or messages"]),
        ('{"prompt": "a", "messages": []}', ["either"]),
        ('{"prompt": ["a"]}', ["list of token ids"]),
        ('{"prompt": []}', ["empty"]),
        ('{"messages": "hi"}', ["messages"]),
        ('{"prompt": "a", "params": 3}', ["params"]),
        ('{"prompt": "a", "params": {"heat": 1}}', ["line 2", "'heat'"]),
        (
            '{"prompt": "a", "params": {"temperature": "hot"}}',
            ["line 2: params: temperature is 'hot'"],
        ),
        ('{"prompt": "a", "params": {"n": 2}}', ["line 2", "n is 2"]),
        ('{"prompt": "a", "params": {"structured": {"xml": 1}}}', ["'xml'"]),
        ('{"prompt": [999999]}', ["999999"]),
        ('{"messages": [{"rule": "user"}]}', ["messages"]),
    ],
)
def test_a_wrong_line_in_a_prompt_file_is_one_line(
    call: Call, tiny: str, tmp_path: Path, line: str, words: list[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"the"\n{line}\n', encoding="utf-8")
    call("generate", tiny, "--prompt-file", str(file)).assert_mistake(*words)


def test_a_prompt_file_that_cannot_be_read_is_one_line(
    call: Call, tiny: str, tmp_path: Path
) -> None:
    call("generate", tiny, "--prompt-file", str(tmp_path)).assert_mistake(str(tmp_path))
    empty = tmp_path / "empty.txt"
    empty.touch()
    call("generate", tiny, "--prompt-file", str(empty)).assert_mistake("holds no prompt")


def test_chat_without_a_template_is_one_line(call: Call, tiny: str, tmp_path: Path) -> None:
    for path in Path(tiny).iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    call("chat", str(tmp_path), stdin="hi\n").assert_mistake("chat template", "generate")


def test_a_conversation_longer_than_the_context_is_one_line(call: Call, tiny: str) -> None:
    call("chat", tiny, stdin="the dog " * 300).assert_mistake("256")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replicas", "2"], ["replicas is 2", "--ray"]),
        (["--ray-address", "auto"], ["ray-address is auto", "--ray"]),
        (["--ray", "--replicas", "0"], ["replicas is 0", "at least 1"]),
        (["--ray", "--replicas", "3", "--max-replicas", "2"], ["max-replicas is 2", "at least 3"]),
        (["--ray", "--draft-actors", "-1"], ["draft-actors is -1", "at least 0"]),
        (["--ray", "--draft-actors", "1"], ["draft-actors is 1", "--draft"]),
        (["--ray", "--replica-gpus", "0"], ["replica-gpus is 0", "above 0"]),
        (["--ray", "--device", "cuda:1"], ["device is 'cuda:1'", "Ray chooses"]),
        (["--ray", "--ray-address", "ray://x:1"], ["ray-address is 'ray://x:1'", "host:port"]),
        (["--ray", "--ray-address", "127.0.0.1:1"], ["127.0.0.1:1", "no Ray cluster"]),
    ],
)
def test_a_wrong_option_of_ray_is_one_line(
    call: Call, tiny: str, arguments: list[str], words: list[str]
) -> None:
    call("serve", tiny, "--port", "0", *arguments).assert_mistake(*words)


def test_a_wrong_drafter_for_draft_actors(call: Call, tiny: str) -> None:
    options = ["--ray", "--draft", tiny, "--draft-actors", "1", "--drafter", "suffix"]
    call("serve", tiny, "--port", "0", *options).assert_mistake("'suffix'", "'auto' or 'model'")
