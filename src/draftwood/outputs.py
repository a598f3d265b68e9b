"""What a request gives: whole, or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None


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
