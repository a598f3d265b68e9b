"""Event ids, and streams that are cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.serve.errors import ApiError
from draftwood.serve.generation import Ending, Piece
from draftwood.serve.replay import Place, Position, Tail, cut

END = Ending("stop", None, 1, 1, 0, {}, None, None)
PLACES = st.builds(Place, st.integers(0, 10**6), st.integers(0, 10**6), st.booleans())
# Tokens with their text; some have none, as half a character.
TOKENS = st.lists(st.sampled_from(["a", "bc", "", "def", "🌲"]), min_size=1, max_size=20)


@given(st.lists(PLACES, min_size=1, max_size=6), st.sampled_from(Tail))
def test_ids_say_positions(places: list[Place], tail: Tail) -> None:
    position = Position(tuple(places), tail)
    assert Position.of(str(position), len(places)) == position
    with pytest.raises(ApiError, match="Last-Event-ID"):
        Position.of(str(position), len(places) + 1)


def pieces_of(tokens: list[str], cuts: set[int]) -> list[Piece]:
    """The text in pieces that end behind the tokens `cuts` names."""
    pieces, begin = [], 0
    for end in sorted({place for place in cuts if 0 < place < len(tokens)} | {len(tokens)}):
        part = tokens[begin:end]
        offsets = [len("".join(tokens[:i])) for i in range(begin, end)]
        ids = list(range(begin, end))
        ending = END if end == len(tokens) else None
        pieces.append(Piece(0, "".join(part), ids, [], offsets, ending))
        begin = end
    return pieces


@given(TOKENS, st.sets(st.integers(1, 19)), st.sets(st.integers(1, 19)), st.integers(0, 20))
def test_another_process_gives_exactly_the_rest(
    tokens: list[str], before: set[int], after: set[int], num_read: int
) -> None:
    """The rounds of the second process fall otherwise, and it may be behind the reader."""
    read = pieces_of(tokens, before)[:num_read]
    have = Place()
    for piece in read:
        have = have.behind(piece)
    place, got, known_text = Place(), [], ""
    for piece in pieces_of(tokens, after):
        known, new = cut(piece, place, have)
        place = place.behind(piece)
        known_text += known.text if known else ""
        if new is not None:
            got.append(new)
    assert place.ended
    assert known_text == "".join(piece.text for piece in read)
    assert "".join(piece.text for piece in [*read, *got]) == "".join(tokens)
    assert [i for piece in [*read, *got] for i in piece.token_ids] == list(range(len(tokens)))
    offsets = [offset for piece in [*read, *got] for offset in piece.offsets]
    assert offsets == sorted(offsets)
    assert sum(piece.ending is not None for piece in [*read, *got]) == 1
