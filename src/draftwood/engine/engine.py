"""The engine: rounds over token trees.

A round is: propose trees, run the target once over all sequences, walk each tree, commit the
accepted paths. Plain decoding is the tree of one node. There is no prefill phase: a sequence has
tokens and computed tokens, and what is missing is work for the next forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from time import perf_counter

import torch
from torch import Tensor

from draftwood.attention import pack
from draftwood.config import EngineConfig
from draftwood.draft.base import Drafter, NoDrafter, Outcome
from draftwood.draft.guard import GuardedDrafter
from draftwood.engine.admission import Admission
from draftwood.engine.beam import advance
from draftwood.engine.checkpoint.saved import SavedRequest
from draftwood.engine.controller import Controller
from draftwood.engine.costs import cost_model
from draftwood.engine.observers import Observer, Round
from draftwood.engine.scheduler import Job, Scheduler
from draftwood.engine.sequence import Sequence
from draftwood.errors import ConfigError
from draftwood.kernels.ops import argmax
from draftwood.kv import BlockPool, PrefixIndex
from draftwood.kv.tiers import LOSSY, KVTiers, TieredPrefix
from draftwood.models.base import Model
from draftwood.sampling import SamplingParams, TokenLogprobs, choose, token_logprobs, walk
from draftwood.sampling.grammar import Compiler
from draftwood.text import Tokenizer
from draftwood.tree import TokenTree


class Engine:
    """Runs requests to their end, many at a time.

    Args:
        model: the target.
        tokenizer: of the target.
        drafter: who proposes; any drafter gives the same text.
        pool: KV memory, with a draft plane if the drafter has a model.
        config: limits and switches.
        tiers: stores that KV is kept in for longer than this engine lives; None for none.
        grammars: compiles the grammars of structured output; None refuses them.

    Attributes:
        observers: told about every round.
        num_requests: how many were made.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        drafter: Drafter,
        pool: BlockPool,
        config: EngineConfig,
        tiers: KVTiers | None = None,
        grammars: Compiler | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = GuardedDrafter(drafter, model.spec.vocab_size)
        self.drafter.remember(config.draft_memory, config.past_answers)
        self.pool = pool
        self.config = config
        self.tiers = tiers
        self.observers: list[Observer] = []
        self.prefix = PrefixIndex(pool, _identity(model, pool, config).encode())
        behind = TieredPrefix(self.prefix, pool, tiers) if tiers else None
        speculative = config.max_tree_nodes > 0 and not isinstance(drafter, NoDrafter)
        cost = cost_model(model, pool) if speculative and config.adaptive else None
        self.controller = Controller(
            cost, config.max_tree_nodes if speculative else 0, draft_s=self.drafter.round_s()
        )
        if cost is not None:
            self.drafter.prices(lambda rows, context: cost.at(context)(rows))
        self._scheduler = Scheduler(config, self.drafter, behind)
        self._admission = Admission(
            tokenizer,
            model.spec.vocab_size,
            self.max_length,
            pool,
            self.prefix,
            config.max_batch_tokens,
            grammars,
        )
        self.num_requests = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    @property
    def unfinished(self) -> tuple[Sequence, ...]:
        """All requests that run or wait, in the order of their turns."""
        return self._scheduler.unfinished

    @property
    def num_preemptions(self) -> int:
        """How often a request was put back for others' sake."""
        return self._scheduler.num_preemptions

    @property
    def max_length(self) -> int:
        """The longest sequence that fits the model's positions and the KV pool."""
        slots = (self.pool.num_blocks - 1) * self.pool.block_size
        return min(self.model.spec.max_model_len, slots)

    def room(self, num_prompt: int, params: SamplingParams) -> int:
        """Most tokens that can follow a prompt of that length; below 1 when none can."""
        return self._admission.room(num_prompt, params)

    def add(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        request_id: str | None = None,
        parent: Sequence | None = None,
    ) -> Sequence:
        """Queues a request; see `make`."""
        seq = self.make(prompt_ids, params, request_id, parent)
        self.submit(seq)
        return seq

    def make(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        request_id: str | None = None,
        parent: Sequence | None = None,
    ) -> Sequence:
        """A request that is checked and not queued yet.

        `parent` is a request with the same prompt, whose KV it then shares.

        Raises:
            PromptError: the prompt is empty, holds ids the model does not know, or leaves no room.
            ConfigError: the parameters do not fit the prompt or the vocabulary, or an unfinished
                request has the same id.
        """
        self.num_requests += 1
        request_id = request_id or f"request-{self.num_requests}"
        if self._scheduler.knows(request_id):
            raise ConfigError(f"request id {request_id!r} is in use: choose another")
        return self._admission.make(prompt_ids, params, request_id, parent)

    def submit(self, seq: Sequence) -> None:
        """Queues what `make` made."""
        self._scheduler.add(seq)

    def resume(self, saved: SavedRequest, parent: Sequence | None = None) -> Sequence:
        """Goes on with a request of an earlier process, from where it was saved.

        Its text is what it would have been. KV that the cache tiers have is not computed again. A
        beam search begins anew. One that had ended is returned as it was, and not queued.

        Raises:
            ConfigError: a request has the same id, or this engine has no room for its length.
        """
        seq = self.make(saved.prompt_ids, saved.own_params, saved.request_id, parent)
        saved.restore(seq)
        if not seq.finished:
            self.submit(seq)
        return seq

    def count_from(self, num_requests: int) -> None:
        """Names requests as if so many had been made, so that names of others stay theirs."""
        self.num_requests = max(self.num_requests, num_requests)

    def abort(self, seq: Sequence) -> None:
        """Ends a request now; what it generated stays readable and its memory is freed."""
        if not seq.finished:
            seq.finish("abort")
            self._scheduler.retire(seq)

    def close(self) -> None:
        """Ends all requests and gives every block back to the pool, cached prefixes included.

        An engine on a shared pool must be closed, or its prefixes stay there. It can be used again.
        """
        for seq in self._scheduler.unfinished:
            self.abort(seq)
        self.prefix.clear()

    def step(self) -> list[Sequence]:
        """One round; returns the sequences that got tokens, finished ones included."""
        marks = [perf_counter()]
        jobs = self._scheduler.plan(self._propose)
        marks.append(perf_counter())
        logits = self._forward(jobs)
        marks.append(perf_counter())
        self._read_prompt_logprobs(jobs, logits)
        done = [
            (job, rows[-len(job.tree) :])
            for job, rows in zip(jobs, logits, strict=True)
            if job.tree
        ]
        outcomes = [self._verify(job, rows) for job, rows in done]
        changed = [job.seq for job, _ in done] + _advance_beams(jobs, logits)
        marks.append(perf_counter())
        for job in jobs:
            if job.tree is None and job.beams is None:
                job.seq.lease.commit(range(len(job.work.tokens)))
        outcomes = [self._commit(job, o) for (job, _), o in zip(done, outcomes, strict=True)]
        marks.append(perf_counter())
        self._learn([job for job, _ in done], outcomes)
        marks.append(perf_counter())
        self._report(jobs, outcomes, marks)
        for seq in changed:
            if seq.finished and self._scheduler.knows(seq.request_id):  # an observer may abort
                self._scheduler.retire(seq)
        return changed

    def _propose(self, seqs: Seq[Sequence], other_rows: int) -> list[TokenTree]:
        """One tree per sequence that decodes, cut to what pays."""
        budget = self.controller.budget()
        budgets = [_budget(seq, budget) for seq in seqs]
        trees = self.drafter.propose(seqs, budgets)
        trees = [_guide(*each) for each in zip(seqs, trees, budgets, strict=True)]
        trees = [tree.clip(_depth(seq)) for seq, tree in zip(seqs, trees, strict=True)]
        room = max(self.config.max_batch_tokens - len(seqs) - other_rows, 0)
        return self.controller.choose(trees, other_rows, room, _mean_context(seqs))

    def _forward(self, jobs: Seq[Job]) -> list[Tensor]:
        """The target's logits for each job's wanted rows."""
        if not jobs:
            return []
        batch = pack([job.work for job in jobs], self.pool.device)
        logits = self.model.forward(batch, self.pool.target)
        return list(torch.split(logits, [len(job.work.logit_rows) for job in jobs]))

    def _verify(self, job: Job, logits: Tensor) -> Outcome:
        """Walks one tree by the target's choices."""
        assert job.tree is not None
        seq, tree = job.seq, job.tree
        if seq.params.greedy and not seq.rules:
            best = argmax(logits)  # of all nodes at once
            verdict = walk(tree, lambda node, depth: best[node], seq.stop_ids)
        else:
            verdict = walk(
                tree, lambda node, depth: _pick(seq, tree, logits[node], node, depth), seq.stop_ids
            )
        return Outcome(tree, verdict, verdict.tokens, logits)

    def _commit(self, job: Job, outcome: Outcome) -> Outcome:
        """Appends what the stop rules leave, then keeps the KV of just that."""
        seq, verdict = job.seq, outcome.verdict
        num_before = job.num_prefill_rows  # rows of known tokens in front of the root
        length = len(seq.tokens)
        taken = seq.append(verdict.tokens, verdict.num_accepted, self._logprobs(seq, outcome))
        if job.decodes or num_before == 0:
            seq.metrics.count_round(verdict.num_drafted)
        seq.force()
        path = [num_before + node for node in verdict.path[:taken]]
        seq.lease.commit([*range(num_before), *path])
        return Outcome(outcome.tree, verdict, tuple(seq.tokens[length:]), outcome.logits)

    def _logprobs(self, seq: Sequence, outcome: Outcome) -> list[TokenLogprobs]:
        """Log-probabilities of the verdict's tokens, if the request wants them."""
        num_top, verdict = seq.params.logprobs, outcome.verdict
        if num_top is None:
            return []
        return [
            token_logprobs(outcome.logits[node], token, num_top)
            for node, token in zip(verdict.path, verdict.tokens, strict=True)
        ]

    def _read_prompt_logprobs(self, jobs: Seq[Job], logits: Seq[Tensor]) -> None:
        """Log-probabilities of prompt tokens, from the rows before each.

        A request that was put back computes its prompt again, in other chunks.
        """
        for job, rows in zip(jobs, logits, strict=True):
            num_top = job.seq.params.prompt_logprobs
            known = len(job.seq.prompt_logprobs)
            skip = known - job.work.context
            if num_top is None or skip < 0:
                continue
            tokens = job.seq.tokens[known + 1 : job.seq.num_prompt_tokens]
            job.seq.prompt_logprobs.extend(
                token_logprobs(row, token, num_top)
                for row, token in zip(rows[skip:], tokens, strict=False)
            )

    def _learn(self, jobs: Seq[Job], outcomes: Seq[Outcome]) -> None:
        # A prompt's last chunk drafted nothing, but its tokens and logits are news all the same.
        self.drafter.observe([job.seq for job in jobs], outcomes)

    def _report(self, jobs: Seq[Job], outcomes: Seq[Outcome], marks: Seq[float]) -> None:
        plan, target, verify, commit, learn = (b - a for a, b in itertools.pairwise(marks))
        prefill_rows = sum(job.num_prefill_rows for job in jobs if not job.decodes)
        num_rows = sum(len(job.work.tokens) for job in jobs)
        if self.controller.cost and num_rows and not prefill_rows:
            context = _mean_context([job.seq for job in jobs])
            self.controller.cost.observe(num_rows, context, target)
        drafted = [o for o in outcomes if len(o.tree) > 1]
        if drafted:
            accepted = sum(o.verdict.num_accepted for o in drafted)
            self.controller.observe([o.tree for o in drafted], accepted, plan + learn)
        round_ = Round(
            request_ids=tuple(job.seq.request_id for job in jobs if job.tree),
            outcomes=tuple(outcomes),
            num_rows=num_rows,
            num_prefill_rows=prefill_rows,
            draft_s=plan + learn,
            target_s=target,
            verify_s=verify,
            commit_s=commit,
        )
        for observer in self.observers:
            observer.on_round(round_)


