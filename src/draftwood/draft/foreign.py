"""Drafting with a model of another vocabulary.

The draft model reads the target's text in its own tokens (`draft/mirror.py`) and keeps its KV in a
pool of its own, for its positions are not the target's. What it proposes reaches the target in one
of two ways (Timor et al., arXiv 2502.05202):

- "tokens": it may only say tokens that both vocabularies have, and its tree is the target's, token
  by token (token-level intersection). Requests that are sampled see the target's own noise.
- "text": it says what it likes, and the text is cut into the target's tokens (`draft/respell.py`).

Neither can change the target's text: both only propose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from draftwood.draft.base import DraftContext, Drafter, Outcome
from draftwood.draft.grow import Calibrator
from draftwood.draft.levels import BRANCHES, MAX_EXPANDED, Growth, LevelGrower
from draftwood.draft.mirror import Mirror
from draftwood.draft.model import likely_tokens
from draftwood.draft.pace import ForwardCost
from draftwood.draft.respell import respell
from draftwood.draft.vocabulary import Bridge
from draftwood.errors import CapacityError
from draftwood.kv import BlockPool, Lease, PrefixIndex
from draftwood.models.base import Model
from draftwood.sampling import SamplingParams
from draftwood.sampling.processors import log_probs
from draftwood.tree import TokenTree

Match = Literal["auto", "tokens", "text"]

_NEARLY_ALL = 0.95


@dataclass(slots=True)
class OwnKV:
    """A lease in the draft model's own pool."""

    lease: Lease

    @property
    def computed(self) -> int:
        """Draft tokens whose KV is there."""
        return self.lease.length

    @computed.setter
    def computed(self, length: int) -> None:
        self.lease.length = length

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Keeps the nodes on `path`."""
        self.lease.length = start
        self.lease.commit(path)

    def crop(self, length: int) -> None:
        """Forgets what lies behind `length`, if anything does."""
        if length < self.lease.length:
            self.lease.truncate(length)


@dataclass(slots=True)
class _State:
    """What is known of one sequence."""

    mirror: Mirror
    kv: OwnKV
    growth: Growth | None = field(default=None)


class ForeignDrafter(Drafter):
    """A causal language model of another vocabulary as drafter.

    Args:
        model: the draft model.
        pool: holds this model's KV and nothing else; when it is full there is no draft.
        bridge: between the target's vocabulary and the draft's.
        match: how proposals are matched: "tokens", "text", or "auto", which takes tokens if nearly
            all of the draft's are the target's too.
        cost: what a forward of the model takes; None for unknown.
    """

    name = "model"

    def __init__(
        self,
        model: Model,
        pool: BlockPool,
        bridge: Bridge,
        match: Match = "auto",
        cost: ForwardCost | None = None,
    ) -> None:
        self.pool = pool
        self.prefix = PrefixIndex(pool, model.spec.fingerprint.encode())
        self.calibrator = Calibrator()
        self._max_len = model.spec.max_model_len
        self._grower = LevelGrower(model, pool.target, cost)
        self._bridge = bridge
        nearly = bridge.share >= _NEARLY_ALL
        self.by_tokens = nearly if match == "auto" else match == "tokens"
        self._shared, self._usable, self._names = _columns(bridge, model, pool.device)
        self._states: dict[str, _State] = {}
        self._mean_accepted = 2.0

    def round_s(self) -> float:
        """Seconds of the forwards of a round of middling depth."""
        return self._grower.round_s(self._mean_accepted)

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """Grows the trees of all sequences together, one forward per level."""
        for state in self._states.values():
            state.growth = None
        growths = [self._open(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        grown = [growth for growth in growths if growth is not None]
        self._grower.grow(grown, self._branch, self._mean_accepted)
        # Only now: had a forward failed, there would be no KV to commit.
        for growth in grown:
            self._states[growth.seq.request_id].growth = growth
        return [
            TokenTree.root(seq.tokens[-1]) if growth is None else self._tree(growth)
            for seq, growth in zip(seqs, growths, strict=True)
        ]

    def observe(self, seqs: Sequence[DraftContext], outcomes: Sequence[Outcome]) -> None:
        """Keeps the draft's KV of what the new text has in common with the tree."""
        for seq, outcome in zip(seqs, outcomes, strict=True):
            self.calibrator.observe(outcome.tree, outcome.verdict)
            state = self._states.get(seq.request_id)
            if state is None or state.growth is None:
                continue
            self._mean_accepted += 0.1 * (outcome.verdict.num_accepted - self._mean_accepted)
            growth, state.growth = state.growth, None
            same = state.mirror.update(seq.tokens)
            path = growth.accepted(growth.ids[growth.base + 1 :]) if same > growth.base else []
            state.kv.keep(growth.base, path)
            if not path:
                state.kv.crop(same)

    def stop(self, seq: DraftContext) -> None:
        """Forgets the sequence; its KV stays findable until the room is needed."""
        state = self._states.pop(seq.request_id, None)
        if state is not None:
            _publish(state)
            state.kv.lease.close()

    def _open(self, seq: DraftContext, budget: int) -> Growth | None:
        """A tree to grow, its KV reserved; None where there is no room for it."""
        if seq.request_id not in self._states:
            kv = OwnKV(Lease(self.pool, self.prefix))
            self._states[seq.request_id] = _State(Mirror(self._bridge), kv)
        state = self._states[seq.request_id]
        state.kv.crop(state.mirror.update(seq.tokens))
        ids = state.mirror.ids
        room = self._max_len - len(ids) + 1
        if not ids or room <= 0:
            return None
        fresh = state.kv.computed == 0
        if fresh:
            state.kv.lease = state.kv.lease.reopen(ids)
        if not _reserve(state):
            return None
        growth = Growth(seq, state.kv, ids, budget, room)
        if fresh and growth.base - state.kv.computed >= self.pool.block_size:
            self._grower.read(growth)
            _publish(state)  # others may begin alike, in this very round
        return growth

    def _branch(self, growth: Growth, nodes: Sequence[int], logits: Tensor) -> None:
        """Gives each node its likeliest children."""
        columns = self._shared if self.by_tokens else self._usable
        for node, row in zip(nodes, logits[:, columns], strict=True):
            guesses = (
                self._like_target(growth, node, row)
                if self.by_tokens
                else _likely_text(row, growth.seq.params)
            )
            for rank, (column, probability) in enumerate(guesses):
                label = ""
                if self.by_tokens:
                    label = f"model:{rank}.{int(probability * 10)}"
                    probability = self.calibrator.probability(label, probability)
                score = growth.builder.scores[node] * probability
                growth.add(node, int(columns[column]), score, label)

    def _like_target(self, growth: Growth, node: int, row: Tensor) -> list[tuple[int, float]]:
        seq = growth.seq
        position = len(seq.tokens) + growth.depths[node]
        return likely_tokens(row, seq.params, seq.seed, position, self._names)

    def _tree(self, growth: Growth) -> TokenTree:
        """The grown tree in the target's tokens."""
        tree, tokens = growth.builder.build().best(growth.budget + 1), growth.seq.tokens
        if not self.by_tokens:
            return respell(tree, tokens, self._bridge, self.calibrator).best(growth.budget + 1)
        names = self._bridge.to_target
        said = (tokens[-1], *(names[token] for token in tree.tokens[1:]))
        return TokenTree(said, tree.parents, tree.scores, tree.sources)


