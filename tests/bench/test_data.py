"""Prompt files: the packaged set, the usual formats, and lines that are wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftwood.bench.data import BenchPrompt, in_turns, load_prompts, spread
from draftwood.errors import ConfigError


def write(path: Path, *rows: Any) -> Path:
    """A file with a line for each row: text as it is, anything else as JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_packaged_set_has_five_prompts_of_each_of_six_kinds() -> None:
    prompts = load_prompts()
    kinds = Counter(prompt.kind for prompt in prompts)
    assert set(kinds) == {"chat", "code", "rewrite", "extract", "list", "math"}
    assert set(kinds.values()) == {5}
    assert len({prompt.turns[0] for prompt in prompts}) == 30
    assert {prompt.chat for prompt in prompts} == {True, False}


def test_three_formats_are_told_apart(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mixed.jsonl",
        {"id": "a", "kind": "list", "prompt": "1. one\n2."},
        {"id": "b", "kind": "chat", "turns": ["Hello", "And now?"]},
        {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Shorter."]},
        "",
        {"task_id": "HumanEval/0", "prompt": "def f():\n"},
    )
    assert load_prompts(path) == [
        BenchPrompt("a", "list", ("1. one\n2.",), chat=False),
        BenchPrompt("b", "chat", ("Hello", "And now?"), chat=True),
        BenchPrompt("81", "writing", ("Compose a post.", "Shorter."), chat=True),
        BenchPrompt("HumanEval/0", "human_eval", ("def f():\n",), chat=False),
    ]


def test_any_other_file_is_a_text_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "some.txt", "first", "", '{"id": 1}')
    assert load_prompts(path) == [
        BenchPrompt("some-1", "text", ("first",), chat=False),
        BenchPrompt("some-3", "text", ('{"id": 1}',), chat=False),
    ]


def test_only_a_line_feed_ends_a_json_line(tmp_path: Path) -> None:
    """JSON may hold a bare U+2028, at which str.splitlines would cut."""
    row = {"id": "a", "kind": "k", "prompt": "one\u2028two"}
    path = write(tmp_path / "p.jsonl", json.dumps(row, ensure_ascii=False))
    assert load_prompts(path)[0].turns == ("one\u2028two",)


GOOD = {"id": "a", "kind": "k", "prompt": "p"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "Expecting"),
        ("[1]", "an object, not list"),
        ({"kind": "k", "prompt": "p"}, "no 'id', 'question_id' or 'task_id'"),
        ({"id": "b", "kind": "k"}, "either 'prompt'"),
        ({"id": "b", "kind": "k", "prompt": "p", "turns": ["t"]}, "either 'prompt'"),
        ({"id": "b", "kind": "k", "prompt": " "}, "'prompt' is ' '"),
        ({"id": "b", "prompt": "p"}, "'kind' is None"),
        ({"id": "b", "kind": "k", "turns": []}, "'turns' is \\[\\]"),
        ({"id": "b", "kind": "k", "turns": [1]}, "'turns' is 1"),
        ({"id": None, "kind": "k", "prompt": "p"}, "'id' is None"),
        ({"id": True, "kind": "k", "prompt": "p"}, "'id' is True"),
        ({"question_id": 1, "turns": ["t"]}, "'category' is None"),
        ({"task_id": "t", "prompt": 5}, "'prompt' is 5"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "p.jsonl", GOOD, "", row)
    with pytest.raises(ConfigError, match=rf"p\.jsonl:3: .*{message}"):
        load_prompts(path)


def test_files_without_prompts_and_repeated_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.jsonl cannot be read"):
        load_prompts(tmp_path / "no.jsonl")
    with pytest.raises(ConfigError, match="holds no prompts"):
        load_prompts(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(ConfigError, match="the id 'a' is there twice"):
        load_prompts(write(tmp_path / "twice.jsonl", GOOD, GOOD))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.txt cannot be read"):
        load_prompts(tmp_path / "latin.txt")


def test_a_limit_is_spread_over_the_kinds_in_the_old_order() -> None:
    kinds = ["x", "x", "x", "y", "z", "z"]
    prompts = [BenchPrompt(str(i), kind, ("t",), chat=False) for i, kind in enumerate(kinds)]
    taken = {n: "".join(prompt.id for prompt in spread(prompts, n)) for n in (1, 3, 5, 6, 9)}
    assert taken == {1: "0", 3: "034", 5: "01345", 6: "012345", 9: "012345"}
    assert [prompt.id for prompt in load_prompts(limit=6)] == [
        f"{kind}-1" for kind in ("chat", "code", "rewrite", "extract", "list", "math")
    ]
    with pytest.raises(ConfigError, match="limit is 0"):
        load_prompts(limit=0)


def test_any_beginning_has_all_kinds() -> None:
    prompts = load_prompts()
    turns = in_turns(prompts)
    assert sorted(prompt.id for prompt in turns) == sorted(prompt.id for prompt in prompts)
    kinds = {prompt.kind for prompt in prompts}
    assert {prompt.kind for prompt in turns[: len(kinds)]} == kinds
