"""The token tree's invariants, against brute force on random trees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder, pack_best


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 24, root: int | None = None) -> TokenTree:
    builder = TreeBuilder(draw(st.integers(0, 5)) if root is None else root)
    for _ in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(0, len(builder) - 1))
        builder.add(parent, draw(st.integers(0, 5)), draw(st.floats(0, 1)), "test")
    return builder.build()


def token_paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))}


@given(trees())
def test_mask_is_ancestors_or_self(tree: TokenTree) -> None:
    mask = tree.mask()
    for node in range(len(tree)):
        assert set(np.flatnonzero(mask[node])) == set(tree.path(node))
        assert np.array_equal(tree.mask(node), mask[node:])


@given(trees())
def test_paths_increase_and_end_at_the_node(tree: TokenTree) -> None:
    """The KV commit moves slots in place: only sound when path[i] >= i and increasing."""
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[0] == 0
        assert path[-1] == node
        assert len(path) == tree.depths[node] + 1
        assert all(a < b for a, b in itertools.pairwise(path))
        assert all(place >= i for i, place in enumerate(path))


@given(trees(), st.integers(1, 30))
def test_best_is_connected_and_best(tree: TokenTree, n: int) -> None:
    best = tree.best(n)
    assert len(best) == min(n, len(tree))
    assert token_paths(best) <= token_paths(tree)
    left_out = sorted(tree.scores, reverse=True)[len(best) :]
    assert not left_out or min(best.scores) >= max(left_out)


@given(trees(), st.integers(0, 6))
def test_clip_keeps_exactly_the_shallow_nodes(tree: TokenTree, depth: int) -> None:
    expected = {path for path in token_paths(tree) if len(path) <= depth + 1}
    assert token_paths(tree.clip(depth)) == expected


@given(trees(root=1), trees(root=1))
def test_merge_is_the_union_with_the_better_scores(a: TokenTree, b: TokenTree) -> None:
    merged = a.merge(b)
    assert token_paths(merged) == token_paths(a) | token_paths(b)
    for tree in (a, b):
        for node in range(len(tree)):
            place = 0
            for i in tree.path(node)[1:]:
                child = merged.child(place, tree.tokens[i])
                assert child is not None
                place = child
            assert merged.scores[place] >= tree.scores[node]


def test_merge_refuses_different_roots() -> None:
    with pytest.raises(ValueError, match="different roots"):
        TokenTree.root(1).merge(TokenTree.root(2))


def test_builder_clips_scores_to_the_parents() -> None:
    """A drafter that promises more for a child than for its parent would disconnect `best`."""
    builder = TreeBuilder(0)
    node = builder.add(0, 1, 0.3)
    builder.add(node, 2, 0.9)
    assert builder.build().scores == (1.0, 0.3, 0.3)


@given(st.lists(trees(max_nodes=8), min_size=1, max_size=4), st.integers(0, 30))
def test_pack_best_shares_nodes_by_score(many: list[TokenTree], n: int) -> None:
    packed = pack_best(many, n)
    assert sum(len(t) - 1 for t in packed) == min(n, sum(len(t) - 1 for t in many))
    kept = [s for t in packed for s in t.scores[1:]]
    every = sorted((s for t in many for s in t.scores[1:]), reverse=True)
    assert sorted(kept, reverse=True) == every[: len(kept)]


def test_chain_and_root() -> None:
    chain = TokenTree.chain([5, 6, 7], "x", decay=0.5)
    assert chain.is_chain
    assert chain.parents == (-1, 0, 1)
    assert chain.scores == (1.0, 0.5, 0.25)
    assert chain.sources == ("", "x", "x")
    assert chain.child(0, 6) == 1
    assert chain.child(0, 7) is None
    assert len(TokenTree.root(3)) == 1
    assert not TokenTree((1, 2, 3), (-1, 0, 0), (1, 1, 1), ("", "", "")).is_chain


@given(trees(), st.lists(st.integers(0, 5), max_size=4))
def test_a_tree_below_known_tokens(tree: TokenTree, known: list[int]) -> None:
    """Its paths are the known tokens and then those of the tree; the invariants hold."""
    whole = tree.below(known)
    n = len(known)
    assert len(whole) == n + len(tree)
    for node in range(len(tree)):
        path = [whole.tokens[i] for i in whole.path(n + node)]
        assert path == [*known, *(tree.tokens[i] for i in tree.path(node))]
        assert whole.scores[n + node] == tree.scores[node]
    assert whole.parents[0] == -1
    assert all(-1 < parent < node for node, parent in enumerate(whole.parents[1:], start=1))
    assert whole.is_chain == tree.is_chain
