"""The draft's side: a model, its KV, and what it knows of each sequence.

A desk belongs to nobody: several engines may ask it. It trusts no memory of theirs but compares
tokens, and it forgets the sequences that were not asked about for longest when room is short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draftwood.draft.foreign import OwnKV
from draftwood.draft.grow import Calibrator
from draftwood.draft.levels import MAX_EXPANDED, Growth, LevelGrower
from draftwood.draft.mirror import num_equal
from draftwood.draft.model import likely_tokens
from draftwood.draft.remote.messages import Answer, Ask, Draft, Wish
from draftwood.errors import CapacityError
from draftwood.kv import BlockPool, Lease
from draftwood.models.base import Model
from draftwood.sampling import SamplingParams, Verdict

_CHUNK = 512  # tokens of one sequence that one answer reads at most: the others wait meanwhile
_MAX_SEQS = 1024


@dataclass(slots=True)
class _Text:
    """One sequence as the desk knows it. It stands in for the engine's in a `Growth`."""

    request_id: str
    lease: Lease
    kv: OwnKV
    params: SamplingParams
    seed: int
    tokens: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0  # not known here, and of no use
    growth: Growth | None = None
    finished: bool = False  # the engine says when it forgets a sequence

    @classmethod
    def of(cls, wish: Wish, pool: BlockPool) -> _Text:
        """A new one, of which nothing is read."""
        lease = Lease(pool)
        return cls(wish.id, lease, OwnKV(lease), wish.manner.params, wish.manner.seed)


class DraftDesk:
    """Drafts for sequences that run elsewhere.

    Args:
        model: the draft model.
        pool: holds its KV in the target's plane, and nothing else.
        num_tokens: ids below it mean the same for target and draft; others are not proposed.
    """

    def __init__(self, model: Model, pool: BlockPool, num_tokens: int) -> None:
        self.calibrator = Calibrator()
        self._pool = pool
        self._chunk = _CHUNK
        self._max_len = model.spec.max_model_len
        self._grower = LevelGrower(model, pool.target)
        self._num_tokens = min(num_tokens, model.spec.vocab_size)
        self._texts: OrderedDict[str, _Text] = OrderedDict()
        self._mean_accepted = 2.0

    @property
    def num_texts(self) -> int:
        """Sequences it knows."""
        return len(self._texts)

    def answer(self, ask: Ask) -> Answer:
        """Grows the trees of all wishes together, one forward per level."""
        for name in ask.ended:
            self._forget(name)
        known = [self._follow(wish) for wish in ask.wishes]
        busy = {wish.id for wish in ask.wishes}
        growths = [
            self._open(text, wish.budget, busy) if text else None
            for text, wish in zip(known, ask.wishes, strict=True)
        ]
        grown = [growth for growth in growths if growth is not None]
        try:
            self._grower.grow(grown, self._branch, self._mean_accepted)
        except Exception:
            for name in busy:  # their KV may be half written
                self._forget(name)
            raise
        for text, growth in zip(known, growths, strict=True):
            if text is not None:
                text.growth = growth
        return Answer(
            tuple(
                _draft(wish, text, growth)
                for wish, text, growth in zip(ask.wishes, known, growths, strict=True)
            )
        )

    def _follow(self, wish: Wish) -> _Text | None:
        """Brings a sequence to where the wish has it; None if its beginning is missing."""
        text = self._texts.get(wish.id)
        if text is not None and wish.start > len(text.tokens):
            self._forget(wish.id)
            text = None
        if text is None:
            if wish.start > 0 or not wish.tokens:
                return None
            text = self._texts[wish.id] = _Text.of(wish, self._pool)
        self._texts.move_to_end(wish.id)
        tokens = [*text.tokens[: wish.start], *wish.tokens]
        self._keep(text, tokens, wish.num_sure)
        text.tokens = tokens
        return text

    def _keep(self, text: _Text, tokens: Sequence[int], num_sure: int) -> None:
        """Learns from what has come of the last draft, and keeps its KV on the path."""
        growth, text.growth = text.growth, None
        same = num_equal(text.tokens, tokens)
        if growth is not None and same > growth.base:
            self._learn(growth, tokens[growth.base + 1 : num_sure])
            text.kv.keep(growth.base, growth.accepted(tokens[growth.base + 1 :]))
        elif growth is not None:
            text.kv.crop(growth.base)
        if growth is None or same <= growth.base:
            text.kv.crop(same)

    def _learn(self, growth: Growth, tokens: Sequence[int]) -> None:
        """Counts what was guessed where the true token is known."""
        node, path = 0, [0]
        for token in tokens:
            child = growth.builder.child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        # Behind the last token that is known, guesses are neither right nor wrong yet.
        judged = set(path[: len(tokens)])
        tree = growth.builder.build()
        kept = sorted({*path, *(i for i, p in enumerate(tree.parents) if p in judged)})
        if not judged:
            return
        place = {old: new for new, old in enumerate(kept)}
        verdict = Verdict(tuple(place[node] for node in path), (), len(kept) - 1)
        self.calibrator.observe(tree.keep(kept), verdict)
        self._mean_accepted += 0.1 * (len(path) - 1 - self._mean_accepted)

    def _open(self, text: _Text, budget: int, busy: set[str]) -> Growth | None:
        """A tree to grow, its KV reserved; None where there is no room, or much is unread."""
        room = self._max_len - len(text.tokens) + 1
        if room <= 0 or not self._reserve(text, busy):
            return None
        growth = Growth(text, text.kv, text.tokens, budget, room)
        if growth.base - text.kv.computed >= self._chunk:
            self._grower.read(
                Growth(text, text.kv, text.tokens[: text.kv.computed + self._chunk], 0, 1)
            )
            return None
        return growth

    def _reserve(self, text: _Text, busy: set[str]) -> bool:
        """Room for a sequence and all that may be expanded, at the cost of idle ones if need be."""
        while len(self._texts) > _MAX_SEQS and self._forget_idle(busy):
            pass
        while True:
            try:
                text.lease.reserve(len(text.tokens) - text.kv.computed + MAX_EXPANDED)
            except CapacityError:
                if not self._forget_idle(busy):
                    text.kv.crop(0)
                    return False
            else:
                return True

    def _forget_idle(self, busy: set[str]) -> bool:
        for name in self._texts:
            if name not in busy:
                self._forget(name)
                return True
        return False

    def _forget(self, name: str) -> None:
        text = self._texts.pop(name, None)
        if text is not None:
            text.lease.close()

    def _branch(self, growth: Growth, nodes: Sequence[int], logits: Tensor) -> None:
        """Gives each node its likeliest children."""
        seq = growth.seq
        for node, row in zip(nodes, logits[:, : self._num_tokens], strict=True):
            position = len(seq.tokens) + growth.depths[node]
            guesses = likely_tokens(row, seq.params, seq.seed, position)
            for rank, (token, prior) in enumerate(guesses):
                label = f"model:{rank}.{int(prior * 10)}"
                probability = self.calibrator.probability(label, prior)
                growth.add(node, token, growth.builder.scores[node] * probability, label)


def _draft(wish: Wish, text: _Text | None, growth: Growth | None) -> Draft:
    if text is None:
        return Draft(wish.id, 0)
    if growth is None:
        return Draft(wish.id, len(text.tokens))
    tree = growth.builder.build().best(growth.budget + 1)
    scores = tuple(round(score, 4) for score in tree.scores)
    return Draft(wish.id, len(text.tokens), tree.tokens, tree.parents, scores)
