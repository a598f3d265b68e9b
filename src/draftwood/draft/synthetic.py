"""Drafters that know or do what no real one does, for tests and for measuring overhead."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from draftwood.draft.base import DraftContext, Drafter
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder

Script = Callable[[DraftContext, int], TokenTree]


class ScriptedDrafter(Drafter):
    """Proposes what a function says.

    Args:
        script: `script(seq, budget)` gives the tree.
    """

    name = "scripted"

    def __init__(self, script: Script) -> None:
        self._script = script

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """The script's trees."""
        return [self._script(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]


class OracleDrafter(Drafter):
    """Knows the answer: every draft token is right. What it cannot speed up is overhead.

    Args:
        answers: prompt token ids to the whole sequence, prompt included.
        length: draft tokens a round.
    """

    name = "oracle"

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], length: int = 8) -> None:
        self._answers = answers
        self._length = length

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """The next tokens of the answer, as a chain."""
        trees = []
        for seq, budget in zip(seqs, budgets, strict=True):
            answer = self._answers[tuple(seq.tokens[: seq.num_prompt_tokens])]
            start = len(seq.tokens) - 1
            stop = start + 1 + min(budget, self._length)
            trees.append(TokenTree.chain([seq.tokens[-1], *answer[start + 1 : stop]], self.name))
        return trees


class RandomDrafter(Drafter):
    """Knows nothing: random tokens in random trees, promised with confidence.

    Args:
        vocab_size: of the target.
        num_nodes: draft nodes a round.
        seed: of the random numbers.
    """

    name = "random"

    def __init__(self, vocab_size: int, num_nodes: int = 8, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._num_nodes = num_nodes
        self._random = random.Random(seed)

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """Trees of random shape."""
        return [
            self._tree(seq.tokens[-1], min(budget, self._num_nodes))
            for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def _tree(self, root: int, num_nodes: int) -> TokenTree:
        builder = TreeBuilder(root)
        for _ in range(num_nodes):
            parent = self._random.randrange(len(builder))
            token = self._random.randrange(self._vocab_size)
            builder.add(parent, token, builder.scores[parent] * 0.7, self.name)
        return builder.build()
