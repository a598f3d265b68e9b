"""The default: what costs nothing first, and a draft model where that falls short.

A tree begins with the guesses that cost microseconds (suffix matches, recycled candidates). Then
the draft model is asked at the place where it is expected to add most: it rates the guesses there
and adds its own. One forward answers for a place and for all places above it that were not asked
yet, so a long copied passage costs one forward or none. It is asked again while a forward's gain in
expected tokens is worth its time (the depth rule of OPT-Tree, arXiv 2406.17276, with costs).

The draft's KV lies in its own plane under the same block table as the target's. Reading a long
prompt into it is an investment: it is made once the rounds that went without it would have paid
for a part of it, as one rents skis for a few days before buying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from draftwood.attention import Work, pack
from draftwood.draft.base import DraftContext, Outcome
from draftwood.draft.combine import LookupDrafter
from draftwood.draft.grow import Calibrator
from draftwood.draft.model import likely_tokens
from draftwood.errors import CapacityError
from draftwood.kernels import ops
from draftwood.kv import BlockPool
from draftwood.models.base import Model
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder

_BRANCHES = 3
_MAX_FORWARDS = 10  # of the draft model in one round
_MAX_ROWS = 48  # slots behind the root that a round may use for drafting
_CHUNK = 512
_COUNTED = 8  # nodes whose scores make up what a round is expected to yield
_SAVE_UP = (
    0.3  # share of the cost of reading a context that must have been missed before it is read
)
_PROBE_EVERY = 32  # rounds without the model before it is asked once, to see whether it is worth it


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model that shares the target's vocabulary and block tables.

    Attributes:
        model: the draft model.
        pool: the engine's pool; its draft plane holds this model's KV.
        num_tokens: ids below it mean the same for target and draft; others are not proposed.
    """

    model: Model
    pool: BlockPool
    num_tokens: int

    def forward(self, works: Sequence[Work]) -> Tensor:
        """Logits of the wanted rows, over the tokens that may be proposed."""
        assert self.pool.draft is not None, "the pool needs a draft plane"
        batch = pack(works, self.pool.device)
        return self.model.forward(batch, self.pool.draft)[:, : self.num_tokens]


@dataclass(slots=True)
class _Node:
    """A guess and what is known of it.

    Attributes:
        token: its id.
        parent: index of its parent, -1 for the root.
        score: estimated probability that verification reaches it.
        label: the kind of evidence behind `score / parent's score`.
        children: index by token.
        asked: whether the draft model has said what follows.
    """

    token: int
    parent: int
    score: float
    label: str
    children: dict[int, int] = field(default_factory=dict)
    asked: bool = False


