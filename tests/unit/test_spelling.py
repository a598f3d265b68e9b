"""Tokens as bytes and bytes as tokens, over every kind of tokenizer there is."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
import tokenizers
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import VocabularyError
from draftwood.text import Speller, Tokenizer
from tests.vocabularies import bpe_tokenizer, letters_tokenizer, metaspace_tokenizer

KINDS = {
    "bpe": bpe_tokenizer,
    "metaspace": metaspace_tokenizer,
    "unigram": lambda: metaspace_tokenizer(unigram=True),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))
TEXTS = ("the quick brown fox", "one  two\n\n  three", "naïve 東京 🌲", "def add(first):\n    pass")


@lru_cache
def speller(kind: str) -> Speller:
    """Built once: it is never changed."""
    return Speller(KINDS[kind]())


@every_kind
@given(data=st.binary(max_size=40))
def test_any_bytes_can_be_spelled(kind: str, data: bytes) -> None:
    """Halves of characters too, and bytes that are in no text."""
    assert speller(kind).spell(speller(kind).encode(data)) == data


@every_kind
@given(text=st.text(max_size=30))
def test_any_text_can_be_spelled(kind: str, text: str) -> None:
    """Nothing is normalised, stripped, or taken for a special token."""
    text += "<|im_end|></s>"
    tokens = speller(kind).encode(text.encode())
    assert speller(kind).spell(tokens) == text.encode()
    assert not set(tokens) & set(speller(kind).names)


@every_kind
@pytest.mark.parametrize("text", TEXTS)
def test_text_gets_the_tokens_that_the_tokenizer_gives_it(kind: str, text: str) -> None:
    """But for what a tokenizer puts in front: a special token, a space."""
    tokenizer = KINDS[kind]()
    ours = speller(kind)
    whole = tokenizer.encode(text)
    assert tuple(whole[: len(ours.prefix)]) == ours.prefix
    lead = " " if ours.leads else ""
    assert whole[len(ours.prefix) :] == ours.encode((lead + text).encode())


def test_what_stands_in_front_is_known() -> None:
    """GPT-2 puts nothing in front of a text, SentencePiece a special token and a space."""
    assert (speller("bpe").prefix, speller("bpe").leads) == ((), False)
    for kind in ("metaspace", "unigram"):
        assert (speller(kind).prefix, speller(kind).leads) == ((1,), True)


def test_a_letter_comes_before_the_byte_that_stands_for_it() -> None:
    """`a` and `<0x61>` are the same byte; only the letter is what a model writes."""
    ours = speller("metaspace")
    names = metaspace_tokenizer().token_strings
    assert names[ours.ids[b"a"]] == "a"
    assert names[ours.ids[b"\xff"]] == "<0xFF>"
    assert ours.table[names.index("<0x61>")] == b"a"


def test_special_tokens_have_no_bytes_and_added_words_have_theirs() -> None:
    """An added token that is not special is text, whatever the alphabet of the others."""
    backend = tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(bpe_tokenizer().definition()))
    )
    backend.add_tokens(["<tool ü>"])
    ours = Speller(Tokenizer(backend))
    assert ours.table[ours.specials["<|im_end|>"]] is None
    [token] = ours.encode("<tool ü>".encode())
    assert ours.table[token] == "<tool ü>".encode()
    assert ours.spell([token, ours.specials["<|im_end|>"], 10**6]) == "<tool ü>".encode()


def test_ids_beyond_a_models_size_are_not_used() -> None:
    """A model without the row has no such token, whatever its tokenizer says."""
    small = Speller(bpe_tokenizer(), 280)
    tokens = small.encode(b"the quick brown fox")
    assert max(tokens) < 280
    assert small.spell(tokens) == b"the quick brown fox"


def test_what_cannot_be_spelled_is_left_out_and_nothing_else() -> None:
    """A vocabulary of letters has no digits."""
    ours = Speller(letters_tokenizer(26))
    assert ours.spell(ours.encode(b"ab1c d\xff")) == b"abcd"


@pytest.mark.parametrize("kind", ["WordPiece", "python"])
def test_a_tokenizer_without_bytes_is_refused(kind: str) -> None:
    """What a token adds to the text must not depend on its neighbours."""
    backend: Any = None
    if kind == "WordPiece":
        inner = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}))
        inner.decoder = tokenizers.decoders.WordPiece()
        backend = Tokenizer(tf.PreTrainedTokenizerFast(tokenizer_object=inner))
    else:

        class Python(Tokenizer):
            def definition(self) -> None:
                return None

        backend = Python(bpe_tokenizer()._backend)
    with pytest.raises(VocabularyError, match=r"WordPiece|tokenizer\.json"):
        Speller(backend)
