"""A request while it runs: the only mutable state it has."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter

from draftwood.engine.beam import Beams
from draftwood.kv import Lease
from draftwood.kv.tiers import Fetch
from draftwood.sampling import Rules, SamplingParams, TokenLogprobs
from draftwood.sampling.beam import Hypothesis
from draftwood.text import Detokenizer


class Status(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class RequestMetrics:
    """Counts and times of one request.

    Attributes:
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        cached_by_tier: the same by where it came from: "ram", "disk", "redis".
        num_rounds: target forwards that decoded for it.
        num_draft_tokens: draft nodes verified.
        num_accepted_tokens: draft nodes that were right.
        num_forced_tokens: tokens that a grammar left no choice about; nobody had to choose them.
        num_resumed_tokens: output tokens that came from a checkpoint.
        accepted_per_position: how often the draft at depth 1, 2, ... was accepted.
        arrival_s, start_s, first_token_s, finish_s: moments on the monotonic clock; it starts
            when it is first admitted.
    """

    num_cached_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_forced_tokens: int = 0
    num_resumed_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    arrival_s: float = field(default_factory=perf_counter)
    start_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None

    def count_cached(self, num_tokens: int, restored: dict[str, int]) -> None:
        """Notes what was cached when the request began; `restored` is what was not in RAM."""
        self.num_cached_tokens = num_tokens
        left = num_tokens
        for tier in reversed(restored):  # the last tier asked had the end of the chain
            part = min(restored[tier], left)
            left -= part
            self.cached_by_tier[tier] = part
        self.cached_by_tier["ram"] = left

    def count_round(self, num_drafted: int) -> None:
        """Adds one verified tree."""
        self.num_rounds += 1
        self.num_draft_tokens += num_drafted

    def count_accepted(self, depth: int, count: int = 1) -> None:
        """Adds an accepted node at `depth`, or takes one back with a count of -1."""
        self.num_accepted_tokens += count
        missing = depth - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        self.accepted_per_position[depth - 1] += count

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round, the bonus token included; 1 is plain decoding."""
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Share of draft nodes that were right; the bonus token is not counted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the end."""
        if self.first_token_s is None or self.finish_s is None:
            return 0.0
        return self.finish_s - self.first_token_s


@dataclass(slots=True)
class Sequence:
    """One request: its tokens, how far they are computed, and when it ends.

    While it decodes exactly one token is pending: the last one, whose KV is not computed yet. It is
    the root of the next tree. `lease.length` counts the computed ones. Only tokens that a grammar
    forced may be pending before it. While beams search, `tokens` holds what all of them share.

    Attributes:
        tokens: prompt and output.
        stop_ids: tokens that end the text.
        max_length: most tokens, prompt included.
        rules: what its parameters demand of logits.
        priority: lower goes first, and takes the place of higher ones. It changes no text.
        fetch: reads what disk or Redis has of its tokens; None before it began.
        parent: a sequence with the same prompt, whose KV it shares; None for none.
        stop_reason: the stop string or token that ended it, if one did.
        logprobs: of the output tokens, if the parameters ask for them.
        prompt_logprobs: of the prompt's tokens from the second one on, likewise.
        beams: the live beams, until their search ends; None without.
        score: of the text that a beam search found.
        others: its further outputs, which never run themselves.
        num_forced: how many of the last tokens a grammar forced after the last walk.
    """

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_length: int
    detokenizer: Detokenizer
    lease: Lease
    rules: Rules
    priority: int = 0
    parent: Sequence | None = None
    fetch: Fetch | None = None
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    beams: Beams | None = None
    score: float | None = None
    others: list[Sequence] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_forced: int = 0
    _depths: list[int] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        """What was generated so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is not computed; 1 while decoding, and with beams those of all."""
        missing = len(self.tokens) - self.lease.length
        return missing - 1 + self.beams.num_missing if self.beams else missing

    @property
    def decodes(self) -> bool:
        """Whether its next forward can verify a tree, or the leaves of its beams.

        It has nothing else to catch up with but tokens that a grammar forced.
        """
        if self.beams is not None:
            return self.num_missing == self.beams.num_leaves
        return self.num_missing <= 1 + self.num_forced

    @property
    def depths(self) -> Seq[int]:
        """Where in its draft each output token was; 0 for one that was not drafted."""
        return tuple(self._depths)

    @property
    def cache_salt(self) -> bytes:
        """Separates tenants in every cache of KV."""
        return (self.params.cache_salt or "").encode()

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.status is Status.FINISHED

    def append(
        self, tokens: Seq[int], num_accepted: int = 0, logprobs: Seq[TokenLogprobs] = ()
    ) -> int:
        """Takes new tokens up to where a stop rule ends the text; returns how many were taken.

        The one place where end-of-sequence, stop tokens, stop strings and the length act, in this
        order, for each token. It runs before the round's KV is committed.

        Args:
            tokens: what the walk yielded.
            num_accepted: how many of the first ones were draft nodes.
            logprobs: one per token, if the request wants them.
        """
        for taken, token in enumerate(tokens, start=1):
            depth = taken if taken <= num_accepted else 0
            self._append_one(token, depth, logprobs[taken - 1 : taken])
            if self.finished:
                return taken
        return len(tokens)

    def force(self) -> None:
        """Appends the tokens about which the grammar leaves no choice, if there is a grammar.

        They need no forward of their own: their KV is computed with the next one. Where
        log-probabilities are wanted they do. A text that the grammar could not end is aborted.
        """
        self.num_forced = 0
        grammar = self.rules.grammar
        if grammar is None:
            return
        while not self.finished and self.params.logprobs is None:
            token = grammar.forced(self.output_ids)
            if token is None:
                break
            self.append([token])
            self.num_forced += 1
            self.metrics.num_forced_tokens += 1
        if grammar.has_failed(len(self.output_ids)):
            self.finish("abort")

    def restore(
        self,
        output: Seq[int],
        depths: Seq[int],
        logprobs: Seq[TokenLogprobs] = (),
        prompt_logprobs: Seq[TokenLogprobs] = (),
    ) -> None:
        """Takes the output that this request had in an earlier process; no stop rule acts on it.

        It must be fresh. All but the last token is computed or found in a cache when it runs.
        """
        assert not self.output_ids, "only a fresh sequence can be restored"
        self.tokens.extend(output)
        self._depths.extend(depths)
        self.logprobs.extend(logprobs)
        self.prompt_logprobs.extend(prompt_logprobs)
        for token in output:
            self.detokenizer.append(token, may_stop=False)

    def finish(self, reason: str, stop: str | int | None = None) -> None:
        """Ends the sequence; beams that have not come to an end leave nothing behind."""
        if self.beams is not None:
            self.beams = None
            self.others.clear()
            del self.tokens[self.num_prompt_tokens :]
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop
        self.metrics.finish_s = perf_counter()

    def settle(self, found: Seq[Hypothesis]) -> None:
        """Ends a beam search: the best text becomes this sequence's output, the next its others'.

        Args:
            found: best first; with fewer texts than others there are fewer others.
        """
        self.beams = None
        del self.tokens[self.num_prompt_tokens :]
        del self.others[len(found) - 1 :]
        for seq, one in zip([self, *self.others], found, strict=True):
            seq.score = one.score
            seq.append(one.tokens)
            if not seq.finished:  # the rules left no text at all
                seq.finish("length")

    def visible_text(self) -> str:
        """The text so far that can be shown: nothing in it will be taken back."""
        text = self.detokenizer.text
        return text if self.finished else text[: self.detokenizer.num_safe]

    @property
    def num_visible(self) -> int:
        """Output tokens whose text can be shown; those behind may still be taken back."""
        if self.finished:
            return len(self.tokens) - self.num_prompt_tokens
        return bisect_left(self.detokenizer.offsets, self.detokenizer.num_safe)

    def _append_one(self, token: int, depth: int, logprobs: Seq[TokenLogprobs]) -> None:
        self.tokens.append(token)
        self.logprobs.extend(logprobs)
        self._depths.append(depth)
        if depth:
            self.metrics.count_accepted(depth)
        if self.metrics.first_token_s is None:
            self.metrics.first_token_s = perf_counter()
        ends = token in self.stop_ids
        stopped = self.detokenizer.append(token, may_stop=not ends and self._may_stop())
        if ends:
            self._end("stop", token)
        elif stopped is not None:
            self._end("stop", stopped)
        elif len(self.tokens) >= self.max_length:
            self._end("length", None)

    def _may_stop(self) -> bool:
        return len(self.tokens) - self.num_prompt_tokens > self.params.min_tokens

    def _end(self, reason: str, stop: str | int | None) -> None:
        """Ends the text; a stop string in what was held back counts where the length ended it."""
        late = self.detokenizer.finish(may_stop=stop is None and self._may_stop())
        if late is not None:
            reason, stop = "stop", late
        if isinstance(stop, str):
            self._drop_cut_tokens()
        self.finish(reason, stop)

    def _drop_cut_tokens(self) -> None:
        """Drops tokens all of whose text the stop string took, so that ids and text agree."""
        length = len(self.detokenizer.text)
        kept = bisect_left(self.detokenizer.offsets, length)
        for depth in filter(None, self._depths[kept:]):
            self.metrics.count_accepted(depth, -1)
        del self.tokens[self.num_prompt_tokens + kept :]
        del self.detokenizer.offsets[kept:]
        del self.logprobs[kept:]
        del self._depths[kept:]
