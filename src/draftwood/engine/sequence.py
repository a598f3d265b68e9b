"""A request while it runs: the only mutable state it has."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter

from draftwood.kv import Lease
from draftwood.sampling import Rules, SamplingParams, TokenLogprobs
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
        num_rounds: target forwards that decoded for it.
        num_draft_tokens: draft nodes verified.
        num_accepted_tokens: draft nodes that were right.
        accepted_per_position: how often the draft at depth 1, 2, ... was accepted.
        arrival_s, first_token_s, finish_s: moments on the monotonic clock.
    """

    num_cached_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    arrival_s: float = field(default_factory=perf_counter)
    first_token_s: float | None = None
    finish_s: float | None = None

    def count_round(self, num_drafted: int, num_accepted: int) -> None:
        """Adds one verified tree."""
        self.num_rounds += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        missing = num_accepted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for depth in range(num_accepted):
            self.accepted_per_position[depth] += 1

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
    the root of the next tree. `lease.length` counts the computed ones.

    Attributes:
        tokens: prompt and output.
        stop_ids: tokens that end the text.
        max_length: most tokens, prompt included.
        rules: what its parameters demand of logits.
        parent: a sequence with the same prompt, whose KV it shares; None for none.
        stop_reason: the stop string or token that ended it, if one did.
        logprobs: of the output tokens, if the parameters ask for them.
        prompt_logprobs: of the prompt's tokens from the second one on, likewise.
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
    parent: Sequence | None = None
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def output_ids(self) -> list[int]:
        """What was generated so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is not computed; 1 while decoding."""
        return len(self.tokens) - self.lease.length

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.status is Status.FINISHED

    def append(self, tokens: Seq[int], logprobs: Seq[TokenLogprobs] = ()) -> int:
        """Takes new tokens up to where a stop rule ends the text; returns how many were taken.

        The one place where end-of-sequence, stop tokens, stop strings and the length act, in this
        order, for each token. It runs before the round's KV is committed.
        """
        for taken, token in enumerate(tokens, start=1):
            self.logprobs.extend(logprobs[taken - 1 : taken])
            self._append_one(token)
            if self.finished:
                return taken
        return len(tokens)

    def finish(self, reason: str, stop: str | int | None = None) -> None:
        """Ends the sequence."""
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop
        self.metrics.finish_s = perf_counter()

    def visible_text(self) -> str:
        """The text so far that can be shown: nothing in it will be taken back."""
        text = self.detokenizer.text
        return text if self.finished else text[: self.detokenizer.num_safe]

    def _append_one(self, token: int) -> None:
        self.tokens.append(token)
        if self.metrics.first_token_s is None:
            self.metrics.first_token_s = perf_counter()
        stopped = self.detokenizer.append(token)
        if len(self.tokens) - self.num_prompt_tokens <= self.params.min_tokens:
            stopped = None
        if token in self.stop_ids:
            self._end("stop", token)
        elif stopped is not None:
            self._end("stop", stopped)
        elif len(self.tokens) >= self.max_length:
            self._end("length", None)

    def _end(self, reason: str, stop: str | int | None) -> None:
        """Ends the text; a stop string in what was held back still counts."""
        late = self.detokenizer.finish() if not isinstance(stop, str) else None
        if late is not None:
            reason, stop = "stop", late
        if isinstance(stop, str):
            self._drop_cut_tokens()
        self.finish(reason, stop)

    def _drop_cut_tokens(self) -> None:
        """Drops tokens all of whose text the stop string took, so that ids and text agree."""
        length = len(self.detokenizer.text)
        kept = sum(offset < length for offset in self.detokenizer.offsets)
        del self.tokens[self.num_prompt_tokens + kept :]
        del self.detokenizer.offsets[kept:]
        del self.logprobs[kept:]
