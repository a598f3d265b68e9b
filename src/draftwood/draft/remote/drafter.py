"""The engine's side of a draft model in another process.

While the target verifies a tree, the desk drafts what follows its likeliest path (PEARL, arXiv
2408.11850): if that path is what verification takes, the next round's draft is there before it is
wanted. If not, the desk is told where the text went, and it is waited for as long as its answer is
worth, never longer than the deadline. A desk that is dead, slow or new is no more than a round
without a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from draftwood.draft.base import DraftContext, Drafter, Outcome
from draftwood.draft.remote.ahead import Ahead
from draftwood.draft.remote.link import Link, Reply
from draftwood.draft.remote.messages import Ask, Manner, Wish
from draftwood.tree import TokenTree

_FIRST_BUDGET = 8  # of a draft for a prompt that the target is still reading
_LITTLE = 0.05  # accepted tokens a round below which drafting is only tried now and then
_PROBE_EVERY = 16


class RemoteDrafter(Drafter):
    """Drafts that come from a desk, over a link.

    Args:
        link: to the desk. It is this drafter's alone; `close` closes it.
        deadline_s: the most seconds that a round waits for a draft.
        prefix: begins the names of its sequences at the desk, which others may use too.
        clock: seconds.

    Attributes:
        num_hits: sequences and rounds whose draft was there before it was wanted.
        num_waited, num_missed: those that waited and got one, and those that went without.
    """

    name = "remote"

    def __init__(
        self,
        link: Link,
        deadline_s: float = 0.1,
        prefix: str = "",
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.num_hits = self.num_waited = self.num_missed = 0
        self._link = link
        self._deadline_s = deadline_s
        self._prefix = prefix
        self._clock = clock
        self._aheads: dict[str, Ahead] = {}
        self._ended: list[str] = []
        self._answer_s = 0.0
        self._target_s = 0.0
        self._yield = 2.0  # tokens accepted in a round with a draft
        self._proposed_at: float | None = None
        self._rounds = 0

    def close(self) -> None:
        """Asks nothing more."""
        self._link.close()

    def start(self, seq: DraftContext) -> None:
        """The desk may read the prompt while the target does."""
        self._aheads[seq.request_id] = Ahead(TokenTree.root(seq.tokens[-1]), len(seq.tokens))
        self._send([(seq, _FIRST_BUDGET)], ahead=False)

    def propose(self, seqs: Sequence[DraftContext], budgets: Sequence[int]) -> list[TokenTree]:
        """What is there, or comes in time."""
        for seq in seqs:
            self._aheads[seq.request_id].settle(seq.tokens)
        pairs = list(zip(seqs, budgets, strict=True))
        self._take(seqs, 0.0)
        hungry = self._without(pairs)
        self.num_hits += len(pairs) - len(hungry)
        if hungry:
            self._wait(seqs, hungry)
        trees = [self._aheads[seq.request_id].tree.best(budget + 1) for seq, budget in pairs]
        self._rounds += 1
        if self._yield > _LITTLE or self._rounds % _PROBE_EVERY == 0:
            self._send(pairs, ahead=True)
        self._proposed_at = self._clock()
        return trees

    def observe(self, seqs: Sequence[DraftContext], outcomes: Sequence[Outcome]) -> None:
        """Learns what a draft yields, and what a round takes."""
        if self._proposed_at is not None:
            self._target_s = _moved(self._target_s, self._clock() - self._proposed_at)
            self._proposed_at = None
        for outcome in outcomes:
            if len(outcome.tree) > 1:
                self._yield += 0.1 * (outcome.verdict.num_accepted - self._yield)

    def stop(self, seq: DraftContext) -> None:
        """Forgets the sequence; the desk is told with the next question."""
        if self._aheads.pop(seq.request_id, None) is not None:
            self._ended.append(self._prefix + seq.request_id)

    def _wait(
        self, seqs: Sequence[DraftContext], hungry: Sequence[tuple[DraftContext, int]]
    ) -> None:
        """Gets drafts for those that have none, if that is soon enough."""
        until, asked, left = self._clock() + self._patience(), False, hungry
        while left and (patience := until - self._clock()) > 0:
            if not self._link.busy:
                if asked or not self._send(left, ahead=False):
                    break
                asked = True
            if not self._take(seqs, patience):
                break
            left = self._without(left)
        self.num_waited += len(hungry) - len(left)
        self.num_missed += len(left)

    def _without(self, pairs: Sequence[tuple[DraftContext, int]]) -> list[tuple[DraftContext, int]]:
        """Those that have no draft."""
        return [pair for pair in pairs if self._aheads[pair[0].request_id].empty]

    def _patience(self) -> float:
        """Seconds that are worth waiting: less than the draft is expected to save."""
        if self._link.waited_s > self._deadline_s:
            return 0.0  # it was waited for once
        worth = self._yield * self._target_s if self._target_s else self._deadline_s
        limit = min(worth, self._deadline_s)
        return limit if self._answer_s <= limit else 0.0

    def _take(self, seqs: Sequence[DraftContext], patience_s: float) -> bool:
        """Takes an answer in, if one comes in time."""
        reply = self._link.take(patience_s)
        if reply is None:
            return False
        if reply.answer is None:
            for wish in reply.ask.wishes:
                ahead = self._aheads.get(wish.id.removeprefix(self._prefix))
                if ahead is not None:
                    ahead.forget()
            return True
        self._answer_s = _moved(self._answer_s, reply.seconds)
        self._read(reply, {seq.request_id: seq for seq in seqs})
        return True

    def _read(self, reply: Reply, seqs: dict[str, DraftContext]) -> None:
        assert reply.answer is not None
        for draft in reply.answer.drafts:
            name = draft.id.removeprefix(self._prefix)
            ahead = self._aheads.get(name)
            if ahead is not None and name in seqs:
                ahead.take(draft, seqs[name].tokens)

    def _send(self, pairs: Sequence[tuple[DraftContext, int]], *, ahead: bool) -> bool:
        """Asks for drafts: behind the likeliest paths, or behind the sequences as they are."""
        if self._link.busy:
            return False
        made = [self._wish(seq, budget, ahead) for seq, budget in pairs]
        if not self._link.send(Ask(tuple(wish for wish, _ in made), tuple(self._ended))):
            return False
        self._ended.clear()
        for (seq, _), (_, tokens) in zip(pairs, made, strict=True):
            self._aheads[seq.request_id].note_sent(tokens, len(seq.tokens))
        return True

    def _wish(self, seq: DraftContext, budget: int, ahead: bool) -> tuple[Wish, list[int]]:
        """What to ask about a sequence, and what the desk will then have of it."""
        known = self._aheads[seq.request_id]
        tokens = [*seq.tokens, *(known.likely_path() if ahead else ())]
        start = known.num_sent(tokens)
        manner = Manner.of(seq.params, seq.seed)
        name = self._prefix + seq.request_id
        return Wish(name, start, tuple(tokens[start:]), len(seq.tokens), budget, manner), tokens


def _moved(average: float, value: float) -> float:
    """A moving average of seconds; an outlier counts as three times the usual."""
    return average + 0.2 * (min(value, 3 * average) - average) if average else value
