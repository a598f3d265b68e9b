"""Who gets which rows of the next forward.

Sequences that decode go first, so that a long prompt never starves them; what is left of the row
budget computes prompts in chunks. When KV runs out, the least urgent sequence, of equals the
youngest, gives its blocks back and waits; its tokens stay, so it resumes where it was and its text
does not change. One that is more urgent than some that run takes their places in the same way.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

from draftwood.attention import Work
from draftwood.config import EngineConfig
from draftwood.draft.base import Drafter
from draftwood.engine.beam import Beams
from draftwood.engine.sequence import Sequence, Status
from draftwood.errors import CapacityError
from draftwood.kv import Lease
from draftwood.kv.tiers import TieredPrefix
from draftwood.tree import TokenTree

_WORTH_WAITING = 2  # blocks: to compute fewer twice costs less than a round of waiting
_MAX_LOGIT_ROWS = 64  # a row of logits takes the vocabulary's size in memory

Propose = Callable[[Seq[Sequence], int], list[TokenTree]]


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence's share of a forward.

    Attributes:
        seq: whose.
        work: what to compute.
        tree: what to walk afterwards; None for a chunk that does not reach the prompt's end, and
            for beams.
        num_prefill_rows: rows that compute known tokens other than a root.
        beams: the sequence's, which then has no tree to walk.
        decodes: whether those are tokens that a grammar forced, and not a prompt.
    """

    seq: Sequence
    work: Work
    tree: TokenTree | None
    num_prefill_rows: int
    beams: Beams | None = None
    decodes: bool = False


