"""What a request asks for: how tokens are chosen and when to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from draftwood.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request, in vLLM's words.

    Attributes:
        max_tokens: the most tokens to generate; None means as many as the context holds.
        temperature: 0 is greedy. Above it the softmax is taken of `logits / temperature`.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; in (0, 1].
        min_p: drop tokens below this share of the most likely one's probability; in [0, 1].
        seed: of the noise. The same model, prompt, parameters and seed give the same text.
            None draws a fresh seed for each request, shown in its output.
        stop: generation ends before the first of these strings.
        stop_token_ids: generation ends at the first of these tokens, besides the model's own.
        ignore_eos: go on past the model's end-of-sequence tokens.
        speculation: False decodes this request plainly.
        max_tree_nodes: upper bound on draft nodes a round for this request; None leaves it to
            the engine.
        skip_special_tokens: leave special tokens out of the text.
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    speculation: bool = True
    max_tree_nodes: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_counts()
        self._check_probabilities()
        _require(all(self.stop), "stop", self.stop, "non-empty strings")
        _require(
            self.seed is None or 0 <= self.seed < 2**64, "seed", self.seed, "from 0 to 2**64 - 1"
        )

    def _check_counts(self) -> None:
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "at least 1 (leave it out for as many as the context holds)",
        )
        _require(self.top_k >= -1, "top_k", self.top_k, "at least 1, or 0 to keep every token")
        _require(
            self.max_tree_nodes is None or self.max_tree_nodes >= 0,
            "max_tree_nodes",
            self.max_tree_nodes,
            "at least 0",
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


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}: it must be {rule}")
