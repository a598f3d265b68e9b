"""Tokens as bytes, and bytes as tokens: the ground on which two vocabularies meet.

Texts are not: a token may be half a character, and what `decode` makes of tokens is cleaned up,
stripped and rid of special tokens. So a token is what it adds to the bytes of a text, and any bytes
can be spelled, also those that are no text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from draftwood.errors import VocabularyError
from draftwood.text.tokenizer import Tokenizer

_SPACE = "▁"  # what SentencePiece writes for a space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_STRETCH = re.compile("[\udc80-\udcff]+|[^\udc80-\udcff]+")  # bytes that are no text, or text
_UNSUPPORTED = {"WordPiece", "BPEDecoder", "CTC"}  # a token's text depends on what stands beside it


class Speller:
    """The bytes of every token of a tokenizer, and the tokens of any bytes.

    Args:
        tokenizer: whose.
        size: ids from here on are not used; None for all that the tokenizer has.

    Attributes:
        table: [ids] the bytes each token adds to a text; None for special tokens, which are no
            text, and for ids without a token.
        ids: the token of some bytes, where there is one; a letter comes before the byte token that
            stands in for it.
        specials: special tokens' strings, and their ids.
        names: the same the other way round.
        prefix: ids that the tokenizer puts in front of every text.
        leads: whether it puts a space in front of every text.

    Raises:
        VocabularyError: the tokenizer does not say what bytes its tokens are.
    """

    def __init__(self, tokenizer: Tokenizer, size: int | None = None) -> None:
        definition = tokenizer.definition()
        if definition is None:
            raise VocabularyError(
                "it has no tokenizer.json and none can be made, so its tokens' bytes are not known"
            )
        kind = _types(definition["decoder"]) | _types(definition["pre_tokenizer"])
        if bad := kind & _UNSUPPORTED:
            raise VocabularyError(f"it is of the kind {bad.pop()}, whose tokens are no bytes")
        self._backend = Backend.from_str(json.dumps(_without_extras(definition)))
        self._backend.encode_special_tokens = True  # here they are text like any other
        vocab = {
            word: token
            for word, token in self._backend.get_vocab(with_added_tokens=True).items()
            if size is None or token < size
        }
        added = {entry["id"]: entry for entry in definition["added_tokens"]}
        self.specials = {w: t for w, t in vocab.items() if added.get(t, {}).get("special")}
        self.names = {token: word for word, token in self.specials.items()}
        self.table: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
        fallback = "ByteFallback" in kind or bool(definition["model"].get("byte_fallback"))
        for word, token in vocab.items():
            if token not in self.names:
                plain = "ByteLevel" not in kind or token in added
                self.table[token] = _text(word, fallback) if plain else _byte_level(word)
        self.ids = self._unique(vocab, fallback)
        self.prefix, self.leads = self._beginning(tokenizer)

    def spell(self, tokens: Iterable[int]) -> bytes:
        """The bytes of tokens, one behind the other; special and unknown ones add none."""
        size = len(self.table)
        return b"".join(self.table[t] or b"" if t < size else b"" for t in tokens)

    def encode(self, data: bytes) -> list[int]:
        """Tokens of `data`, as in the middle of a text: nothing is put in front.

        Bytes that the vocabulary cannot spell are left out; `spell` of the result tells.
        """
        text = data.decode("utf-8", "surrogateescape")
        tokens: list[int] = []
        for stretch in _STRETCH.findall(text):
            if "\udc80" <= stretch[0] <= "\udcff":
                tokens += self._single(stretch.encode("utf-8", "surrogateescape"))
            else:
                tokens += self._encode(stretch)
        return tokens

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if self.spell(tokens) == text.encode():
            return tokens
        if len(text) == 1:
            return self._single(text.encode())
        # Something in it is unknown to the vocabulary: find it by halves.
        half = len(text) // 2
        return self._encode(text[:half]) + self._encode(text[half:])

    def _single(self, data: bytes) -> list[int]:
        """One token for each byte that has one."""
        found = (self.ids.get(data[i : i + 1]) for i in range(len(data)))
        return [token for token in found if token is not None]

    def _unique(self, vocab: dict[str, int], fallback: bool) -> dict[bytes, int]:
        stand_ins = {t for word, t in vocab.items() if fallback and _BYTE.fullmatch(word)}
        order = sorted(vocab.values(), key=lambda token: (token in stand_ins, token), reverse=True)
        return {data: token for token in order if (data := self.table[token])}

    def _beginning(self, tokenizer: Tokenizer) -> tuple[tuple[int, ...], bool]:
        whole = tokenizer.encode("a")
        bare = tokenizer.encode("a", add_special_tokens=False)
        special = [token in self.names for token in whole]
        count = special.index(False) if False in special else 0
        return tuple(whole[:count]), self.spell(bare).startswith(b" ")


def _without_extras(definition: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer that changes no bytes and puts nothing in front of a text."""
    return {
        **definition,
        "normalizer": _spaces_only(definition["normalizer"]),
        "pre_tokenizer": _without_lead(definition["pre_tokenizer"]),
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


def _spaces_only(part: Any) -> Any:
    """Of a normalizer what writes spaces in SentencePiece's way."""
    if not part:
        return None
    if part["type"] == "Sequence":
        kept = [inner for inner in map(_spaces_only, part["normalizers"]) if inner]
        return {"type": "Sequence", "normalizers": kept}
    return part if part["type"] == "Replace" and part["content"] == _SPACE else None


def _without_lead(part: Any) -> Any:
    """A pre-tokenizer that adds no space in front."""
    if not part:
        return None
    if part["type"] == "Sequence":
        return {**part, "pretokenizers": [_without_lead(p) for p in part["pretokenizers"]]}
    never = {"add_prefix_space": False, "prepend_scheme": "never"}
    return {key: never.get(key, value) for key, value in part.items()}


def _types(part: Any) -> set[str]:
    """The names of a component and of those inside it."""
    if isinstance(part, list):
        return set().union(*map(_types, part))
    if not isinstance(part, dict):
        return set()
    own = {part["type"]} if isinstance(part.get("type"), str) else set()
    return own.union(*(_types(value) for value in part.values()))


def _alphabet() -> dict[str, int]:
    """GPT-2's printable letter for each byte: its own where it has one, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_LETTERS = _alphabet()


def _byte_level(word: str) -> bytes:
    letters: Sequence[int | None] = [_LETTERS.get(letter) for letter in word]
    known = [letter for letter in letters if letter is not None]
    return bytes(known) if len(known) == len(letters) else word.encode()


def _text(word: str, fallback: bool) -> bytes:
    match = _BYTE.fullmatch(word) if fallback else None
    return bytes([int(match[1], 16)]) if match else word.replace(_SPACE, " ").encode()