class Growth:
    """A tree while it grows; nodes keep their indices, scores change with the evidence.

    Args:
        tree: what is proposed without the model.
        budget: most draft nodes of the finished tree.
        base: position of the root.
    """

    def __init__(self, tree: TokenTree, budget: int, base: int) -> None:
        self.budget = budget
        self.base = base
        self.nodes: list[_Node] = []
        self.order: list[int] = []  # nodes with draft KV, in slot order; the root first
        rows = zip(tree.tokens, tree.parents, tree.scores, tree.sources, strict=True)
        for token, parent, score, label in rows:
            self._add(parent, token, score, label)

    def _add(self, parent: int, token: int, score: float, label: str) -> None:
        if parent >= 0:
            self.nodes[parent].children[token] = len(self.nodes)
        self.nodes.append(_Node(token, parent, score, label))

    @property
    def expected(self) -> float:
        """Tokens the round is expected to yield with a tree of the usual size."""
        scores = sorted((node.score for node in self.nodes[1:]), reverse=True)
        return 1.0 + sum(scores[:_COUNTED])

    def best_place(self, hit: float) -> tuple[float, int]:
        """Where the model would add most expected tokens, and how many.

        Args:
            hit: how often the model's first guess comes true.

        Returns:
            (gain, node); asking there answers for the unasked nodes above it too.
        """
        gains: list[float] = []
        best, place = 0.0, 0
        for index, node in enumerate(self.nodes):
            if node.asked:
                gains.append(0.0)
                continue
            known = max((self.nodes[child].score for child in node.children.values()), default=0.0)
            above = gains[node.parent] if node.parent >= 0 else 0.0
            gains.append(above + max(node.score * hit - known, 0.0))
            if gains[index] > best:
                best, place = gains[index], index
        return best, place

    def unasked_path(self, place: int) -> list[int]:
        """The node and those above it that were not asked yet, from the top down."""
        path = []
        while place >= 0 and not self.nodes[place].asked:
            path.append(place)
            place = self.nodes[place].parent
        return path[::-1]

    def depth(self, index: int) -> int:
        """Distance from the root."""
        depth = 0
        while self.nodes[index].parent >= 0:
            index = self.nodes[index].parent
            depth += 1
        return depth

    def answer(
        self, index: int, ranked: Iterable[tuple[int, float]], calibrator: Calibrator
    ) -> None:
        """Takes in what the model says may follow a node.

        Args:
            index: of the node.
            ranked: (token, probability), best first.
            calibrator: turns kinds of evidence into probabilities.
        """
        node = self.nodes[index]
        node.asked = True
        if node.score <= 0:
            return
        unnamed = dict(node.children)
        for rank, (token, share) in enumerate(ranked):
            child = unnamed.pop(token, None)
            before = 0.0 if child is None else self.nodes[child].score / node.score
            agreed = 0 if child is None else 1 + min(int(before * 3), 2)
            label = f"model:{rank}.{min(int(share * 10), 9)}.{agreed}"
            score = node.score * calibrator.probability(label, share)
            if child is None:
                self._add(index, token, score, label)
            else:
                self._rescore(child, score, label)
        for child in unnamed.values():
            before = self.nodes[child].score / node.score
            label = f"unsaid:{min(int(before * 5), 4)}"
            self._rescore(child, node.score * calibrator.probability(label, 0.15), label)

    def _rescore(self, index: int, score: float, label: str) -> None:
        """Gives a node new evidence; what hangs below it keeps its share of it."""
        node = self.nodes[index]
        factor = score / node.score if node.score > 0 else 0.0
        node.score, node.label = score, label
        below = list(node.children.values())
        while below:
            child = self.nodes[below.pop()]
            child.score *= factor
            below.extend(child.children.values())

    def work_tree(self, fresh: Sequence[int]) -> TokenTree:
        """The nodes with draft KV and those about to get it, in slot order."""
        order = [*self.order, *fresh]
        place = {node: i for i, node in enumerate(order)} | {-1: -1}
        tokens = tuple(self.nodes[node].token for node in order)
        parents = tuple(place[self.nodes[node].parent] for node in order)
        return TokenTree(tokens, parents, (1.0,) * len(order), ("",) * len(order))

    def finished(self) -> TokenTree:
        """The best nodes as a tree; a node never scores above its parent, so they hang together."""
        order = sorted(range(1, len(self.nodes)), key=lambda i: (-self.nodes[i].score, i))
        builder = TreeBuilder(self.nodes[0].token)
        place = {0: 0}
        for index in order[: self.budget]:
            node = self.nodes[index]
            if node.parent in place and node.score > 0:
                place[index] = builder.add(place[node.parent], node.token, node.score, node.label)
        return builder.build()

    def kept(self, tokens: Sequence[int]) -> list[int]:
        """Places in slot order of the nodes with draft KV that `tokens` run through, root first."""
        place = {node: i for i, node in enumerate(self.order)}
        index, path = 0, [0] if self.order else []
        for token in tokens:
            child = self.nodes[index].children.get(token)
            if child is None or child not in place:
                break
            path.append(place[child])
            index = child
        return path


