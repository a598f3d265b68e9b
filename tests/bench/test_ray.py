"""`draftwood bench ray`: layouts, turns, and prompts that come once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from draftwood.bench import ray as measuring
from draftwood.bench.data import BenchPrompt
from draftwood.bench.serve import Load, LoadPlan, LoadPoint
from draftwood.bench.sse import Target


def test_layouts() -> None:
    assert measuring.layouts([1, 2], None) == {
        "one process": (),
        "1 replica": ("--ray", "--replicas", "1"),
        "2 replicas": ("--ray", "--replicas", "2"),
    }
    drafts = measuring.layouts([1], "small")
    assert drafts["one process"] == ("--draft", "small")
    assert drafts["1 replica, draft actor"][-2:] == ("--draft-actors", "1")
    assert len(drafts) == 3


def test_blocks_take_turns_and_no_prompt_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, list[str]]] = []

    @contextmanager
    def served(model: str, options: Sequence[str]) -> Iterator[str]:
        yield f"http://127.0.0.1:{len(options)}"

    def measure(target: Target, prompts: Sequence[BenchPrompt], plan: LoadPlan) -> Load:
        seen.append((target.port, [prompt.turns[0] for prompt in prompts]))
        nothing = dict.fromkeys(LoadPoint.__dataclass_fields__)
        speed = {"concurrency": 4, "tokens_per_s": float(len(seen)), "num_requests": 2}
        return Load([LoadPoint(**{**nothing, **speed, "num_failed": 1})], [])  # type: ignore[arg-type]

    monkeypatch.setattr(measuring, "served", served)
    monkeypatch.setattr(measuring, "measure", measure)
    prompts = [BenchPrompt(str(i), "kind", (f"prompt {i}",), False) for i in range(5)]
    plan = LoadPlan(concurrency=(4,), num_requests=2, num_blocks=3, max_tokens=8)
    points = measuring.compare("m", {"a": ("x",), "b": ("x", "y")}, prompts, plan)
    assert [port for port, _ in seen] == [1, 2, 2, 1, 1, 2]
    assert seen[0][1] == seen[1][1]
    assert seen[3][1][0] == "2. prompt 2"
    assert not set(seen[0][1]) & set(seen[2][1])
    assert [(p.layout, p.load.tokens_per_s, p.speeds) for p in points] == [
        ("a", 4.0, (1.0, 4.0, 5.0)),
        ("b", 3.0, (2.0, 3.0, 6.0)),
    ]
    assert points[0].load.num_failed == 3
    assert points[0].to_json()["layout"] == "a"
