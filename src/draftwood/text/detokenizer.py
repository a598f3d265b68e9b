"""Token ids to text, one token at a time, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\ufffd"


class Decoder(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `tokens`."""


class Detokenizer:
    """The text of a growing sequence, and where each token's text begins in it.

    A token's text depends on its left neighbours (spaces, characters of several tokens), so each
    new token is decoded together with the few before it, from the last place where the text was
    whole.

    Args:
        decoder: the tokenizer.
        context: tokens before the first one; they shape its text and are not part of it.
        stop: strings at which the text ends.
        skip_special_tokens: leave special tokens out.
        include_stop: end the text behind a stop string, not before it.
    """

    def __init__(
        self,
        decoder: Decoder,
        context: Sequence[int],
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._include_stop = include_stop
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._stop = tuple(stop)
        self._ids = list(context[-6:])
        self._shown = len(self._ids)  # tokens whose text is out
        self._from = max(0, self._shown - 5)  # where decoding starts
        self.text = ""
        self.offsets: list[int] = []

    def append(self, token: int, *, may_stop: bool = True) -> str | None:
        """Adds a token; returns the stop string it completes, if it does.

        Then `text` ends before that string. `may_stop=False` looks for none.
        """
        self.offsets.append(len(self.text))
        self._ids.append(token)
        before = self._decode(self._ids[self._from : self._shown])
        after = self._decode(self._ids[self._from :])
        if after.endswith(_INCOMPLETE) and len(self._ids) - self._shown < 8:
            return None
        self._add(after[len(before) :])
        self._from, self._shown = self._shown, len(self._ids)
        return self._cut() if may_stop else None

    def finish(self, *, may_stop: bool = True) -> str | None:
        """Shows what was held back, as nothing more will come; returns a stop string as above."""
        if self._shown == len(self._ids):
            return None
        before = self._decode(self._ids[self._from : self._shown])
        self._add(self._decode(self._ids[self._from :])[len(before) :])
        self._shown = len(self._ids)
        return self._cut() if may_stop else None

    @property
    def num_safe(self) -> int:
        """Characters of `text` that no stop string can take back any more."""
        held = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return len(self.text) - held

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip)

    def _add(self, new: str) -> None:
        self._searched = len(self.text)
        self.text += new

    def _cut(self) -> str | None:
        """Ends the text before the first stop string that the newest characters complete."""
        hits = []
        for stop in self._stop:
            start = max(0, self._searched - len(stop) + 1)
            place = self.text.find(stop, start)
            if place >= 0:
                hits.append((place, stop))
        if not hits:
            return None
        place, stop = min(hits)
        self.text = self.text[: place + len(stop) if self._include_stop else place]
        return stop
