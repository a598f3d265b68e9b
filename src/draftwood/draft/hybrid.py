"""The default: what costs nothing first, and a draft model where that falls short.

A tree begins with the guesses that cost microseconds (suffix matches, recycled candidates). Then
the draft model is asked at the place where it is expected to add most: it rates the guesses there
and adds its own. One forward answers for a place and for all places above it that were not asked
yet, so a long copied passage costs one forward or none. It is asked again while a forward's gain in
expected tokens is worth its time (the depth rule of OPT-Tree, arXiv 2406.17276, with costs).

The draft's KV lies in its own plane under the same block table as the target's. Reading a long
prompt into it is an investment: it is made once the rounds that went without it would have paid
for a part of it, as one rents skis for a few days before buying, and only if what is still to come
of the answer is expected to pay for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from draftwood.attention import Work
from draftwood.draft.base import DraftContext, Outcome
from draftwood.draft.combine import LookupDrafter
from draftwood.draft.horizon import Horizon
from draftwood.draft.model import likely_tokens, top_shares
from draftwood.draft.pace import SMALL, ForwardCost, Pace
from draftwood.draft.rated import RatedTree
from draftwood.draft.runner import DraftRunner, PlaneKV, expansion
from draftwood.errors import CapacityError
from draftwood.kv import BlockPool
from draftwood.models.base import Model
from draftwood.tree import TokenTree

_BRANCHES = 3
_MAX_FORWARDS = 10  # of the draft model in one round
_MAX_ROWS = 48  # slots behind the root that a round may use for drafting
_MOST_NODES = 40  # of all trees together, when their size is weighed
# Share of the cost of reading a context that must have been missed before it is read.
_SAVE_UP = 0.5
_PROBE_EVERY = 32  # rounds without the model before it is asked once, to see whether it is worth it
_PROBE_SHARE = 0.05  # of the time of those rounds, the most that reading a context for it may take


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model that shares the target's vocabulary and block tables.

    Attributes:
        model: the draft model.
        pool: the engine's pool; its draft plane holds this model's KV.
        num_tokens: ids below it mean the same for target and draft; others are not proposed.
        cost: what a forward of the model takes; None learns it from those that run.
    """

    model: Model
    pool: BlockPool
    num_tokens: int
    cost: ForwardCost | None = None


_Pair = tuple[DraftContext, RatedTree]
_Asked = tuple[DraftContext, RatedTree, list[int]]  # and the nodes to be asked about


