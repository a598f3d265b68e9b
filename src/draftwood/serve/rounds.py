"""Rounds as the page shows them: the tree, who proposed what, and which path was right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftwood.draft.base import Outcome
from draftwood.engine.observers import Round
from draftwood.engine.sequence import Sequence
from draftwood.serve.generation import Generation
from draftwood.text import Tokenizer


@dataclass(slots=True)
class _Watched:
    seq: Sequence
    index: int
    generation: Generation
    num_chars: int = 0


class RoundRecorder:
    """An observer that records the rounds of those requests that asked for it.

    Args:
        tokenizer: of the target.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._watched: dict[str, _Watched] = {}

    def watch(self, generation: Generation) -> None:
        """Records the rounds of all its outputs from now on."""
        for index, seq in enumerate(generation.seqs, start=generation.first_index):
            self._watched[seq.request_id] = _Watched(seq, index, generation)

    def forget(self, generation: Generation) -> None:
        """Records them no longer."""
        for seq in generation.seqs:
            self._watched.pop(seq.request_id, None)

    def clear(self) -> None:
        """Forgets everybody."""
        self._watched.clear()

    def on_round(self, round_: Round) -> None:
        """Records a round for each of its requests that is watched."""
        if not self._watched:
            return
        for request_id, outcome in zip(round_.request_ids, round_.outcomes, strict=True):
            watched = self._watched.get(request_id)
            if watched is not None:
                watched.generation.outbox.put_round(self._record(watched, outcome, round_))

    def _record(self, watched: _Watched, outcome: Outcome, round_: Round) -> dict[str, Any]:
        tree, text = outcome.tree, watched.seq.detokenizer.text
        new_text, watched.num_chars = text[watched.num_chars :], len(text)
        decode = self._tokenizer.decode
        return {
            "index": watched.index,
            "tokens": [decode([token], skip_special_tokens=False) for token in tree.tokens],
            "token_ids": list(tree.tokens),
            "parents": list(tree.parents),
            "scores": [round(score, 4) for score in tree.scores],
            "sources": list(tree.sources),
            "path": list(outcome.verdict.path),
            "new_text": new_text,
            "new_tokens": len(outcome.tokens),
            "draft_s": round_.draft_s,
            "target_s": round_.target_s,
            "total_s": round_.draft_s + round_.target_s + round_.verify_s + round_.commit_s,
            "cached_tokens": watched.seq.metrics.num_cached_tokens,
        }