def _advance_beams(jobs: Seq[Job], logits: Seq[Tensor]) -> list[Sequence]:
    """Lets the beams among the jobs go on; returns the requests that have ended with it."""
    ended = []
    for job, rows in zip(jobs, logits, strict=True):
        if job.beams is not None:
            advance(job.seq, job.work, rows)
            if job.seq.finished:
                ended.append(job.seq)
    return ended


def _pick(seq: Sequence, tree: TokenTree, logits: Tensor, node: int, depth: int) -> int | None:
    """The target's choice at a node, under every rule for the node's own path.

    A user's logits processor that fails below the root is not asked there: a stop string may end
    the text before, and then plain decoding never asks it. If not, it fails at the next root.
    """
    if seq.rules:
        path = [tree.tokens[i] for i in tree.path(node)[1:]]
        try:
            logits = seq.rules.apply(logits, seq.tokens + path, seq.num_prompt_tokens)
        except Exception:
            if depth == 0 or not seq.params.logits_processors:
                raise
            return None
    return choose(logits, seq.params, seq.seed, len(seq.tokens) + depth)


def _guide(seq: Sequence, tree: TokenTree, budget: int) -> TokenTree:
    """A draft as the request's grammar wants it, if it has one."""
    grammar = seq.rules.grammar
    return grammar.guide(tree, seq.output_ids, budget) if grammar and budget else tree


def _identity(model: Model, pool: BlockPool, config: EngineConfig) -> str:
    """Everything besides tokens that changes KV. What a lossy store gives back is another KV."""
    lossy = f":{config.kv_compression}" if config.kv_compression in LOSSY else ""
    return f"{model.spec.kv_identity}:{pool.block_size}{lossy}"


def _mean_context(seqs: Seq[Sequence]) -> float:
    return sum(len(seq.tokens) for seq in seqs) / max(len(seqs), 1)


def _budget(seq: Sequence, budget: int) -> int:
    """Draft nodes this sequence may propose."""
    if not (seq.params.speculation and _depth(seq)):
        return 0
    own = seq.params.max_tree_nodes
    return budget if own is None else min(budget, own)


def _depth(seq: Sequence) -> int:
    """Draft tokens in a row that are of use; the last token of a text is a bonus token."""
    room = max(seq.max_length - len(seq.tokens) - 1, 0)
    own = seq.params.max_draft_depth
    return room if own is None else min(room, own)