class AutoDrafter(LookupDrafter):
    """Suffix matches and recycled candidates; a draft model rates and completes them.

    Args:
        source: the draft model and where its KV lies; None for none.
        clock: seconds, to weigh what the model adds against what it takes.
    """

    name = "auto"

    def __init__(
        self, source: DraftSource | None = None, clock: Callable[[], float] = perf_counter
    ) -> None:
        super().__init__()
        self._source = source
        self._price: Callable[[int, float], float] | None = None
        self._costs: list[float] = []
        self._num_seqs = 0
        self._growths: dict[str, RatedTree] = {}
        # Seconds that each sequence would have gained with its context in the draft's KV.
        self._savings: dict[str, float] = {}
        self._clock = clock
        self._cost: ForwardCost = (source and source.cost) or Pace()
        self._runner = _runner(source, self._cost, clock) if source else None
        self._horizon = Horizon()
        self._hit = 0.75
        self._target_s = 0.0  # a round without drafting
        self._unasked_rounds = 0
        self._began = self._drafted = 0.0

    def prices(self, seconds: Callable[[int, float], float]) -> None:
        """Weighs what a node costs the target; without this nodes count as free."""
        self._price = seconds

    def start(self, seq: DraftContext) -> None:
        """Indexes the prompt."""
        super().start(seq)
        self._savings[seq.request_id] = 0.0

    def stop(self, seq: DraftContext) -> None:
        """Forgets the sequence; what was learned stays."""
        super().stop(seq)
        if seq.finished:
            self._horizon.observe(len(seq.tokens) - seq.num_prompt_tokens)
        self._savings.pop(seq.request_id, None)
        self._growths.pop(seq.request_id, None)

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """Cheap trees, then as many forwards of the draft model as pay."""
        self._began = self._clock()
        self._growths = {}
        cheap = super().propose(seqs, budgets)
        growths = [
            RatedTree(tree, budget, len(seq.tokens) - 1)
            for seq, tree, budget in zip(seqs, cheap, budgets, strict=True)
        ]
        pairs = [
            (seq, growth)
            for seq, growth in zip(seqs, growths, strict=True)
            if growth.budget > 0 and growth.base + 1 < self._max_length
        ]
        self._num_seqs = len(seqs)
        self._costs = self._verify_costs(seqs) if pairs else []
        probe = self._unasked_rounds >= _PROBE_EVERY
        for _ in range(_MAX_FORWARDS):
            asked = self._choose(pairs, probe)
            if not asked or not self._ask(asked):
                break
            probe = False
        # Only now: had a forward failed, there would be no KV to commit.
        self._growths = {seq.request_id: growth for seq, growth in pairs if growth.order}
        self._unasked_rounds = 0 if self._growths else self._unasked_rounds + 1
        self._drafted = self._clock()
        return [growth.finished() for growth in growths]

    def observe(self, seqs: Sequence[DraftContext], outcomes: Sequence[Outcome]) -> None:
        """Feeds all sources, keeps the draft's KV of the accepted paths."""
        if self._drafted > self._began:
            target_s = self._clock() - self._drafted
            known = self._target_s
            self._target_s += 0.2 * (min(target_s, 3 * known) - known) if known else target_s
            self._began = self._drafted
        super().observe(seqs, outcomes)
        for seq, outcome in zip(seqs, outcomes, strict=True):
            self._learn_hit(outcome)
            growth = self._growths.pop(seq.request_id, None)
            if growth is not None:
                PlaneKV(seq.lease).keep(growth.base, growth.kept(outcome.tokens))

    def _learn_hit(self, outcome: Outcome) -> None:
        accepted = set(outcome.verdict.path)
        for node in range(1, len(outcome.tree)):
            source = outcome.tree.sources[node]
            if outcome.tree.parents[node] in accepted and source.startswith("model:0."):
                self._hit += 0.02 * ((node in accepted) - self._hit)

    def _choose(self, pairs: Sequence[_Pair], probe: bool) -> list[_Asked]:
        """The sequences to ask the model for in one forward, and where; none if it does not pay."""
        hit = max(self._hit, 0.05)
        places = [growth.best_place(hit) for _, growth in pairs]
        most = max((gain for gain, _ in places), default=0.0)
        if most <= 0:
            return []
        asked: list[_Asked] = []
        for (seq, growth), (gain, place) in zip(pairs, places, strict=True):
            path = growth.unasked_path(place)
            fits = len(growth.order) + len(path) <= _MAX_ROWS
            within = len(seq.tokens) + growth.depth(place) <= self._max_length
            if gain >= most / 4 and fits and within:
                asked.append((seq, growth, path))
        if self._pays(pairs, asked, probe):
            return asked
        # Those whose context is still to be read must not keep the others from being asked.
        read = [(seq, growth, path) for seq, growth, path in asked if self._is_read(seq, growth)]
        return read if 0 < len(read) < len(asked) and self._pays(pairs, read, False) else []

    def _pays(self, pairs: Sequence[_Pair], asked: Sequence[_Asked], probe: bool) -> bool:
        """Whether a forward of the draft model is expected to save time, or is due anyway.

        Args:
            pairs: all that it could be asked about.
            asked: where it would be.
            probe: whether it has not been asked for long.
        """
        if not asked:
            return False
        before = [score for _, growth in pairs for score in growth.scores()]
        after = self._expected(pairs, asked)
        num_rows = sum(len(path) for _, _, path in asked)
        fresh = [seq for seq, growth, _ in asked if not growth.order]
        price_s, reading_s = self._forward_s(num_rows, asked, fresh)
        spent_s = self._clock() - self._began
        now, later = self._token_s(before, spent_s), self._token_s(after, spent_s + price_s)
        saved_s = (now - later) * (self._num_seqs + sum(sorted(after)[-SMALL:]))
        credit = sum(self._savings[seq.request_id] for seq in fresh)
        enough = saved_s >= 0 and saved_s + credit >= _SAVE_UP * reading_s
        if enough and (now - later) * self._num_seqs * self._rest(fresh) >= reading_s:
            return True
        # The forward alone may pay while reading the context does not yet: save up for it.
        for seq in fresh:
            self._savings[seq.request_id] += max(saved_s, 0.0) / len(fresh)
        return probe and reading_s <= _PROBE_SHARE * self._unasked_rounds * self._costs[0]

    def _expected(self, pairs: Sequence[_Pair], asked: Sequence[_Asked]) -> list[float]:
        """Scores of all nodes as they are expected to become if the model is asked."""
        paths = {seq.request_id: path for seq, _, path in asked}
        hit = max(self._hit, 0.05)
        scores: list[float] = []
        for seq, growth in pairs:
            path = paths.get(seq.request_id)
            scores += growth.scores() if path is None else growth.scores_if_asked(path, hit)
        return scores

    def _forward_s(
        self,
        num_rows: int,
        asked: Sequence[_Asked],
        fresh: Sequence[DraftContext],
    ) -> tuple[float, float]:
        """Seconds of a forward of so many rows, and of reading what comes before them."""
        context = sum(len(seq.tokens) for seq, _, _ in asked) / len(asked)
        price_s = self._cost.at(context)(num_rows)
        num_unread = sum(self._num_unread(seq) for seq in fresh)
        # While a context is read it is half as long as in the end, on the average.
        return price_s, self._cost.at(context / 2)(num_rows + num_unread) - price_s

    def _rest(self, seqs: Sequence[DraftContext]) -> float:
        """Tokens that an answer is expected to get yet, the mean of some sequences."""
        rests = []
        for seq in seqs:
            limit = seq.params.max_tokens or self._max_length
            rests.append(self._horizon.rest(len(seq.tokens) - seq.num_prompt_tokens, limit))
        return sum(rests) / len(rests) if rests else 0.0

    def _token_s(self, scores: Sequence[float], spent_s: float) -> float:
        """Seconds a token with the best number of nodes, where drafting has taken `spent_s`."""
        expected = float(self._num_seqs)
        best = (self._costs[0] + spent_s) / expected
        for score, cost in zip(sorted(scores, reverse=True), self._costs[1:], strict=False):
            expected += score
            best = min(best, (cost + spent_s) / expected)
        return best

    def _verify_costs(self, seqs: Sequence[DraftContext]) -> list[float]:
        """Seconds of the target's forward with 0, 1, 2, ... draft nodes."""
        if self._price is None:
            return [self._target_s] * (_MOST_NODES + 1)
        context = sum(len(seq.tokens) for seq in seqs) / len(seqs)
        return [self._price(len(seqs) + n, context) for n in range(_MOST_NODES + 1)]

    def _is_read(self, seq: DraftContext, growth: RatedTree) -> bool:
        return bool(growth.order) or self._num_unread(seq) <= SMALL

    def _num_unread(self, seq: DraftContext) -> int:
        """Tokens before the root that the draft model has not read."""
        return max(len(seq.tokens) - 1 - seq.lease.draft_length, 0)

    def _ask(self, asked: Sequence[_Asked]) -> bool:
        """Runs the draft model at the chosen places; False if there is no memory for it."""
        ready = [item for item in asked if self._prepare(item[0], item[1])]
        works = [self._work(seq, growth, path) for seq, growth, path in ready]
        if not works:
            return False
        assert self._source is not None
        assert self._runner is not None
        logits = self._runner.forward(works)[:, : self._source.num_tokens]
        parts = torch.split(logits, [len(path) for _, _, path in ready])
        for (seq, growth, path), rows in zip(ready, parts, strict=True):
            growth.order.extend(path)
            ranked = self._ranked(seq, growth, path, rows)
            for index, guesses in zip(path, ranked, strict=True):
                growth.answer(index, guesses, self.calibrator)
        return True

    def _prepare(self, seq: DraftContext, growth: RatedTree) -> bool:
        """Reads what the draft model has not seen, up to the root; reserves slots for guesses."""
        if growth.order:
            return True
        lease, base = seq.lease, growth.base
        try:
            lease.reserve(base - lease.length + _MAX_ROWS)
        except CapacityError:
            return False
        kv = PlaneKV(lease)
        kv.computed = min(kv.computed, base)
        assert self._runner is not None
        self._runner.read(kv, seq.tokens, base, spare=SMALL)
        self._savings[seq.request_id] = 0.0
        return True

    def _work(self, seq: DraftContext, growth: RatedTree, path: Sequence[int]) -> Work:
        kv, base = PlaneKV(seq.lease), growth.base
        if growth.order:
            return expansion(kv, base, growth.work_tree(path), len(growth.order))
        # From what is still unread through the root down to the place: one chain.
        start = kv.computed
        unread = seq.tokens[start:base]
        chain = [*unread, *(growth.nodes[index].token for index in path)]
        return Work(seq.lease, start, chain, None, range(len(unread), len(chain)))

    @property
    def _max_length(self) -> int:
        """Positions the draft model has; 0 without one."""
        return self._source.model.spec.max_model_len if self._source else 0

    def _ranked(
        self, seq: DraftContext, growth: RatedTree, path: Sequence[int], logits: Tensor
    ) -> list[list[tuple[int, float]]]:
        """The likeliest tokens at each node of a path, with their probabilities."""
        if seq.params.greedy:
            shares, tokens = top_shares(logits, min(_BRANCHES, logits.shape[-1]))
            return [
                list(zip(ids, ps, strict=True))
                for ids, ps in zip(tokens.tolist(), shares.tolist(), strict=True)
            ]
        first = len(seq.tokens) + growth.depth(path[0])
        return [
            likely_tokens(row, seq.params, seq.seed, first + i)[:_BRANCHES]
            for i, row in enumerate(logits)
        ]


def _runner(source: DraftSource, cost: ForwardCost, clock: Callable[[], float]) -> DraftRunner:
    assert source.pool.draft is not None, "the pool needs a draft plane"
    return DraftRunner(source.model, source.pool.draft, cost, clock)
