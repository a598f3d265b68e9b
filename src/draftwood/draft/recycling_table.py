"""Guessing from the target's own leftovers: Token Recycling (Luo et al. 2024, arXiv 2408.08696).

Every verified node leaves behind the k tokens the target ranked highest there. A table keeps them
per last token, and a second one per last two tokens where that pair has been seen: the longer
context guesses better, the shorter one always has something to say. Both stay warm from request to
request; neither needs a second model.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor

from draftwood.draft.base import DraftContext, Outcome
from draftwood.draft.grow import Guess
from draftwood.kernels import ops

_Context = tuple[int, int]
_PAIR_BYTES = 600  # of a context of two tokens with its candidates, and of the last one's
_PRIORS: dict[int, tuple[float, ...]] = {1: (0.3, 0.12, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02)}
_PRIORS[2] = tuple(2 * prior for prior in _PRIORS[1])


class RecyclingTable:
    """The target's latest top-k by the last token and by the last two. It is also a guesser.

    Args:
        k: candidates kept for each context.
        max_pairs: contexts of two tokens kept; the longest unused goes first.
    """

    def __init__(self, k: int = 8, max_pairs: int = 200_000) -> None:
        self.k = k
        self._max_pairs = max_pairs
        self._single: dict[int, list[int]] = {}
        self._pairs: OrderedDict[_Context, list[int]] = OrderedDict()

    @classmethod
    def of_size(cls, max_bytes: int) -> RecyclingTable:
        """An empty one that takes no more than so many bytes."""
        return cls(max_pairs=max(max_bytes // _PAIR_BYTES, 1))

    def __len__(self) -> int:
        """Contexts known."""
        return len(self._single) + len(self._pairs)

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return _PAIR_BYTES * max(len(self._pairs), len(self._single))

    def learn(self, context: _Context, ranked: list[int]) -> None:
        """Remembers what the target ranked highest after `context`, best first."""
        self._single.pop(context[1], None)  # the latest come last
        self._single[context[1]] = ranked
        self._pairs[context] = ranked
        self._pairs.move_to_end(context)
        if len(self._pairs) > self._max_pairs:
            self._pairs.popitem(last=False)
        if len(self._single) > self._max_pairs:
            del self._single[next(iter(self._single))]

    def state(self, max_contexts: int = 8192) -> bytes:
        """The contexts used last, as numbers: k, then context and candidates of each."""
        numbers = array("i", [self.k])
        recent = list(islice(reversed(self._pairs.items()), max_contexts))
        for (first, last), ranked in reversed(recent):
            if len(ranked) == self.k:
                numbers.extend((first, last, *ranked))
        return numbers.tobytes()

    def restore(self, state: bytes) -> None:
        """Learns what `state` of a table with the same k has written; ValueError for another."""
        numbers = array("i")
        numbers.frombytes(state)
        width = self.k + 2
        if not numbers or numbers[0] != self.k or (len(numbers) - 1) % width:
            raise ValueError("the state is of another table")
        for start in range(1, len(numbers), width):
            first, last, *ranked = numbers[start : start + width]
            self.learn((first, last), ranked)

    def guesses(self, state: _Context) -> Iterable[Guess]:
        """Candidates of the two-token context, then of the one-token one."""
        named: set[int] = set()
        tables = ((2, self._pairs.get(state)), (1, self._single.get(state[1])))
        for order, ranked in tables:
            for rank, token in enumerate(ranked or ()):
                if token not in named:
                    named.add(token)
                    yield Guess(token, f"recycling:{order}.{rank}", _PRIORS[order][rank])

    def advance(self, state: _Context, token: int) -> _Context:
        """The context after one more token."""
        return state[1], token


def context_of(tokens: Sequence[int]) -> _Context:
    """The last two tokens; -1 stands for none."""
    return (tokens[-2] if len(tokens) > 1 else -1), tokens[-1]


def learn_outcome(table: RecyclingTable, seq: DraftContext, outcome: Outcome) -> None:
    """Writes the target's candidates at each node of a verified tree into `table`.

    The nodes off the accepted path are written first: where two nodes share a context, the one that
    really happened counts.
    """
    tree = outcome.tree
    before = len(seq.tokens) - len(outcome.tokens) - 2
    previous = seq.tokens[before] if before >= 0 else -1
    ranked = _top_k(outcome.logits, table.k)
    path = outcome.verdict.path
    off_path = sorted(set(range(len(tree))) - set(path))
    for node in (*off_path, *path):
        parent = tree.parents[node]
        context = (previous if parent < 0 else tree.tokens[parent], tree.tokens[node])
        table.learn(context, ranked[node])


def _top_k(logits: Tensor, k: int) -> list[list[int]]:
    k = min(k, logits.shape[-1])
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and ops.available():
        top = ops.top_k(logits, k)[1]  # one pass; torch's own takes as long as a layer
    else:
        top = torch.topk(logits, k, dim=-1).indices
    ranked: list[list[int]] = top.tolist()
    return ranked
