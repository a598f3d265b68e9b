"""A target's text in a draft model's tokens, kept up as it grows."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.draft.vocabulary import Bridge

_LOOK_BEHIND = 8
_MOST_LOOK_BEHIND = 32
_WORD_STARTS = (b" ", b"\n", b"\t", b"\r")


class Mirror:
    """One sequence's text in the draft's ids.

    New text may join the last tokens ("hel" and "lo" are one token of many vocabularies), so each
    time the last few are spelled anew together with it. They are taken back to where a word begins,
    for there almost every tokenizer cuts; what lies before never changes.

    Attributes:
        ids: the draft's ids of the whole text.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self.ids: list[int] = []
        self._reset()

    def update(self, tokens: Sequence[int]) -> int:
        """Follows the target's text; returns how many of the first ids stayed as they were.

        The text grows at its end; where it has become shorter, all of it is spelled anew.
        """
        if len(tokens) < self._num_tokens:
            before = list(self.ids)
            self._reset()
            self._append(tokens)
            return num_equal(before, self.ids)
        return self._append(tokens[self._num_tokens :])

    def _reset(self) -> None:
        self.ids[:] = self._bridge.draft.prefix
        self._barrier = len(self.ids)  # behind the last special token
        self._num_tokens = 0
        self._begun = False

    def _append(self, tokens: Sequence[int]) -> int:
        to_draft, size = self._bridge.to_draft, len(self._bridge.to_draft)
        kept = len(self.ids)
        data = bytearray()
        for token in tokens:
            piece = to_draft[token] if token < size else b""
            if isinstance(piece, bytes):
                data += piece
            else:
                kept = min(kept, self._write(bytes(data)))
                self._add_special(piece)
                data.clear()
        kept = min(kept, self._write(bytes(data)))
        self._num_tokens += len(tokens)
        return kept

    def _add_special(self, token: int) -> None:
        prefix = self._bridge.draft.prefix
        if not self._begun and token in prefix and self.ids == list(prefix):
            return  # the draft's own beginning is there already
        self.ids.append(token)
        self._barrier = len(self.ids)

    def _write(self, data: bytes) -> int:
        if not data:
            return len(self.ids)
        if not self._begun:
            data = self._at_the_start(data)
            self._begun = True
        start = look_behind(self.ids, self._bridge.draft.table, self._barrier)
        old = self.ids[start:]
        new = self._bridge.draft.encode(self._bridge.draft.spell(old) + data)
        same = num_equal(old, new)
        self.ids[start + same :] = new[same:]
        return start + same

    def _at_the_start(self, data: bytes) -> bytes:
        """A space that a tokenizer puts in front of every text is not the text's."""
        if self._bridge.target.leads:
            data = data.removeprefix(b" ")
        return b" " + data if self._bridge.draft.leads else data


def look_behind(ids: Sequence[int], table: Sequence[bytes | None], barrier: int = 0) -> int:
    """Where to begin so that what follows `ids` can be spelled together with their end.

    Args:
        ids: tokens.
        table: their bytes.
        barrier: the first place that may be returned.

    Returns:
        A place some tokens back from the end, where a word begins if there is one near.
    """
    place = max(len(ids) - _LOOK_BEHIND, barrier)
    lowest = max(len(ids) - _MOST_LOOK_BEHIND, barrier)
    while place > lowest and not (table[ids[place]] or b"").startswith(_WORD_STARTS):
        place -= 1
    return place


def num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
