"""Incremental detokenisation with a byte-level toy tokenizer: one token is one byte."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.text import Detokenizer

SPECIAL = 256


class Bytes:
    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        parts = [t for t in tokens if t < 256]
        text = bytes(parts).decode("utf-8", errors="replace")
        return text if skip_special_tokens or SPECIAL not in tokens else text + "<s>"


def feed(detokenizer: Detokenizer, data: bytes) -> str | None:
    for byte in data:
        stopped = detokenizer.append(byte)
        if stopped is not None:
            return stopped
    return detokenizer.finish()


@given(st.text(max_size=30))
def test_text_comes_out_whole(text: str) -> None:
    detokenizer = Detokenizer(Bytes(), b"prompt")
    assert feed(detokenizer, text.encode()) is None
    assert detokenizer.text == text
    assert len(detokenizer.offsets) == len(text.encode())


@given(st.text(max_size=30))
def test_never_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(Bytes(), [])
    for byte in text.encode():
        detokenizer.append(byte)
        assert text.startswith(detokenizer.text)


@given(st.text("abé", max_size=20), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_what_is_safe_is_never_taken_back(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(Bytes(), [], stops)
    shown = ""
    for byte in text.encode():
        stopped = detokenizer.append(byte)
        assert detokenizer.text.startswith(shown)
        if stopped is not None:
            break
        shown = detokenizer.text[: detokenizer.num_safe]
    places = [text.find(s) for s in stops if s in text]
    if places:
        # The text ends where the stop string that was completed first begins.
        ends = sorted((text.find(s) + len(s), text.find(s)) for s in stops if s in text)
        first_end = ends[0][0]
        assert detokenizer.text == text[: min(p for e, p in ends if e == first_end)]
    else:
        assert detokenizer.finish() is None
        assert detokenizer.text == text


@pytest.mark.parametrize("stop", ["END", "E", "D\n"])
def test_stop_string_across_tokens(stop: str) -> None:
    detokenizer = Detokenizer(Bytes(), [], [stop])
    assert feed(detokenizer, b"two END\nx") == stop
    assert stop not in detokenizer.text


def test_incomplete_bytes_come_out_at_the_end() -> None:
    detokenizer = Detokenizer(Bytes(), [])
    assert feed(detokenizer, "aé".encode()[:-1]) is None
    assert detokenizer.text == "a\ufffd"
