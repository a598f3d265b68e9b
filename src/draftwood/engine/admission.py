"""From a prompt and parameters to a sequence the engine can run, or a clear refusal."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from draftwood.engine.beam import Beams
from draftwood.engine.sequence import Sequence
from draftwood.errors import ConfigError, PromptError
from draftwood.kv import BlockPool, Lease, PrefixIndex
from draftwood.sampling import Rules, SamplingParams, StructuredOutputsParams, make_rules
from draftwood.sampling.beam import BeamSearch
from draftwood.sampling.grammar import Compiler, Grammar
from draftwood.text import Detokenizer, Tokenizer
from draftwood.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Admission:
    """Checks requests and turns them into sequences.

    Attributes:
        tokenizer: of the target.
        vocab_size: width of the target's logits.
        max_length: the longest sequence that fits the model's positions and the KV pool.
        pool, prefix: where KV will be held.
        max_rows: most rows of one forward.
        grammars: compiles the grammars of structured output; None refuses them.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_length: int
    pool: BlockPool
    prefix: PrefixIndex
    max_rows: int
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
            ConfigError: the parameters do not fit the prompt, the vocabulary or the engine.
        """
        self._check_prompt(prompt_ids)
        seq = self._sequence(prompt_ids, params, request_id, parent)
        if params.num_beams > 1:
            max_tokens = seq.max_length - len(prompt_ids)
            search = BeamSearch(params, seq.stop_ids, max_tokens)
            seq.beams = Beams(search, TokenTree.root(prompt_ids[-1]))
            seq.others = [
                self._sequence(prompt_ids, params, f"{request_id}-{i}", None)
                for i in range(1, params.num_return_sequences)
            ]
        return seq

    def _sequence(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        request_id: str,
        parent: Sequence | None,
    ) -> Sequence:
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
            if not hasattr(token, "__index__"):
                raise PromptError(f"the prompt holds {token!r}: token ids are integers")
            if not 0 <= token < self.vocab_size:
                raise PromptError(
                    f"token id {token} does not exist: the vocabulary has {self.vocab_size} ids"
                )

    def room(self, num_prompt: int, params: SamplingParams) -> int:
        """Most tokens that can follow a prompt; below 1 when none can.

        Beams may share nothing but the prompt, and KV must be enough even then.
        """
        room = self.max_length - num_prompt
        return min(room, (self._num_slots - num_prompt) // params.num_beams)

    @property
    def _num_slots(self) -> int:
        return (self.pool.num_blocks - 1) * self.pool.block_size

    def _length(self, num_prompt: int, params: SamplingParams) -> int:
        """The most tokens the sequence may have, prompt included."""
        limit, room = self.max_length, self.room(num_prompt, params)
        if num_prompt >= limit:
            raise PromptError(
                f"the prompt has {num_prompt} tokens, and the context holds {limit} with at least "
                "one to generate: shorten it"
            )
        wanted = max(room, 1) if params.max_tokens is None else params.max_tokens
        if num_prompt + wanted > limit:
            raise ConfigError(
                f"max_tokens is {wanted}: after a prompt of {num_prompt} tokens the "
                f"context of {limit} has room for {limit - num_prompt}"
            )
        self._check_beams(num_prompt, params, wanted, room)
        return num_prompt + wanted

    def _check_beams(self, num_prompt: int, params: SamplingParams, wanted: int, room: int) -> None:
        if params.num_beams > self.max_rows:
            raise ConfigError(
                f"num_beams is {params.num_beams}: a forward has {self.max_rows} rows at most "
                "(max_batch_tokens)"
            )
        if wanted > room:
            raise ConfigError(
                f"num_beams is {params.num_beams} and max_tokens {wanted}: behind a prompt of "
                f"{num_prompt} tokens the KV pool of {self._num_slots} slots has room for {room} "
                "tokens of each beam: lower one of them or raise kv_memory"
            )
