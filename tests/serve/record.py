"""Writes answers.json: what a real model answered and how, for the browser test's server.

    python -m tests.serve.record

Needs SmolLM2-135M-Instruct. The same question is answered with speculation and without.
"""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

from draftwood import LLM, SamplingParams
from draftwood.draft.base import Outcome
from draftwood.engine.observers import Round
from draftwood.text import Tokenizer

ANSWERS = Path(__file__).with_name("answers.json")
QUESTION = "Write a Python class for a stack, with push, pop and peek, and show how to use it."


class Recorder:
    """Keeps the rounds since they were last taken, as the API sends them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rounds: list[dict[str, Any]] = []

    def on_round(self, round_: Round) -> None:
        """Notes what became of each tree."""
        for outcome in round_.outcomes:
            self._rounds.append(self._round(round_, outcome))

    def take(self) -> list[dict[str, Any]]:
        """The rounds since the last call."""
        rounds, self._rounds = self._rounds, []
        return rounds

    def _round(self, round_: Round, outcome: Outcome) -> dict[str, Any]:
        tree = outcome.tree
        parts = (round_.draft_s, round_.target_s, round_.verify_s, round_.commit_s)
        return {
            "tokens": [self._text(token) for token in tree.tokens],
            "token_ids": list(tree.tokens),
            "parents": list(tree.parents),
            "scores": [round(score, 3) for score in tree.scores],
            "sources": list(tree.sources),
            "path": list(outcome.verdict.path),
            "new_text": self._text(*outcome.tokens),
            "new_tokens": len(outcome.tokens),
            "draft_s": round(round_.draft_s, 6),
            "target_s": round(round_.target_s, 6),
            "total_s": round(sum(parts), 6),
            "cached_tokens": 0,
        }

    def _text(self, *tokens: int) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def answer(llm: LLM, params: SamplingParams, system: str) -> dict[str, Any]:
    """One answer: chunks of text with their rounds, and the sums at the end."""
    recorder = Recorder(llm.tokenizer)
    llm.engine.observers.append(recorder)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    chunks = []
    output, begin_s = None, perf_counter()
    for delta in llm.stream_chat(messages, params):
        chunks.append({"content": delta.text, "rounds": recorder.take()})
        output = delta.output
    llm.engine.observers.remove(recorder)
    assert output is not None
    metrics = output.metrics
    for chunk in chunks:
        for one in chunk["rounds"]:
            one["cached_tokens"] = metrics.num_cached_tokens
    return {
        "chunks": chunks,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
        "finish_reason": output.finish_reason,
        "num_cached_tokens": metrics.num_cached_tokens,
        "tokens_per_s": round((len(output.token_ids) - 1) / (metrics.decode_s or 1), 1),
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "draft_acceptance_rate": metrics.acceptance_rate,
        "seconds": round(perf_counter() - begin_s, 3),
    }


def main() -> None:
    """Records both answers."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    params = SamplingParams(max_tokens=220, seed=7)
    with LLM("smollm2-135m", dtype="float32") as llm:
        answer(llm, params.but(max_tokens=60), system)
        plain = answer(llm, params.but(speculation=False), system)
        spec = answer(llm, params, system)
    plain["plain_tokens_per_s"] = spec["plain_tokens_per_s"] = plain["tokens_per_s"]
    text = json.dumps({"question": QUESTION, "speculative": spec, "plain": plain}, indent=None)
    ANSWERS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
