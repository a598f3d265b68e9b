"""What a request gives: whole, or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwood.engine.checkpoint import Offset
from draftwood.engine.sequence import RequestMetrics
from draftwood.engine.sequence import Sequence as EngineSequence
from draftwood.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a request gave.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        text: what was generated.
        token_ids: its tokens, the end token included.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the stop string or token id that ended it, if one did.
        seed: of the noise; with the same one the text comes out again.
        metrics: counts and times.
        logprobs: one per token, if asked for.
        prompt_logprobs: one per prompt token, None for the first, if asked for.
        alternatives: the other outputs, when `n` or `num_return_sequences` is above 1.
        score: with `num_beams` above 1: the text's log-probability (after penalties) divided by its
            length to the power `length_penalty`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    seed: int
    metrics: RequestMetrics
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    alternatives: tuple[RequestOutput, ...] = ()
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a stream.

    Attributes:
        text: what is new.
        token_ids: what is new; their text may still be held back.
        output: the whole, in the last piece only.
        request_id: whose piece it is.
        start: how many tokens and characters of the output lie before it.
    """

    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None
    request_id: str = ""
    start: Offset = field(default_factory=Offset)

    @property
    def end(self) -> Offset:
        """How much of the output its reader has with it."""
        return Offset(
            self.start.num_tokens + len(self.token_ids), self.start.num_chars + len(self.text)
        )


def make_output(seq: EngineSequence, others: Sequence[EngineSequence] = ()) -> RequestOutput:
    """The output of a sequence as it stands; `others` come of the same prompt."""
    wants, prompt_wants = seq.params.logprobs, seq.params.prompt_logprobs
    return RequestOutput(
        request_id=seq.request_id,
        prompt_token_ids=tuple(seq.tokens[: seq.num_prompt_tokens]),
        text=seq.visible_text(),
        token_ids=tuple(seq.output_ids),
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        seed=seq.seed,
        metrics=seq.metrics,
        logprobs=None if wants is None else tuple(seq.logprobs),
        prompt_logprobs=None if prompt_wants is None else (None, *seq.prompt_logprobs),
        alternatives=tuple(make_output(other) for other in (*others, *seq.others)),
        score=seq.score,
    )


def make_delta(seq: EngineSequence, have: Offset) -> Delta | None:
    """What a reader who has so much of a sequence gets next; None where there is nothing new."""
    text, ids = seq.visible_text(), seq.output_ids[: seq.num_visible]
    if not (len(text) > have.num_chars or len(ids) > have.num_tokens or seq.finished):
        return None
    output = make_output(seq) if seq.finished else None
    return Delta(
        text[have.num_chars :], tuple(ids[have.num_tokens :]), output, seq.request_id, have
    )
