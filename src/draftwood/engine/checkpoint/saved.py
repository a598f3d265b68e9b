"""What one request needs to go on in another process.

The noise is a function of (seed, position, token) and a grammar's state one of the path, so there
is nothing to save of either: a request goes on when it is queued with its output already there. Its
KV is in the cache tiers, or is computed again.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from draftwood.engine.sequence import RequestMetrics, Sequence
from draftwood.sampling import SamplingParams, StructuredOutputsParams, TokenLogprobs

_DEFAULTS = {f.name: f.default for f in fields(SamplingParams)}
_MOMENTS = ("arrival_s", "first_token_s", "finish_s")
_CACHED = ("num_cached_tokens", "cached_by_tier")


@dataclass(frozen=True, slots=True)
class Offset:
    """How much of an output somebody has: tokens, and characters of the text."""

    num_tokens: int = 0
    num_chars: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended; its fields are those of the sequence.

    Attributes:
        others: further outputs of a beam search.
    """

    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    score: float | None
    others: tuple[SavedRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedRequest:
    """A request between two rounds. Its fields are those of the sequence, copied.

    Attributes:
        tokens: prompt and output; of a beam search that has not ended the prompt alone, for it
            begins anew.
        parent: id of the request with the same prompt whose KV it shares; None for none.
        depths: where in its draft each output token was; 0 for one that was not drafted.
        counters: of the metrics, all but moments.
        delivered: what its reader had when this was saved.
        ending: None while it runs.
    """

    request_id: str
    tokens: array[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_length: int
    parent: str | None = None
    depths: array[int] = field(default_factory=lambda: array("i"))
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    counters: Mapping[str, Any] = field(default_factory=dict)
    delivered: Offset = Offset()
    ending: Ending | None = None

    @classmethod
    def of(cls, seq: Sequence, delivered: Offset | None = None) -> SavedRequest:
        """A copy of a sequence, made between two rounds."""
        searching = seq.beams is not None
        end = seq.num_prompt_tokens if searching else None
        metrics = asdict(seq.metrics)
        return cls(
            request_id=seq.request_id,
            tokens=array("i", seq.tokens[:end]),
            num_prompt_tokens=seq.num_prompt_tokens,
            params=seq.params,
            seed=seq.seed,
            max_length=seq.max_length,
            parent=seq.parent.request_id if seq.parent is not None else None,
            depths=array("i", seq.depths),
            logprobs=tuple(seq.logprobs),
            prompt_logprobs=tuple(seq.prompt_logprobs),
            counters={} if searching else {k: metrics[k] for k in metrics if k not in _MOMENTS},
            delivered=delivered or Offset(),
            ending=_ending_of(seq) if seq.finished else None,
        )

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""
        return self.tokens[: self.num_prompt_tokens].tolist()

    @property
    def own_params(self) -> SamplingParams:
        """The parameters, with the length that was found when the request came."""
        return self.params.but(max_tokens=self.max_length - self.num_prompt_tokens)

    def restore(self, seq: Sequence) -> None:
        """Brings a fresh sequence of this request to where this one was."""
        seq.params, seq.seed = self.params, self.seed
        output = self.tokens[self.num_prompt_tokens :].tolist()
        seq.restore(output, self.depths.tolist(), self.logprobs, self._read_prompt_logprobs)
        counters = dict(self.counters)
        if self.ending is None:
            for name in _CACHED:  # what this process finds in its caches is counted anew
                counters.pop(name, None)
        seq.metrics = RequestMetrics(**counters | {"num_resumed_tokens": len(output)})
        if self.ending is not None:
            self._end(seq, self.ending)

    @property
    def _read_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """All of them or none: those of half a prompt are read again."""
        complete = len(self.prompt_logprobs) >= self.num_prompt_tokens - 1
        return self.prompt_logprobs if complete else ()

    def _end(self, seq: Sequence, ending: Ending) -> None:
        seq.beams = None
        del seq.others[len(ending.others) :]
        for saved, other in zip(ending.others, seq.others, strict=True):
            saved.restore(other)
        seq.detokenizer.text = ending.text
        seq.score = ending.score
        seq.finish(ending.finish_reason or "abort", ending.stop_reason)

    def to_json(self) -> dict[str, Any]:
        """As values that JSON knows."""
        record: dict[str, Any] = {
            "id": self.request_id,
            "tokens": _packed(self.tokens),
            "num_prompt_tokens": self.num_prompt_tokens,
            "params": _params_json(self.params),
            "seed": self.seed,
            "max_length": self.max_length,
            "parent": self.parent,
            "depths": _packed(self.depths),
            "counters": dict(self.counters),
            "delivered": [self.delivered.num_tokens, self.delivered.num_chars],
        }
        for name in ("logprobs", "prompt_logprobs"):
            if values := getattr(self, name):
                record[name] = [[one.token, one.logprob, one.rank, one.top] for one in values]
        if self.ending is not None:
            end = self.ending
            values = [end.text, end.finish_reason, end.stop_reason, end.score]
            record["ending"] = [*values, [other.to_json() for other in end.others]]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> SavedRequest:
        """The request that `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        return cls(
            request_id=str(record["id"]),
            tokens=_unpacked(record["tokens"]),
            num_prompt_tokens=int(record["num_prompt_tokens"]),
            params=_params_of(record["params"]),
            seed=int(record["seed"]),
            max_length=int(record["max_length"]),
            parent=record["parent"],
            depths=_unpacked(record["depths"]),
            logprobs=_logprobs(record.get("logprobs", ())),
            prompt_logprobs=_logprobs(record.get("prompt_logprobs", ())),
            counters=record["counters"],
            delivered=Offset(*record["delivered"]),
            ending=_ending_from(record.get("ending")),
        )


def can_be_saved(params: SamplingParams) -> bool:
    """Whether a request is data alone: functions of its user cannot be written down."""
    return not params.logits_processors


def _ending_of(seq: Sequence) -> Ending:
    others = tuple(SavedRequest.of(other) for other in seq.others)
    return Ending(seq.detokenizer.text, seq.finish_reason, seq.stop_reason, seq.score, others)


def _ending_from(values: Any) -> Ending | None:
    if values is None:
        return None
    text, finish_reason, stop_reason, score, others = values
    saved = tuple(SavedRequest.from_json(other) for other in others)
    return Ending(text, finish_reason, stop_reason, score, saved)


def _params_json(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not the default."""
    given = {name: getattr(params, name) for name in _DEFAULTS}
    values = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
    if params.logit_bias is not None:
        values["logit_bias"] = list(params.logit_bias.items())
    if params.structured is not None:
        values["structured"] = asdict(StructuredOutputsParams.of(params.structured))
    return values


def _params_of(values: Mapping[str, Any]) -> SamplingParams:
    bias = values.get("logit_bias")
    more = {} if bias is None else {"logit_bias": {int(k): float(v) for k, v in bias}}
    return SamplingParams.from_dict({**values, **more})


def _packed(numbers: array[int]) -> str:
    return b64encode(numbers.tobytes()).decode("ascii")


def _unpacked(text: str) -> array[int]:
    numbers = array("i")
    numbers.frombytes(b64decode(text, validate=True))
    return numbers


def _logprobs(values: Any) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(token, logprob, rank, tuple((t, p) for t, p in top))
        for token, logprob, rank, top in values
    )