class _Pace:
    """What a draft forward costs, learned from those that ran: a base and so much a row."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._row_s = 0.0

    def seconds(self, num_rows: int) -> float:
        """Of a forward of so many rows; 0 before the first."""
        return self._step_s + self._row_s * max(num_rows - _COUNTED, 0)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learns from one forward; one that took far longer than usual counts little."""
        if num_rows <= _COUNTED:
            known = self._step_s
            self._step_s += 0.2 * (min(seconds, 3 * known) - known) if known else seconds
        elif num_rows >= 4 * _COUNTED:
            own = max(seconds - self._step_s, 0.0) / (num_rows - _COUNTED)
            self._row_s += 0.3 * (own - self._row_s) if self._row_s else own


@dataclass(slots=True)
class _Savings:
    """What a sequence would have gained so far if its context were in the draft's KV."""

    seconds: float = 0.0


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
        self._growths: dict[str, Growth] = {}
        self._savings: dict[str, _Savings] = {}
        self._clock = clock
        self._pace = _Pace()
        self._hit = 0.75
        self._target_s = 0.0  # a round without drafting
        self._unasked_rounds = 0
        self._began = self._drafted = 0.0

    def start(self, seq: DraftContext) -> None:
        """Indexes the prompt."""
        super().start(seq)
        self._savings[seq.request_id] = _Savings()

    def stop(self, seq: DraftContext) -> None:
        """Forgets the sequence; what was learned stays."""
        super().stop(seq)
        self._savings.pop(seq.request_id, None)
        self._growths.pop(seq.request_id, None)

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """Cheap trees, then as many forwards of the draft model as pay."""
        self._began = self._clock()
        self._growths = {}
        cheap = super().propose(seqs, budgets)
        growths = [
            Growth(tree, budget, len(seq.tokens) - 1)
            for seq, tree, budget in zip(seqs, cheap, budgets, strict=True)
        ]
        pairs = [
            (seq, growth)
            for seq, growth in zip(seqs, growths, strict=True)
            if growth.budget > 0 and growth.base + 1 < self._max_length
        ]
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
                seq.lease.commit_draft(growth.base, growth.kept(outcome.tokens))

    def _learn_hit(self, outcome: Outcome) -> None:
        accepted = set(outcome.verdict.path)
        for node in range(1, len(outcome.tree)):
            source = outcome.tree.sources[node]
            if outcome.tree.parents[node] in accepted and source.startswith("model:0."):
                self._hit += 0.02 * ((node in accepted) - self._hit)

    def _choose(
        self, pairs: Sequence[tuple[DraftContext, Growth]], probe: bool
    ) -> list[tuple[DraftContext, Growth, list[int]]]:
        """The sequences to ask the model for in one forward, and where; none if it does not pay."""
        places = [growth.best_place(max(self._hit, 0.05)) for _, growth in pairs]
        most = max((gain for gain, _ in places), default=0.0)
        if most <= 0:
            return []
        asked, gains, num_rows, num_unread, credit = [], 0.0, 0, 0, 0.0
        for (seq, growth), (gain, place) in zip(pairs, places, strict=True):
            path = growth.unasked_path(place)
            if gain < most / 4 or len(growth.order) + len(path) > _MAX_ROWS:
                continue
            if len(seq.tokens) + growth.depth(place) > self._max_length:
                continue
            asked.append((seq, growth, path))
            gains += gain
            num_rows += len(path)
            num_unread += 0 if growth.order else self._num_unread(seq)
            credit += self._savings[seq.request_id].seconds
        if probe:
            return asked
        expected = sum(growth.expected for _, growth in pairs)
        spent_s = self._clock() - self._began
        worth_s = gains * (self._target_s + spent_s) / expected
        price_s = self._pace.seconds(num_rows)
        reading_s = self._pace.seconds(num_rows + num_unread) - price_s
        if worth_s + credit >= price_s + _SAVE_UP * reading_s:
            return asked
        # The forward alone may pay while reading the context does not yet: save up for it.
        for seq, growth, _ in asked:
            if not growth.order:
                self._savings[seq.request_id].seconds += max(worth_s - price_s, 0.0) / len(asked)
        return []

    def _num_unread(self, seq: DraftContext) -> int:
        """Tokens before the root that the draft model has not read."""
        return max(len(seq.tokens) - 1 - seq.lease.draft_length, 0)

    def _ask(self, asked: Sequence[tuple[DraftContext, Growth, list[int]]]) -> bool:
        """Runs the draft model at the chosen places; False if there is no memory for it."""
        ready = [item for item in asked if self._prepare(item[0], item[1])]
        works = [self._work(seq, growth, path) for seq, growth, path in ready]
        if not works:
            return False
        begin = self._clock()
        logits = self._forward(works)
        num_rows = sum(len(work.tokens) for work in works)
        if num_rows <= _COUNTED:
            self._pace.observe(num_rows, self._clock() - begin)
        parts = torch.split(logits, [len(path) for _, _, path in ready])
        for (seq, growth, path), rows in zip(ready, parts, strict=True):
            growth.order.extend(path)
            ranked = self._ranked(seq, growth, path, rows)
            for index, guesses in zip(path, ranked, strict=True):
                growth.answer(index, guesses, self.calibrator)
        return True

    def _prepare(self, seq: DraftContext, growth: Growth) -> bool:
        """Reads what the draft model has not seen, up to the root; reserves slots for guesses."""
        if growth.order:
            return True
        lease, base = seq.lease, growth.base
        try:
            lease.reserve(base - lease.length + _MAX_ROWS)
        except CapacityError:
            return False
        lease.draft_length = min(lease.draft_length, base)
        while base - lease.draft_length > _COUNTED:
            start = lease.draft_length
            chunk = seq.tokens[start : min(start + _CHUNK, base)]
            begin = self._clock()
            self._forward([Work(lease, start, chunk, None, ())])
            self._pace.observe(len(chunk), self._clock() - begin)
            lease.draft_length = start + len(chunk)
        self._savings[seq.request_id].seconds = 0.0
        return True

    def _work(self, seq: DraftContext, growth: Growth, path: Sequence[int]) -> Work:
        base = growth.base
        if growth.order:
            tree = growth.work_tree(path)
            tokens = tree.tokens[len(growth.order) :]
            return Work(seq.lease, base, tokens, tree, range(len(tokens)))
        # From what is still unread through the root down to the place: one chain.
        start = seq.lease.draft_length
        unread = seq.tokens[start:base]
        chain = [*unread, *(growth.nodes[index].token for index in path)]
        return Work(seq.lease, start, chain, None, range(len(unread), len(chain)))

    @property
    def _max_length(self) -> int:
        """Positions the draft model has; 0 without one."""
        return self._source.model.spec.max_model_len if self._source else 0

    def _forward(self, works: Sequence[Work]) -> Tensor:
        assert self._source is not None
        return self._source.forward(works)

    def _ranked(
        self, seq: DraftContext, growth: Growth, path: Sequence[int], logits: Tensor
    ) -> list[list[tuple[int, float]]]:
        """The likeliest tokens at each node of a path, with their probabilities."""
        if seq.params.greedy:
            shares, tokens = _top_shares(logits, min(_BRANCHES, logits.shape[-1]))
            return [
                list(zip(ids, ps, strict=True))
                for ids, ps in zip(tokens.tolist(), shares.tolist(), strict=True)
            ]
        first = len(seq.tokens) + growth.depth(path[0])
        return [
            likely_tokens(row, seq.params, seq.seed, first + i)[:_BRANCHES]
            for i, row in enumerate(logits)
        ]


def _top_shares(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest softmax probabilities of each row, and their tokens."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and ops.available():
        return ops.top_shares(logits, k)
    top = torch.topk(logits.float(), k, dim=-1)
    whole = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    return torch.exp(top.values - whole), top.indices