class Scheduler:
    """Queues, admits, plans and retires sequences.

    Args:
        config: limits.
        drafter: told when a sequence starts and stops.
        tiers: where KV of earlier processes may be; None for nowhere.

    Attributes:
        num_preemptions: how often a running sequence was put back for others' sake.
    """

    def __init__(
        self, config: EngineConfig, drafter: Drafter, tiers: TieredPrefix | None = None
    ) -> None:
        self._config = config
        self._drafter = drafter
        self._tiers = tiers
        # Both in the order of turns: by priority, then by age.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def unfinished(self) -> tuple[Sequence, ...]:
        """All sequences that wait or run, in the order of their turns."""
        return (*self._running, *self._waiting)

    def knows(self, request_id: str) -> bool:
        """Whether a waiting or running sequence has this id."""
        return any(seq.request_id == request_id for seq in (*self._running, *self._waiting))

    def add(self, seq: Sequence) -> None:
        """Queues a sequence behind those that are as urgent."""
        self._waiting.insert(bisect_right(self._waiting, seq.priority, key=_priority), seq)

    def retire(self, seq: Sequence) -> None:
        """Lets go of a finished sequence: publishes its KV for reuse and frees the rest."""
        if seq.fetch is not None:
            seq.fetch.cancel()
        if seq in self._waiting:
            self._waiting.remove(seq)
            return
        self._running.remove(seq)
        self._drafter.stop(seq)
        seq.lease.truncate(min(seq.lease.length, len(seq.tokens)))
        seq.lease.publish(seq.tokens, seq.cache_salt)
        seq.lease.close()

    def plan(self, propose: Propose) -> list[Job]:
        """Decides the next forward, with room for all of it reserved."""
        self._admit()
        while not self._running and self._tiers is not None and self._tiers.wait():
            self._admit()
        decoding = self._decoding()
        lag = sum(seq.num_missing - 1 for seq in decoding)
        sizes = self._sizes(self._config.max_batch_tokens - len(decoding) - lag, decoding)
        trees = propose(decoding, sum(sizes.values()) + lag) if decoding else []
        by_id = {seq.request_id: tree for seq, tree in zip(decoding, trees, strict=True)}
        jobs = []
        for seq in list(self._running):
            if seq not in self._running:  # put back for an earlier one's sake: it takes no memory
                continue
            if seq.request_id in by_id:
                job = self._decode_job(seq, by_id[seq.request_id])
            elif seq.request_id not in sizes:
                job = None
            elif seq.beams is not None:
                job = self._beam_job(seq, seq.beams, sizes[seq.request_id])
            else:
                job = self._prefill_job(seq, sizes[seq.request_id])
            if job is not None:
                jobs.append(job)
        # A later sequence may have been put back for an earlier one's sake.
        return [job for job in jobs if job.seq in self._running]

    def _admit(self) -> None:
        held_back: list[Sequence] = []
        fetching: list[Sequence] = []  # KV that is on its way; their places are kept
        while self._waiting and self._may_start([*fetching, self._waiting[0]]):
            seq = self._waiting.pop(0)
            if _waits_for_parent(seq):
                held_back.append(seq)
            elif self._waits_for_mate(seq) or self._waits_for_store(seq):
                held_back.append(seq)
                fetching.append(seq)
            else:
                while not self._has_room([*fetching, seq]):
                    self._preempt(self._running[-1])
                self._start(seq)
        self._waiting[:0] = held_back  # whoever was put back meanwhile is less urgent

    def _may_start(self, more: Seq[Sequence]) -> bool:
        """Whether the last of these has a place, or can take one of less urgent sequences."""
        stay = bisect_right(self._running, more[-1].priority, key=_priority)
        return self._has_room(more, stay)

    def _has_room(self, more: Seq[Sequence], stay: int | None = None) -> bool:
        """Whether these may run beside the first `stay` of those that do; None is all.

        Each needs a row of every forward, or one for each beam.
        """
        seqs = [*self._running[:stay], *more]
        rows = sum(seq.params.num_beams for seq in seqs)
        return len(seqs) <= self._config.max_num_seqs and rows <= self._config.max_batch_tokens

    def _waits_for_mate(self, seq: Sequence) -> bool:
        """Whether one that runs is computing a prompt that begins alike: that is done only once.

        What such a sequence has computed already is published here, when somebody wants it.
        """
        if _shares_parent(seq) or _wants_all_logits(seq):
            return False
        mates = [mate for mate in self._running if mate.cache_salt == seq.cache_salt]
        size = self._config.block_size
        common, mate = max(
            ((_num_common(mate, seq, size), mate) for mate in mates),
            key=lambda pair: pair[0],
            default=(0, seq),
        )
        shared = common - mate.metrics.num_cached_tokens
        if common > mate.lease.length and shared >= _WORTH_WAITING * size:
            return True
        if common > 0:  # of what it has not computed yet nothing is published
            mate.lease.publish(mate.tokens[:common], mate.cache_salt)
        return False

    def _waits_for_store(self, seq: Sequence) -> bool:
        """Whether disk or Redis is still being asked for its KV; the others go on meanwhile."""
        if self._tiers is None or _shares_parent(seq) or _wants_all_logits(seq):
            return False
        if seq.fetch is None:
            seq.fetch = self._tiers.open(seq.tokens, seq.cache_salt)
        return seq.fetch is None or not seq.fetch.ready

    def _restore(self, seq: Sequence) -> dict[str, int]:
        """Takes over what was fetched for it; returns tokens by tier."""
        fetch, seq.fetch = seq.fetch, None
        if fetch is None or self._tiers is None:
            return {}
        return self._tiers.adopt(fetch, seq.tokens, seq.cache_salt)

    def _start(self, seq: Sequence) -> None:
        restored = self._restore(seq)
        seq.lease = _first_lease(seq)
        if _is_new_here(seq):
            seq.metrics.count_cached(min(seq.lease.length, seq.num_prompt_tokens), restored)
        seq.metrics.start_s = seq.metrics.start_s or perf_counter()
        seq.status = Status.RUNNING
        self._running.insert(bisect_right(self._running, seq.priority, key=_priority), seq)
        if seq.beams is None:
            self._drafter.start(seq)

    def _decoding(self) -> list[Sequence]:
        """The sequences that get a tree; where rows are short, forced tokens come first."""
        ready = [seq for seq in self._running if seq.decodes and seq.beams is None]
        spare = self._config.max_batch_tokens - len(ready)
        decoding = []
        for seq in ready:
            lag = seq.num_missing - 1
            if lag <= max(spare, 0):
                decoding.append(seq)
                spare -= lag
        return decoding

    def _sizes(self, rows_left: int, decoding: Seq[Sequence]) -> dict[str, int]:
        """Rows for the leaves of beams and then, oldest first, for what is known and not computed.

        Args:
            rows_left: for all of them.
            decoding: those that only walk a tree, and get none of these rows.
        """
        sizes = {s.request_id: s.num_missing for s in self._running if s.beams and s.decodes}
        rows_left = max(rows_left - sum(sizes.values()), 0)
        others = {*sizes, *(seq.request_id for seq in decoding)}
        for seq in self._running:
            size = 0 if seq.request_id in others else _chunk_size(seq, rows_left)
            if size > 0:
                sizes[seq.request_id] = size
                rows_left -= size
        return sizes

    def _decode_job(self, seq: Sequence, tree: TokenTree) -> Job | None:
        lag = seq.num_missing - 1
        try:
            seq.lease.reserve(lag + len(tree))
        except CapacityError:
            # A draft is not worth another request's memory.
            tree = TokenTree.root(tree.tokens[0])
            if not self._reserve(seq, lag + 1):
                return None
        start = seq.lease.length
        whole = tree.below(seq.tokens[start:-1]) if lag else tree
        work = Work(seq.lease, start, whole.tokens, whole, range(lag, len(whole)))
        return Job(seq, work, tree, lag, decodes=True)

    def _prefill_job(self, seq: Sequence, size: int) -> Job | None:
        if not self._reserve(seq, size):
            return None
        start = seq.lease.length
        tokens = seq.tokens[start : start + size]
        last = start + size == len(seq.tokens)
        rows: Seq[int] = (size - 1,) if last else ()
        if _wants_all_logits(seq):
            rows = range(size)
        work = Work(seq.lease, start, tokens, None, rows)
        return Job(
            seq, work, TokenTree.root(tokens[-1]) if last else None, size - 1 if last else size
        )

    def _beam_job(self, seq: Sequence, beams: Beams, size: int) -> Job | None:
        if not self._reserve(seq, beams.num_computed + size):
            return None
        work = beams.work(seq, size)
        return Job(seq, work, None, size - len(work.logit_rows), beams)

    def _reserve(self, seq: Sequence, num_slots: int) -> bool:
        """Makes room for a sequence, at the cost of whoever is last if need be."""
        while seq in self._running:
            try:
                seq.lease.reserve(num_slots)
            except CapacityError:
                if len(self._running) == 1:
                    raise  # nobody is left to give way: others outside this engine hold the pool
                self._preempt(self._running[-1])
            else:
                return True
        return False

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._drafter.stop(seq)
        seq.lease.publish(seq.tokens, seq.cache_salt)  # what nobody needs till then is still there
        seq.lease.close()
        if seq.beams is not None:
            seq.beams.forget()
        seq.status = Status.WAITING
        self.num_preemptions += 1
        self._waiting.insert(bisect_left(self._waiting, seq.priority, key=_priority), seq)


