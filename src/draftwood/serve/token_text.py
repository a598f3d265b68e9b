"""Single tokens as text and bytes, for log-probabilities."""

from __future__ import annotations

import re

from draftwood.text import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """What single tokens say.

    A token may hold a part of a character: its text then has replacement characters, its bytes are
    exact.

    Args:
        tokenizer: of the target.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def text(self, token: int) -> str:
        """The token's text."""
        return self._look(token)[0]

    def raw(self, token: int) -> list[int]:
        """The token's bytes."""
        return self._look(token)[1]

    def _look(self, token: int) -> tuple[str, list[int]]:
        if token not in self._known:
            raw = self._find(token)
            self._known[token] = raw.decode("utf-8", "replace"), list(raw)
        return self._known[token]

    def _find(self, token: int) -> bytes:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        spellings = self._tokenizer.token_strings
        spelling = spellings[token] if token < len(spellings) else None
        if spelling is None:
            return text.encode()
        if match := _BYTE.fullmatch(spelling):
            return bytes([int(match[1], 16)])
        if spelling.startswith("▁"):  # alone, decoding drops its space
            return spelling.replace("▁", " ").encode()
        if all(letter in _FROM_LETTER for letter in spelling):
            raw = bytes(_FROM_LETTER[letter] for letter in spelling)
            if raw.decode("utf-8", "replace") == text:
                return raw
        return text.encode()


def _byte_letters() -> dict[str, int]:
    """Letters by which byte-level vocabularies spell bytes: printable ones are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


_FROM_LETTER = _byte_letters()
