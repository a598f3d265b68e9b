"""Grammars compiled by llguidance, the optional package of structured output.

It knows the vocabulary as a trie and walks it with the grammar's parser, which gives the legal
tokens at a place in about a tenth of a millisecond.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import ConfigError, MissingExtraError, first_line
from draftwood.sampling import StructuredOutputsParams
from draftwood.sampling.grammar import GrammarFailureError, Matcher
from draftwood.text import Tokenizer

_MAX_GRAMMARS = 64


class GrammarCompiler:
    """Compiles what requests describe, each description once.

    Args:
        tokenizer: of the target; a fast one.
        vocab_size: width of the target's logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[StructuredOutputsParams, LLGuidanceMatcher] = OrderedDict()

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        """A matcher at the beginning of what `params` describes.

        Raises:
            ConfigError: the description is wrong, or the tokenizer cannot be used.
            MissingExtraError: llguidance is not installed.
        """
        if params not in self._compiled:
            self._compiled[params] = self._compile(params)
        self._compiled.move_to_end(params)
        if len(self._compiled) > _MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        return self._compiled[params].fresh()

    def _compile(self, params: StructuredOutputsParams) -> LLGuidanceMatcher:
        vocabulary = self._vocabulary
        try:
            inner = _llguidance().LLMatcher(vocabulary, _source(params), log_level=0)
            matcher = LLGuidanceMatcher(inner, self._end_id, self._vocab_size)
            matcher.legal()
        except (ValueError, GrammarFailureError) as error:
            raise ConfigError(f"structured {_kind(params)} cannot be used: {error}") from error
        return matcher

    @property
    def _end_id(self) -> int:
        """The token that ends a text to which nothing can be added."""
        own = self._tokenizer.backend.eos_token_id
        ends = self._tokenizer.eos_token_ids
        return int(own) if own in ends else min(ends)

    @cached_property
    def _vocabulary(self) -> Any:
        package, backend = _llguidance(), self._tokenizer.backend
        if not getattr(backend, "is_fast", False):
            raise ConfigError(
                f"structured output needs a fast tokenizer (tokenizer.json): "
                f"{type(backend).__name__} is none"
            )
        if not self._tokenizer.eos_token_ids:
            raise ConfigError(
                "structured output needs an end-of-sequence token: this model's tokenizer has none"
            )
        try:
            return package.hf.from_tokenizer(
                backend,
                n_vocab=max(self._vocab_size, len(self._tokenizer)),
                eos_token=sorted(self._tokenizer.eos_token_ids, key=lambda i: i != self._end_id),
            )
        except (ValueError, RuntimeError, TypeError) as error:
            raise ConfigError(
                f"llguidance cannot use this model's tokenizer ({first_line(error)})"
            ) from error


class LLGuidanceMatcher:
    """A matcher of llguidance behind the protocol `Matcher`.

    Args:
        inner: an LLMatcher.
        end_id: what follows a text to which nothing can be added.
        vocab_size: how many booleans `legal` gives.
    """

    def __init__(self, inner: Any, end_id: int, vocab_size: int) -> None:
        self._inner = inner
        self._end_id = end_id
        self._vocab_size = vocab_size

    def fresh(self) -> LLGuidanceMatcher:
        """Another matcher of the same grammar, at its beginning; microseconds."""
        inner = self._inner.deep_copy()
        inner.reset()
        return LLGuidanceMatcher(inner, self._end_id, self._vocab_size)

    def consume(self, token: int) -> bool:
        """Moves on by a token, or says False and stays."""
        consumed: int = self._inner.try_consume_tokens([token])
        self._check()
        return consumed == 1

    def rollback(self, num_tokens: int) -> None:
        """Moves back by so many tokens."""
        self._inner.rollback(num_tokens)
        self._check()

    def legal(self) -> NDArray[np.bool_]:
        """[vocab_size] booleans. Of several end tokens a complete text is followed by one only."""
        self._check()
        bits = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint8)
        self._check()
        if self._inner.is_stopped():
            legal = np.zeros(self._vocab_size, np.bool_)
            legal[self._end_id] = True
            return legal
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def sole(self) -> int | None:
        """The one token with which the forced text goes on; None where there is none."""
        tokens: list[int] = self._inner.compute_ff_tokens()
        self._check()
        return tokens[0] if tokens and tokens[0] < self._vocab_size else None

    def _check(self) -> None:
        if self._inner.is_error():
            raise GrammarFailureError(_reason(self._inner))


def _llguidance() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise MissingExtraError("llguidance", "grammar") from error
    return llguidance


def _kind(params: StructuredOutputsParams) -> str:
    kinds = ("regex", "choice", "grammar")
    return next((kind for kind in kinds if getattr(params, kind) is not None), "json")


def _source(params: StructuredOutputsParams) -> str:
    """The description in llguidance's own format."""
    maker = _llguidance().LLMatcher
    if params.schema is not None:
        options: dict[str, Any] = {}
        if params.disable_any_whitespace:
            options["whitespace_flexible"] = False
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        return str(maker.grammar_from_json_schema(params.schema, overrides=options))
    if params.regex is not None:
        return str(maker.grammar_from_regex(params.regex))
    if params.choice is not None:
        texts = (json.dumps(text, ensure_ascii=False) for text in params.choice)
        return str(maker.grammar_from_lark("start: " + " | ".join(texts)))
    return str(maker.grammar_from_lark(params.grammar))


def _reason(inner: Any) -> str:
    """llguidance's error as one line; it adds the grammar and its own state below."""
    text = str(inner.get_error())
    if "NoExtensionBias" in text:
        return "it comes to where nothing may follow"
    first = text.strip().splitlines()[0].removesuffix("regex parse error:").rstrip(" :")
    detail = re.search(r"^error: (.+)$", text, re.MULTILINE)
    return f"{first}: {detail[1]}" if detail and first else detail[1] if detail else first
