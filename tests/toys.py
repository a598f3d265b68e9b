"""Models without weights: exact, and with an output that depends on every slot they read.

A `ToyModel` keeps token ids in its KV and reads the whole history of each row back from there, so a
slot that was moved wrongly, left over or never written changes what it says (where it meets the NaN
of KV debug mode, it says NaN). There is no rounding: laws and texts can be compared exactly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from draftwood.attention import Batch, Segment
from draftwood.draft.synthetic import ScriptedDrafter
from draftwood.kv import KVSpec, Plane
from draftwood.models.base import ModelSpec
from draftwood.tree import TokenTree

History = tuple[int, ...]
Law = Callable[[History], Sequence[float]]


class ToyModel:
    """A model whose logits are a function of the tokens on a row's path.

    Args:
        law: history (prompt, context and ancestors, the row's own token last) to logits.
        vocab_size: how many logits.
        max_model_len: of the spec.
        name: tells models apart in the prefix cache.
    """

    def __init__(
        self, law: Law, vocab_size: int, *, max_model_len: int = 128, name: str = "toy"
    ) -> None:
        self._law = law
        self._nan = [math.nan] * vocab_size
        device = torch.device("cpu")
        self.spec = ModelSpec(
            name=name,
            fingerprint=name,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_parameters=0,
            kv=KVSpec(1, 1, 1, 1, torch.float32, device),
            dtype=torch.float32,
            device=device,
        )

    def forward(self, batch: Batch, plane: Plane) -> Tensor:
        """Logits of the wanted rows, by their histories."""
        wanted = set(batch.logit_rows.tolist())
        rows: dict[int, Sequence[float]] = {}
        for segment in batch.segments:
            histories = _histories(segment, batch, plane)
            for row, history in zip(range(segment.start, segment.stop), histories, strict=True):
                assert len(history) - 1 == int(batch.positions[row]), "a wrong position"
                if row in wanted:
                    whole = not any(math.isnan(token) for token in history)
                    rows[row] = self._law(tuple(map(int, history))) if whole else self._nan
        logits = [rows[row] for row in batch.logit_rows.tolist()]
        return torch.tensor(logits, dtype=torch.float32).view(-1, self.spec.vocab_size)


def _histories(segment: Segment, batch: Batch, plane: Plane) -> list[tuple[float, ...]]:
    """Writes a segment's tokens to the plane and reads back what each row sees."""
    where = torch.arange(plane.keys.shape[1])[segment.slots]
    tokens = batch.token_ids[segment.start : segment.stop].float().view(-1, 1, 1)
    plane.write(0, where[-segment.num_rows :], tokens, tokens)
    stored = plane.read(0, where)[0].flatten()
    context = stored[: segment.context].tolist()
    nodes = stored[segment.context :].tolist()
    before = segment.num_nodes - segment.num_rows
    histories = []
    for row in range(segment.num_rows):
        seen = (
            range(before + row + 1)
            if segment.ancestors is None
            else segment.ancestors[row].nonzero().flatten().tolist()
        )
        histories.append((*context, *(nodes[i] for i in seen)))
    return histories


def random_law(vocab_size: int, *, seed: int = 0, spread: float = 2.0) -> Law:
    """Logits that are random, and different for every history."""

    @lru_cache(maxsize=100_000)
    def law(history: History) -> tuple[float, ...]:
        rng = random.Random(f"{seed}:{history}")
        return tuple(rng.gauss(0.0, spread) for _ in range(vocab_size))

    return law


def scripted_law(vocab_size: int, num_prompt: int, answer: Sequence[int]) -> Law:
    """Says `answer` after a prompt of that length, whatever it was; then token 0 for ever."""

    def law(history: History) -> list[float]:
        place = len(history) - num_prompt
        token = answer[place] if place < len(answer) else 0
        return [10.0 if i == token else 0.0 for i in range(vocab_size)]

    return law


def chain_drafter(answer: Sequence[int], lengths: Sequence[int] = (8,)) -> ScriptedDrafter:
    """Drafts the next tokens of `answer` as a chain; a round's length is the next of `lengths`."""
    rounds = 0

    def script(seq: Any, budget: int) -> TokenTree:
        nonlocal rounds
        length = min(lengths[rounds % len(lengths)], budget)
        rounds += 1
        start = len(seq.tokens) - seq.num_prompt_tokens
        return TokenTree.chain([seq.tokens[-1], *answer[start : start + length]], "script")

    return ScriptedDrafter(script)


class PieceTokenizer:
    """Token i has the text `pieces[i]`; ids in `eos` and `special` are special tokens."""

    def __init__(
        self, pieces: Sequence[str], *, eos: Sequence[int] = (), special: Sequence[int] = ()
    ) -> None:
        self.pieces = tuple(pieces)
        self.eos_token_ids = frozenset(eos)
        self.special_ids = frozenset({*eos, *special})
        self.has_chat_template = False

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids by greedy longest match."""
        ids = []
        while text:
            piece = max((p for p in self.pieces if p and text.startswith(p)), key=len)
            ids.append(self.pieces.index(piece))
            text = text[len(piece) :]
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The pieces, one behind the other."""
        return "".join(
            self.pieces[token]
            for token in tokens
            if not (skip_special_tokens and token in self.special_ids)
        )