def _priority(seq: Sequence) -> int:
    return seq.priority


def _chunk_size(seq: Sequence, room: int) -> int:
    """How many of the missing rows come next."""
    if seq.beams is not None:
        return seq.beams.num_rows(seq.num_missing - seq.beams.num_missing, room)
    size = min(seq.num_missing, room)
    return min(size, _MAX_LOGIT_ROWS) if _wants_all_logits(seq) else size


def _waits_for_parent(seq: Sequence) -> bool:
    """Whether the prompt it shares is still being computed by another sequence."""
    parent = seq.parent
    if parent is None or parent.finished:
        return False
    return parent.lease.length < seq.num_prompt_tokens


def _num_common(mate: Sequence, seq: Sequence, size: int) -> int:
    """Tokens in the full blocks with which both begin, of the mate's prompt and all of `seq` but
    its last token, which is computed in any case."""
    most = min(mate.num_prompt_tokens, len(seq.tokens) - 1) // size * size
    for start in range(0, most, size):
        if mate.tokens[start : start + size] != seq.tokens[start : start + size]:
            return start
    return most


def _first_lease(seq: Sequence) -> Lease:
    """The KV to start from: the parent's, what the prefix index has, or none."""
    if _shares_parent(seq) and seq.parent is not None:
        seq.lease.close()
        return seq.parent.lease.fork(seq.num_prompt_tokens - 1)
    # Log-probabilities of the prompt need it computed, whatever is cached.
    return seq.lease.reopen(() if _wants_all_logits(seq) else seq.tokens, seq.cache_salt)


def _shares_parent(seq: Sequence) -> bool:
    """Whether it starts from the KV of a sequence that runs."""
    fresh = len(seq.tokens) == seq.num_prompt_tokens
    return seq.parent is not None and not seq.parent.finished and fresh


def _is_new_here(seq: Sequence) -> bool:
    """Whether what is cached of it was saved; one that was put back finds what is its own."""
    metrics = seq.metrics
    resumed = metrics.num_resumed_tokens > 0 and metrics.num_cached_tokens == 0
    return metrics.start_s is None or resumed


def _wants_all_logits(seq: Sequence) -> bool:
    """Whether log-probabilities of prompt tokens are still to be read."""
    wanted = seq.params.prompt_logprobs is not None
    return wanted and len(seq.prompt_logprobs) < seq.num_prompt_tokens - 1
