"""From a prompt and parameters to a sequence the engine can run, or a clear refusal."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from draftwood.engine.sequence import Sequence
from draftwood.errors import ConfigError, PromptError
from draftwood.kv import BlockPool, Lease, PrefixIndex
from draftwood.sampling import Rules, SamplingParams, StructuredOutputsParams, make_rules
from draftwood.sampling.grammar import Compiler, Grammar
from draftwood.text import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Admission:
    """Checks requests and turns them into sequences.

    Attributes:
        tokenizer: of the target.
        vocab_size: width of the target's logits.
        max_length: the longest sequence that fits the model's positions and the KV pool.
        pool, prefix: where KV will be held.
        grammars: compiles the grammars of structured output; None refuses them.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_length: int
    pool: BlockPool
    prefix: PrefixIndex
    grammars: Compiler | None = None

    def make(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        request_id: str,
        parent: Sequence | None = None,
    ) -> Sequence:
        """A waiting sequence; `parent` is one with the same prompt whose KV it may share.

        Raises:
            PromptError: the prompt is empty, holds ids the model does not know, or leaves no room.
            ConfigError: the parameters do not fit the prompt or the vocabulary.
        """
        self._check_prompt(prompt_ids)
        length = self._length(len(prompt_ids), params)
        eos = frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids
        detokenizer = Detokenizer(
            self.tokenizer,
            prompt_ids,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
        )
        return Sequence(
            request_id=request_id,
            tokens=list(prompt_ids),
            num_prompt_tokens=len(prompt_ids),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            stop_ids=eos | frozenset(params.stop_token_ids),
            max_length=length,
            detokenizer=detokenizer,
            lease=Lease(self.pool, self.prefix),
            rules=self._rules(params),
            parent=parent,
        )

    def _rules(self, params: SamplingParams) -> Rules:
        for token in params.logit_bias or ():
            self._check_id(token, "logit_bias")
        for token in params.stop_token_ids:
            self._check_id(token, "stop_token_ids")
        end_ids = self.tokenizer.eos_token_ids | set(params.stop_token_ids)
        spellings = self._spellings(params.bad_words)
        return make_rules(params, sorted(end_ids), spellings, self._grammar(params))

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.structured is None:
            return None
        if self.grammars is None:
            raise ConfigError("structured is given, but this engine was made without a compiler")
        matcher = self.grammars.matcher(StructuredOutputsParams.of(params.structured))
        return Grammar(matcher, self.tokenizer.eos_token_ids, self.vocab_size)

    def _spellings(self, words: Seq[str]) -> list[list[int]]:
        """Token ids of each word, as a text may begin with it and as it stands after a space."""
        spellings = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in spellings:
                    spellings.append(ids)
        return spellings

    def _check_id(self, token: int, name: str) -> None:
        if not 0 <= token < self.vocab_size:
            raise ConfigError(
                f"{name} names token id {token}: the vocabulary has {self.vocab_size} ids"
            )

    def _check_prompt(self, prompt_ids: Seq[int]) -> None:
        if not prompt_ids:
            raise PromptError("the prompt is empty: give at least one token")
        for token in prompt_ids:
            if not 0 <= token < self.vocab_size:
                raise PromptError(
                    f"token id {token} does not exist: the vocabulary has {self.vocab_size} ids"
                )

    def _length(self, num_prompt: int, params: SamplingParams) -> int:
        """The most tokens the sequence may have, prompt included."""
        limit = self.max_length
        if num_prompt >= limit:
            raise PromptError(
                f"the prompt has {num_prompt} tokens, and the context holds {limit} with at least "
                "one to generate: shorten it"
            )
        if params.max_tokens is None:
            return limit
        if num_prompt + params.max_tokens > limit:
            raise ConfigError(
                f"max_tokens is {params.max_tokens}: after a prompt of {num_prompt} tokens the "
                f"context of {limit} has room for {limit - num_prompt}"
            )
        return num_prompt + params.max_tokens
