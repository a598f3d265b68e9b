"""Some prompts generated at once by one engine, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from draftwood.engine.engine import Engine
from draftwood.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Together:
    """What came of it.

    Attributes:
        texts: token ids of each prompt's answer.
        total_s: seconds from the first request to the last token.
        decode_s: the same from where every request had its first token.
        decode_tokens: tokens that came in that time.
        num_rounds: rounds of all requests, each counted for itself.
        num_draft_tokens, num_accepted_tokens: draft nodes verified, and those that were right.
    """

    texts: list[list[int]]
    total_s: float
    decode_s: float
    decode_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int


def run_together(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Together:
    """Generates for all prompts in one batch; the engine forgets their KV afterwards."""
    begin = perf_counter()
    seqs = [engine.add(prompt, params) for prompt in prompts]
    started, early = begin, 0
    try:
        while not all(seq.finished for seq in seqs):
            engine.step()
            if started == begin and all(seq.output_ids for seq in seqs):
                started, early = perf_counter(), sum(len(seq.output_ids) for seq in seqs)
    finally:
        end = perf_counter()
        for seq in seqs:
            engine.abort(seq)
        engine.prefix.clear()  # engines may share a pool, and no prompt may be found there
    texts = [seq.output_ids for seq in seqs]
    return Together(
        texts=texts,
        total_s=end - begin,
        decode_s=end - started,
        decode_tokens=sum(map(len, texts)) - early,
        num_rounds=sum(seq.metrics.num_rounds for seq in seqs),
        num_draft_tokens=sum(seq.metrics.num_draft_tokens for seq in seqs),
        num_accepted_tokens=sum(seq.metrics.num_accepted_tokens for seq in seqs),
    )
