"""What is said of a sequence when it has ended."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from draftwood.engine.engine import Engine
from draftwood.engine.sequence import RequestMetrics, Sequence
from draftwood.serve.generation import Ending, Generation, Outbox


def ending_of(seq: Sequence, engine: Engine) -> Ending:
    """The ending of a finished sequence; on the engine's thread."""
    num_tokens = len(seq.tokens) - seq.num_prompt_tokens
    seconds = seq.metrics.decode_s
    cost = engine.controller.cost
    return Ending(
        reason=seq.finish_reason or "stop",
        stop=seq.stop_reason,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_tokens=num_tokens,
        num_cached_tokens=seq.metrics.num_cached_tokens,
        speculation=speculation_of(seq.metrics, engine.config.max_tree_nodes),
        tokens_per_s=(num_tokens - 1) / seconds if num_tokens > 1 and seconds > 0 else None,
        plain_tokens_per_s=1 / cost.at(len(seq.tokens))(1) if cost else None,
    )


def tell_anew(generations: Iterable[Generation], outbox: Outbox, engine: Engine) -> None:
    """Makes somebody else the reader, and tells all there is; on the engine's thread."""
    for one in generations:
        one.outbox = outbox
        one.listen()
        for teller in one.tellers:
            piece = teller.news()
            if piece is None:
                continue
            if teller.seq.finished and one.error is None:
                teller.done = True
                piece.ending = ending_of(teller.seq, engine)
            one.put(teller, piece)
        if one.error is not None:
            outbox.fail(one.error)


def speculation_of(metrics: RequestMetrics, max_tree_nodes: int) -> dict[str, Any]:
    """vLLM's per-request object: the mean length counts the bonus token, the rate does not.

    `acceptance_histogram[k]` is how many rounds accepted exactly k draft tokens. A stop rule may
    have cut some of a round's tokens; they count as not accepted.
    """
    at_least = [metrics.num_rounds, *metrics.accepted_per_position, 0]
    return {
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "draft_acceptance_rate": metrics.acceptance_rate,
        "acceptance_histogram": [max(a - b, 0) for a, b in itertools.pairwise(at_least)],
        "num_spec_steps": metrics.num_rounds,
        "num_accepted_draft_tokens": metrics.num_accepted_tokens,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_spec_tokens": max_tree_nodes,
    }
