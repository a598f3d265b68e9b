"""The parts of responses that chat and text completions share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from draftwood.sampling import TokenLogprobs
from draftwood.serve.generation import Ending
from draftwood.serve.token_text import TokenTexts

Json = dict[str, Any]


def usage_of(endings: Iterable[Ending], num_outputs_per_prompt: int) -> Json:
    """OpenAI's `usage`; a prompt counts once, however many outputs it has."""
    known = list(endings)
    prompts = known[::num_outputs_per_prompt]
    return usage(
        sum(one.num_prompt_tokens for one in prompts),
        sum(one.num_tokens for one in known),
        sum(one.num_cached_tokens for one in prompts),
    )


def usage(num_prompt: int, num_tokens: int, num_cached: int) -> Json:
    """The counts in OpenAI's form."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def metrics_of(endings: Sequence[Ending]) -> Json:
    """How it went; the parts that make sense for a single text only are null for several."""
    alone = endings[0] if len(endings) == 1 else None
    return {
        "speculative_decoding": alone.speculation if alone else None,
        "num_cached_tokens": sum(one.num_cached_tokens for one in endings),
        "tokens_per_s": alone.tokens_per_s if alone else None,
        "plain_tokens_per_s": alone.plain_tokens_per_s if alone else None,
    }


def chat_logprobs(one: TokenLogprobs, texts: TokenTexts) -> Json:
    """A token of a chat choice's `logprobs.content`."""
    top = [_token(token, logprob, texts) for token, logprob in one.top]
    return _token(one.token, one.logprob, texts) | {"top_logprobs": top}


def _token(token: int, logprob: float, texts: TokenTexts) -> Json:
    return {
        "token": texts.text(token),
        "logprob": max(logprob, -9999.0),
        "bytes": texts.raw(token),
    }


def text_logprobs(
    logprobs: Sequence[TokenLogprobs | None],
    tokens: Sequence[int],
    offsets: Sequence[int],
    texts: TokenTexts,
) -> Json:
    """`logprobs` of a completion choice; the first token of a prompt has none."""
    return {
        "tokens": [texts.text(token) for token in tokens],
        "token_logprobs": [None if one is None else max(one.logprob, -9999.0) for one in logprobs],
        "top_logprobs": [None if one is None else _top(one, texts) for one in logprobs],
        "text_offset": list(offsets),
    }


def _top(one: TokenLogprobs, texts: TokenTexts) -> dict[str, float]:
    """The likeliest tokens by text, and the chosen one; of equal texts the likelier counts."""
    top: dict[str, float] = {}
    for token, logprob in [*one.top, (one.token, one.logprob)]:
        top.setdefault(texts.text(token), max(logprob, -9999.0))
    return top
