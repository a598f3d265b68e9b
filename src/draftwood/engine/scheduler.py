"""Who gets which rows of the next forward.

Sequences that decode go first, so that a long prompt never starves them; what is left of the row
budget computes prompts in chunks. When KV runs out, the youngest sequence gives its blocks back and
waits; its tokens stay, so it resumes where it was and its text does not change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from draftwood.attention import Work
from draftwood.config import EngineConfig
from draftwood.draft.base import Drafter
from draftwood.engine.sequence import Sequence, Status
from draftwood.errors import CapacityError
from draftwood.kv import Lease
from draftwood.tree import TokenTree

_MAX_LOGIT_ROWS = 64  # a row of logits takes the vocabulary's size in memory

Propose = Callable[[Seq[Sequence], int], list[TokenTree]]


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence's share of a forward.

    Attributes:
        seq: whose.
        work: what to compute.
        tree: what to walk afterwards; None for a chunk that does not reach the prompt's end.
        num_prefill_rows: rows that compute known tokens other than a root.
        decodes: whether those are tokens that a grammar forced, and not a prompt.
    """

    seq: Sequence
    work: Work
    tree: TokenTree | None
    num_prefill_rows: int
    decodes: bool = False


class Scheduler:
    """Queues, admits, plans and retires sequences.

    Args:
        config: limits.
        drafter: told when a sequence starts and stops.
    """

    def __init__(self, config: EngineConfig, drafter: Drafter) -> None:
        self._config = config
        self._drafter = drafter
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._waiting or self._running)

    def knows(self, request_id: str) -> bool:
        """Whether a waiting or running sequence has this id."""
        return any(seq.request_id == request_id for seq in (*self._running, *self._waiting))

    def add(self, seq: Sequence) -> None:
        """Queues a sequence."""
        self._waiting.append(seq)

    def retire(self, seq: Sequence) -> None:
        """Lets go of a finished sequence: publishes its KV for reuse and frees the rest."""
        if seq in self._waiting:
            self._waiting.remove(seq)
            return
        self._running.remove(seq)
        self._drafter.stop(seq)
        seq.lease.truncate(min(seq.lease.length, len(seq.tokens)))
        seq.lease.publish(seq.tokens)
        seq.lease.close()

    def plan(self, propose: Propose) -> list[Job]:
        """Decides the next forward, with room for all of it reserved."""
        self._admit()
        decoding = self._decoding()
        lag = sum(seq.num_missing - 1 for seq in decoding)
        rows_left = max(self._config.max_batch_tokens - len(decoding) - lag, 0)
        prefills = self._prefill_sizes(rows_left, decoding)
        trees = propose(decoding, sum(prefills.values()) + lag) if decoding else []
        by_id = {seq.request_id: tree for seq, tree in zip(decoding, trees, strict=True)}
        jobs = []
        for seq in list(self._running):
            if seq not in self._running:  # put back for an earlier one's sake: it takes no memory
                continue
            if seq.request_id in by_id:
                job = self._decode_job(seq, by_id[seq.request_id])
            elif seq.request_id in prefills:
                job = self._prefill_job(seq, prefills[seq.request_id])
            else:
                job = None
            if job is not None:
                jobs.append(job)
        # A later sequence may have been put back for an earlier one's sake.
        return [job for job in jobs if job.seq in self._running]

    def _admit(self) -> None:
        held_back: list[Sequence] = []
        # Every running sequence needs a row of each forward.
        most = min(self._config.max_num_seqs, self._config.max_batch_tokens)
        while self._waiting and len(self._running) < most:
            seq = self._waiting.popleft()
            if _waits_for_parent(seq):
                held_back.append(seq)
            else:
                self._start(seq)
        self._waiting.extendleft(reversed(held_back))

    def _start(self, seq: Sequence) -> None:
        seq.lease = _first_lease(seq)
        if seq.metrics.num_cached_tokens == 0:
            seq.metrics.num_cached_tokens = min(seq.lease.length, seq.num_prompt_tokens)
        seq.status = Status.RUNNING
        self._running.append(seq)
        self._drafter.start(seq)

    def _decoding(self) -> list[Sequence]:
        """The sequences that get a tree; where rows are short, forced tokens come first."""
        ready = [seq for seq in self._running if seq.decodes]
        spare = self._config.max_batch_tokens - len(ready)
        decoding = []
        for seq in ready:
            lag = seq.num_missing - 1
            if lag <= max(spare, 0):
                decoding.append(seq)
                spare -= lag
        return decoding

    def _prefill_sizes(self, rows_left: int, decoding: Seq[Sequence]) -> dict[str, int]:
        """Rows for each other sequence whose known tokens are not all computed, oldest first."""
        sizes = {}
        decoding_ids = {seq.request_id for seq in decoding}
        for seq in self._running:
            if seq.request_id in decoding_ids:
                continue
            size = min(seq.num_missing, rows_left)
            if _wants_all_logits(seq):
                size = min(size, _MAX_LOGIT_ROWS)
            if seq.num_missing > 1 and size > 0:
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

    def _reserve(self, seq: Sequence, num_slots: int) -> bool:
        """Makes room for a sequence, at the cost of the youngest if need be."""
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
        seq.lease.close()
        seq.status = Status.WAITING
        self._waiting.appendleft(seq)


def _waits_for_parent(seq: Sequence) -> bool:
    """Whether the prompt it shares is still being computed by another sequence."""
    parent = seq.parent
    if parent is None or parent.finished:
        return False
    return parent.lease.length < seq.num_prompt_tokens


def _first_lease(seq: Sequence) -> Lease:
    """The KV to start from: the parent's, what the prefix index has, or none."""
    parent = seq.parent
    fresh = len(seq.tokens) == seq.num_prompt_tokens
    if parent is not None and not parent.finished and fresh:
        seq.lease.close()
        return parent.lease.fork(seq.num_prompt_tokens - 1)
    # Log-probabilities of the prompt need it computed, whatever is cached.
    return seq.lease.reopen(() if _wants_all_logits(seq) else seq.tokens)


def _wants_all_logits(seq: Sequence) -> bool:
    """Whether log-probabilities of prompt tokens are still to be read."""
    wanted = seq.params.prompt_logprobs is not None
    return wanted and len(seq.prompt_logprobs) < seq.num_prompt_tokens - 1
