"""What a request asks for: how tokens are chosen and when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, TypeAlias

from draftwood.errors import ConfigError
from draftwood.sampling.structured import StructuredOutputsParams

LogitsProcessor: TypeAlias = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request, in vLLM's words.

    Attributes:
        max_tokens: the most tokens to generate; None means as many as the context holds.
        temperature: 0 is greedy. Above it the softmax is taken of `logits / temperature`.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; in (0, 1].
        min_p: drop tokens below this share of the most likely one's probability; in [0, 1].
        repetition_penalty: above 1 makes tokens of prompt and output less likely; 1 is neutral.
        presence_penalty: taken from the logit of every token generated before; -2 to 2.
        frequency_penalty: the same, times how often it was generated; -2 to 2.
        logit_bias: token id to a number added to its logit; minus infinity bans it.
        bad_words: strings that must not appear in the output.
        min_tokens: the model's end tokens and `stop_token_ids` are banned until so many are there.
        logits_processors: transformers LogitsProcessors, or functions of `(input_ids, scores)`.
        logprobs: how many of the likeliest tokens to report at each place, besides the chosen one;
            None reports nothing. They are the model's own, before penalties and temperature.
        prompt_logprobs: the same for the prompt's tokens.
        n: how many outputs to generate; they share the prompt's KV. Output i uses seed + i.
        num_beams: above 1 searches for the likeliest text with so many beams, as transformers'
            `generate(num_beams=...)` does, instead of taking the likeliest token each time.
        length_penalty: with beams: a text's log-probability is divided by its length to this
            power; above 0 favours long texts; -10 to 10.
        early_stopping: with beams: True ends as soon as `num_beams` texts have ended; False also
            when no beam is likely to get better; "never" only when none can.
        num_return_sequences: with beams: how many of the best texts to return.
        seed: of the noise. The same model, prompt, parameters and seed give the same text.
            None draws a fresh seed for each request, shown in its output.
        stop: generation ends before the first of these strings.
        include_stop_str_in_output: end behind the stop string instead.
        stop_token_ids: generation ends at the first of these tokens, besides the model's own.
        ignore_eos: go on past the model's end-of-sequence tokens.
        speculation: False decodes this request plainly.
        max_tree_nodes: upper bound on draft nodes a round for this request; None leaves it to
            the engine.
        max_draft_depth: the same for draft tokens in a row: how deep trees are.
        skip_special_tokens: leave special tokens out of the text.
        cache_salt: requests reuse each other's KV only where this is equal: give each tenant one,
            and nobody can learn from response times what others have asked.
        structured: the form the text must have, or a mapping of its fields: a JSON schema, a
            regular expression, a choice or a grammar. The text ends where it is complete.
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    logits_processors: tuple[LogitsProcessor, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    speculation: bool = True
    max_tree_nodes: int | None = None
    max_draft_depth: int | None = None
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    structured: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._bring_into_form()
        self._check_types()
        if self.structured is not None:
            object.__setattr__(self, "structured", StructuredOutputsParams.of(self.structured))
            _require(
                not self.ignore_eos,
                "ignore_eos",
                True,
                "False with structured, which says where the text may end",
            )
        self._check_counts()
        self._check_probabilities()
        self._check_penalties()
        self._check_beams()
        _require(
            self.seed is None or 0 <= self.seed < 2**64, "seed", self.seed, "from 0 to 2**64 - 1"
        )

    def _bring_into_form(self) -> None:
        """Sequences become tuples, one string one word; token ids may be the strings of JSON."""
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            object.__setattr__(self, name, _tuple(name, (value,) if _is_text(value) else value))
        for name in ("stop_token_ids", "logits_processors"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        if self.logit_bias is not None:
            _require(
                isinstance(self.logit_bias, Mapping),
                "logit_bias",
                self.logit_bias,
                "a mapping from token ids to numbers",
            )
            bias = {_token_id(token): value for token, value in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", bias)

    def _check_types(self) -> None:
        """What is of a wrong type would stop the round of all requests later on."""
        for f in fields(self):
            check, rule = _TYPES.get(f.name, (None, ""))
            value = getattr(self, f.name)
            optional = f.default is None or f.name == "max_tokens"
            if check is not None and not (value is None and optional):
                _require(check(value), f.name, value, rule)
        for name, check, rule in (
            ("stop", _is_word, "non-empty strings"),
            ("bad_words", _is_word, "non-empty strings"),
            ("stop_token_ids", _is_integer, "token ids"),
            ("logits_processors", callable, "functions of (input_ids, scores)"),
        ):
            _require(all(map(check, getattr(self, name))), name, getattr(self, name), rule)

    def _check_counts(self) -> None:
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "at least 1, or None for as many as the context holds",
        )
        limit = self.max_tokens
        _require(
            self.min_tokens >= 0 and (limit is None or self.min_tokens <= limit),
            "min_tokens",
            self.min_tokens,
            "from 0 to max_tokens",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= 100, name, value, "from 0 to 100")
        _require(self.n >= 1, "n", self.n, "at least 1")
        _require(self.top_k >= -1, "top_k", self.top_k, "at least 1, or 0 to keep every token")
        for name in ("max_tree_nodes", "max_draft_depth"):
            value = getattr(self, name)
            _require(value is None or value >= 0, name, value, "at least 0")

    def _check_penalties(self) -> None:
        penalty = self.repetition_penalty
        _require(
            math.isfinite(penalty) and penalty > 0,
            "repetition_penalty",
            penalty,
            "a finite number above 0",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, name, value, "from -2 to 2")
        for token, bias in (self.logit_bias or {}).items():
            _require(_is_integer(token) and token >= 0, "logit_bias", token, "keyed by token ids")
            _require(
                _is_number(bias) and bias < math.inf,
                "logit_bias",
                bias,
                "made of numbers below infinity",
            )

    def _check_beams(self) -> None:
        _require(self.num_beams >= 1, "num_beams", self.num_beams, "at least 1")
        _require(
            -10 <= self.length_penalty <= 10,
            "length_penalty",
            self.length_penalty,
            "from -10 to 10",
        )
        known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        _require(known, "early_stopping", self.early_stopping, "True, False or 'never'")
        _require(
            1 <= self.num_return_sequences <= self.num_beams,
            "num_return_sequences",
            self.num_return_sequences,
            "from 1 to num_beams",
        )
        if self.num_beams > 1:
            self._refuse_with_beams()

    def _refuse_with_beams(self) -> None:
        """Beams compare whole texts: what picks or reports single tokens has no meaning there."""
        for name, neutral, advice in (
            ("temperature", 0.0, "beams do not sample: set temperature to 0"),
            ("n", 1, "use num_return_sequences for several texts"),
            ("stop", (), "beams end at tokens: use stop_token_ids"),
            ("logprobs", None, "a beam's output has a score instead: leave logprobs out"),
            ("prompt_logprobs", None, "ask for them in a request without beams"),
            ("structured", None, "a form is for requests without beams"),
        ):
            value = getattr(self, name)
            if value != neutral:
                raise ConfigError(
                    f"num_beams is {self.num_beams} and {name} is {value!r}: {advice}"
                )

    def _check_probabilities(self) -> None:
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "a finite number of at least 0",
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def but(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Builds parameters from a mapping; unknown keys are an error."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"unknown sampling parameter {unknown[0]!r}: known are {', '.join(sorted(known))}"
            )
        return cls(**values)


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__")


def _is_number(value: object) -> bool:
    return isinstance(value, Real)


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError as error:
        raise ConfigError(f"{name} is {value!r}: it must be a sequence") from error


def _token_id(token: object) -> object:
    return int(token) if isinstance(token, str) and token.isdecimal() else token


def _types(names: str, check: Callable[[object], bool], rule: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), (check, rule))


_TYPES = {
    **_types(
        "max_tokens top_k min_tokens logprobs prompt_logprobs n num_beams num_return_sequences "
        "seed max_tree_nodes max_draft_depth",
        _is_integer,
        "an integer",
    ),
    **_types(
        "temperature top_p min_p repetition_penalty presence_penalty frequency_penalty "
        "length_penalty",
        _is_number,
        "a number",
    ),
    **_types(
        "include_stop_str_in_output ignore_eos speculation skip_special_tokens",
        _is_switch,
        "True or False",
    ),
    **_types("cache_salt", _is_text, "a string"),
}


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}: it must be {rule}")
