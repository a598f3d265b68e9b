"""ROUGE (Lin 2004), as far as accuracy runs need it: F1 of words in common, and in common order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean


def words(text: str) -> list[str]:
    """Lower-case words of letters and digits."""
    return re.findall(r"[^\W_]+", text.lower())


def rouge_1(text: str, reference: str) -> float:
    """F1 of single words; 1 for two texts without any."""
    ours, theirs = words(text), words(reference)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return _f1(common, len(ours), len(theirs))


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words; 1 for two texts without any."""
    ours, theirs = words(text), words(reference)
    return _f1(_longest_common(ours, theirs), len(ours), len(theirs))


def mean_rouge(pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Means over (text, reference) pairs: "rouge1" and "rougeL", in per cent as MLPerf has them."""
    given = list(pairs)
    return {
        "rouge1": 100 * fmean(rouge_1(*pair) for pair in given),
        "rougeL": 100 * fmean(rouge_l(*pair) for pair in given),
    }


def _f1(common: int, num_ours: int, num_theirs: int) -> float:
    if num_ours + num_theirs == 0:
        return 1.0
    return 2 * common / (num_ours + num_theirs)


def _longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length, by rows of the usual table."""
    row = [0] * (len(b) + 1)
    for word in a:
        last = row
        row = [0]
        for j, other in enumerate(b):
            row.append(last[j] + 1 if word == other else max(last[j + 1], row[j]))
    return row[-1]