def _columns(bridge: Bridge, model: Model, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Draft ids that both have, all draft ids that say something, the former in target ids."""
    size = model.spec.vocab_size
    shared = sorted(token for token in bridge.to_target if token < size)
    said = (t for t, data in enumerate(bridge.draft.table) if data or t in bridge.specials)
    usable = [token for token in said if token < size]
    names = [bridge.to_target[token] for token in shared]
    return (
        torch.tensor(shared, device=device),
        torch.tensor(usable, device=device),
        torch.tensor(names, device=device),
    )


def _likely_text(logits: Tensor, params: SamplingParams) -> list[tuple[int, float]]:
    """The draft's likeliest columns and their probabilities.

    The target's noise belongs to its own tokens, so it says nothing of the draft's.
    """
    probabilities = (
        torch.softmax(logits, dim=-1) if params.greedy else log_probs(logits, params).exp()
    )
    top = torch.topk(probabilities, min(BRANCHES, len(probabilities)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [(column, probability) for column, probability in pairs if probability > 0]


def _reserve(state: _State) -> bool:
    """Room for the text and all that may be expanded.

    Without it the sequence gives back what it has: one that drafts is worth more than two that each
    hold a half of what they need.
    """
    try:
        state.kv.lease.reserve(len(state.mirror.ids) - state.kv.computed + MAX_EXPANDED)
    except CapacityError:
        _publish(state)
        state.kv.lease.close()
        return False
    return True


def _publish(state: _State) -> None:
    state.kv.lease.publish(state.mirror.ids)
