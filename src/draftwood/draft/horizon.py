"""How long an answer will still be, judged by the answers that have ended."""

from __future__ import annotations

from collections import deque

_REMEMBERED = 64  # answers
_OPEN = 2.0  # answers of full length that are believed in before any was seen


class Horizon:
    """The expected rest of an answer, from the lengths of the last ones.

    Of those that were longer than what is there already the mean rest is taken; a few answers that
    run to their limit are added, so that little evidence says little.
    """

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_REMEMBERED)

    def observe(self, num_tokens: int) -> None:
        """An answer has ended after so many tokens."""
        self._lengths.append(num_tokens)

    def rest(self, num_tokens: int, limit: int) -> float:
        """Tokens that are expected to follow.

        Args:
            num_tokens: of the answer so far.
            limit: the most that the answer may have.
        """
        most = max(limit - num_tokens, 0)
        rests = [min(length - num_tokens, most) for length in self._lengths if length > num_tokens]
        return (sum(rests) + _OPEN * most) / (len(rests) + _OPEN)
