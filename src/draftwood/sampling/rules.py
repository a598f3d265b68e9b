"""What a request demands of its logits before a token is picked: penalties, biases, bans.

Every rule looks at the tokens of the node's own path (prompt, output, and the draft tokens down to
the node), so that a token in a tree is judged exactly as it would be in plain decoding. The order
is vLLM's: bans, bias, the user's own processors, penalties; and last the grammar, which nothing
may overrule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftwood.sampling.grammar import Grammar
from draftwood.sampling.params import SamplingParams

_NEG_INF = float("-inf")


class Rule(Protocol):
    """Changes a node's logits in place."""

    def __call__(self, logits: Tensor, tokens: Sequence[int], num_prompt: int) -> None:
        """Applies the rule.

        Args:
            logits: [V] float32, the rule's to change.
            tokens: prompt, output and path, down to the node whose logits these are.
            num_prompt: how many of them are the prompt's.
        """


class Rules:
    """The rules of one request; most have none, and then logits pass through untouched.

    Attributes:
        grammar: the form of the text, if the request demands one.
    """

    def __init__(self, rules: Sequence[Rule], grammar: Grammar | None = None) -> None:
        self._rules = tuple(rules)
        self.grammar = grammar

    def __bool__(self) -> bool:
        return bool(self._rules) or self.grammar is not None

    def apply(self, logits: Tensor, tokens: Sequence[int], num_prompt: int) -> Tensor:
        """[V] logits after all rules; the argument is left as it was."""
        raw = logits
        if self._rules:
            logits = logits.float().clone()
        for rule in self._rules:
            rule(logits, tokens, num_prompt)
        if self.grammar is not None:
            logits = self.grammar.restrict(logits, raw, tokens[num_prompt:])
        return logits


def make_rules(
    params: SamplingParams,
    end_ids: Sequence[int],
    bad_words: Sequence[Sequence[int]],
    grammar: Grammar | None = None,
) -> Rules:
    """The rules that `params` asks for.

    Args:
        params: of the request.
        end_ids: tokens that end a text; banned until `min_tokens` are there.
        bad_words: token sequences that must not appear.
        grammar: the form of the text, if one is demanded.
    """
    rules: list[Rule] = []
    if params.min_tokens > 0 and end_ids:
        rules.append(_MinTokens(params.min_tokens, tuple(end_ids)))
    if bad_words:
        rules.append(_BadWords(bad_words))
    if params.logit_bias:
        rules.append(_Bias(dict(params.logit_bias)))
    rules.extend(_Foreign(processor) for processor in params.logits_processors)
    if params.repetition_penalty != 1.0:
        rules.append(_Repetition(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        rules.append(_Counts(params.presence_penalty, params.frequency_penalty))
    return Rules(rules, grammar)


class _MinTokens:
    def __init__(self, least: int, end_ids: tuple[int, ...]) -> None:
        self._least = least
        self._end_ids = list(end_ids)

    def __call__(self, logits: Tensor, tokens: Sequence[int], num_prompt: int) -> None:
        if len(tokens) - num_prompt < self._least:
            logits[self._end_ids] = _NEG_INF


class _BadWords:
    """A word's last token is banned where the tokens before it stand."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._words = [(list(word[:-1]), word[-1]) for word in words]

    def __call__(self, logits: Tensor, tokens: Sequence[int], num_prompt: int) -> None:
        for start, last in self._words:
            if not start or list(tokens[-len(start) :]) == start:
                logits[last] = _NEG_INF


class _Bias:
    def __init__(self, bias: dict[int, float]) -> None:
        self._ids = list(bias)
        self._values = torch.tensor(list(bias.values()), dtype=torch.float32)

    def __call__(self, logits: Tensor, tokens: Sequence[int], num_prompt: int) -> None:
        logits[self._ids] += self._values.to(logits.device)


class _Repetition:
    """Divides positive and multiplies negative logits of all tokens so far (CTRL, 1909.05858)."""

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty

    def __call__(self, logits: Tensor, tokens: Sequence[int], num_prompt: int) -> None:
        seen = torch.tensor(sorted(set(tokens)), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / self._penalty, values * self._penalty)


class _Counts:
    """OpenAI's penalties: by how often a token was generated, and for being there at all."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency

    def __call__(self, logits: Tensor, tokens: Sequence[int], num_prompt: int) -> None:
        if len(tokens) == num_prompt:
            return
        generated = torch.tensor(tokens[num_prompt:], device=logits.device)
        ids, counts = torch.unique(generated, return_counts=True)
        logits[ids] -= self._frequency * counts + self._presence


class _Foreign:
    """A transformers LogitsProcessor, or any function of `(input_ids, scores)`, both [1, n]."""

    def __init__(self, processor: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._processor = processor

    def __call__(self, logits: Tensor, tokens: Sequence[int], num_prompt: int) -> None:
        ids = torch.tensor([list(tokens)], device=logits.device)
        logits.copy_(self._processor(ids, logits[None].clone())[0])
