"""Beam search: the k likeliest continuations side by side, as transformers searches.

Every round the beams' log-probabilities, each added to its beam's score, form one table of beams by
tokens. Its best entries are the candidates. Those that end the text become hypotheses if they are
among the k best candidates; the k best others are the next beams. A hypothesis' score is its
log-probability divided by its length to the power `length_penalty`; the k best are kept.

Rules, arithmetic and the order of ties are those of transformers 5
(`generate(num_beams=k, do_sample=False)`), so that its texts come out: scores are float32, and what
shall not be chosen is pushed down by 1e9 instead of left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.sampling.params import SamplingParams

_OUT = -1.0e9  # what is added to a score that shall not be chosen


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text that has ended.

    Attributes:
        tokens: what was generated, the end token included.
        score: its log-probability, divided by its length to the power of the length penalty.
    """

    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Continuations of the live beams, likeliest first: C of them."""

    scores: Tensor  # [C] float32, on the CPU
    parents: list[int]  # beam that each continues
    texts: list[tuple[int, ...]]
    ended: Tensor  # [C] booleans


class BeamSearch:
    """The search of one request.

    Args:
        params: `num_beams`, `length_penalty` and `early_stopping` count.
        end_ids: tokens that end a text.
        max_tokens: length at which every text ends.

    Attributes:
        beams: what each of the k live beams has generated.
        done: whether the search has ended.
    """

    def __init__(self, params: SamplingParams, end_ids: frozenset[int], max_tokens: int) -> None:
        self._params = params
        self._end_ids = torch.tensor(sorted(end_ids), dtype=torch.int64)
        self._max_tokens = max_tokens
        self.beams: list[tuple[int, ...]] = [()] * params.num_beams
        # All beams begin alike: only the first counts, or its continuations would come k times.
        self._scores = torch.full((params.num_beams,), _OUT)
        self._scores[0] = 0.0
        self._ended: list[Hypothesis | None] = [None] * params.num_beams
        self._ended_scores = torch.full((params.num_beams,), _OUT)
        self.done = False

    def advance(self, log_probs: Tensor) -> list[int]:
        """One round: the beams grow by a token, and those that end become hypotheses.

        Args:
            log_probs: [k, V] float32, of the token that follows each beam, after all rules.

        Returns:
            Of each new beam, the number of the old one that it continues.
        """
        assert not self.done
        found = self._candidates(log_probs)
        self._keep_hypotheses(found)
        scores = found.scores + found.ended.float() * _OUT
        best = torch.topk(scores, len(self.beams)).indices
        self._scores = scores[best]
        chosen = best.tolist()
        self.beams = [found.texts[i] for i in chosen]
        self.done = bool(found.ended.all()) or not self._may_improve()
        return [found.parents[i] for i in chosen]

    def hypotheses(self) -> list[Hypothesis]:
        """Ended texts, best first; at most `num_return_sequences`.

        Fewer where the rules of a request do not leave so many texts.
        """
        best = self._ended[: self._params.num_return_sequences]
        return [one for one in best if one is not None and self._log_prob(one) > _OUT / 2]

    def _log_prob(self, one: Hypothesis) -> float:
        return float(one.score * len(one.tokens) ** self._params.length_penalty)

    def _candidates(self, log_probs: Tensor) -> _Candidates:
        """So many that k are left when every beam offers each end token."""
        num_beams, vocab_size = log_probs.shape
        count = max(2, 1 + len(self._end_ids)) * num_beams
        table = log_probs + self._scores.to(log_probs.device)[:, None]
        best = torch.topk(table.reshape(-1), min(count, table.numel()))
        places = best.indices.cpu()
        parents, tokens = (places // vocab_size).tolist(), places % vocab_size
        texts = [(*self.beams[i], token) for i, token in zip(parents, tokens.tolist(), strict=True)]
        ended = torch.isin(tokens, self._end_ids)
        if len(texts[0]) >= self._max_tokens:
            ended = torch.ones_like(ended)
        return _Candidates(best.values.cpu(), parents, texts, ended)

    def _keep_hypotheses(self, found: _Candidates) -> None:
        """Takes in what has just ended, if it was among the k best candidates."""
        num_beams = len(self.beams)
        scores = found.scores / len(found.texts[0]) ** self._params.length_penalty
        taken = found.ended & (torch.arange(len(scores)) < num_beams)
        merged = torch.cat([self._ended_scores, scores + (~taken).float() * _OUT])
        best = torch.topk(merged, num_beams).indices
        new = [
            Hypothesis(text, score) if end else None
            for text, score, end in zip(found.texts, scores.tolist(), taken.tolist(), strict=True)
        ]
        both = [*self._ended, *new]
        self._ended = [both[i] for i in best.tolist()]
        self._ended_scores = merged[best]

    def _may_improve(self) -> bool:
        """Whether going on is worth it: transformers' estimate of what the best beam can reach."""
        params, full = self._params, all(self._ended)
        if full and params.early_stopping is True:
            return False
        at_most = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_tokens if at_most else len(self.beams[0])
        reachable = self._scores[0] / length**params.length_penalty
        worst = self._ended_scores.min() if full else torch.tensor(_OUT)
        return bool(reachable > worst)
