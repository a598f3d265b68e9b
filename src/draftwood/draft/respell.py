"""A draft model's tree of its own tokens, said in the target's.

String-level exact match (Timor et al., arXiv 2502.05202): what the draft wrote is read as text and
cut into the target's tokens. Every path is spelled together with the last few committed tokens, as
the target would spell it in one go, and paths with a common beginning become one trie.

Two things are left to experience, for a wrong guess costs little here: the last token of a path
may be the beginning of a longer one (the paper drops it), and where the committed tokens would be
spelled otherwise together with the path (a prompt that ends in a space, say) the path is spelled
alone. Both are kinds of evidence of their own, with an acceptance of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from draftwood.draft.grow import Calibrator
from draftwood.draft.mirror import look_behind
from draftwood.draft.vocabulary import Bridge
from draftwood.text import Speller
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder

_WHOLE, _LAST, _ALONE = "text", "last", "alone"
_TRUST = {_WHOLE: 1.0, _LAST: 0.5, _ALONE: 0.5}


@dataclass(frozen=True, slots=True)
class _Path:
    """What the draft wrote from the root to a leaf.

    Attributes:
        data: its bytes, up to a special token if there is one.
        ends: how many bytes there are up to the end of each draft token.
        scores: of the draft tokens.
        special: the target's id of the special token that ends it, and its score.
    """

    data: bytes
    ends: tuple[int, ...]
    scores: tuple[float, ...]
    special: tuple[int, float] | None


def respell(
    draft: TokenTree, tokens: Sequence[int], bridge: Bridge, calibrator: Calibrator
) -> TokenTree:
    """The tree of target tokens that `draft` spells.

    Args:
        draft: a tree of draft tokens; its scores are the draft's own probabilities.
        tokens: the target's committed text; its last token is the root.
        bridge: between the vocabularies.
        calibrator: what became of such guesses before.

    Returns:
        A tree whose nodes score as the draft token that completes them, calibrated.
    """
    context = _context(tokens, bridge.target)
    trie = TreeBuilder(tokens[-1])
    parents = set(draft.parents)
    # Deepest first: where two paths agree on a token, the one that goes on knows it is whole.
    leaves = [node for node in range(1, len(draft)) if node not in parents]
    for leaf in sorted(leaves, key=lambda node: -draft.depths[node]):
        _add(trie, _read(draft, leaf, bridge), context, bridge.target)
    return _calibrated(trie, calibrator)


def _context(tokens: Sequence[int], speller: Speller) -> Sequence[int]:
    """The last committed tokens, as far as they are spelled as the target would spell them."""
    recent = tokens[-64:]
    size = len(speller.table)
    breaks = [i for i, t in enumerate(recent) if t >= size or speller.table[t] is None]
    recent = recent[breaks[-1] + 1 :] if breaks else recent
    window = recent[look_behind(recent, speller.table) :]
    for candidate in (window, window[-1:]):
        if speller.encode(speller.spell(candidate)) == list(candidate):
            return candidate
    return ()


def _read(draft: TokenTree, leaf: int, bridge: Bridge) -> _Path:
    data, ends, scores = bytearray(), list[int](), list[float]()
    for node in draft.path(leaf)[1:]:
        token = draft.tokens[node]
        if token in bridge.specials:
            end = (bridge.to_target[token], draft.scores[node])
            return _Path(bytes(data), tuple(ends), tuple(scores), end)
        data += bridge.draft.table[token] or b""
        ends.append(len(data))
        scores.append(draft.scores[node])
    return _Path(bytes(data), tuple(ends), tuple(scores), None)


def _add(trie: TreeBuilder, path: _Path, context: Sequence[int], speller: Speller) -> None:
    tokens, kind = _tokens(path.data, context, speller)
    node = stop = 0
    for i, token in enumerate(tokens):
        stop += len(speller.table[token] or b"")
        score = path.scores[bisect_left(path.ends, stop)]
        last = i == len(tokens) - 1 and path.special is None
        node = trie.add(node, token, score, _LAST if last and kind is _WHOLE else kind)
    if path.special is not None:
        trie.add(node, *path.special, kind)


def _tokens(data: bytes, context: Sequence[int], speller: Speller) -> tuple[Sequence[int], str]:
    """Target tokens that spell the longest part of `data` that can be, and the kind of guess."""
    together = speller.encode(speller.spell(context) + data)
    count = len(context)
    if together[:count] == list(context):
        return _faithful(together[count:], data, speller), _WHOLE
    return _faithful(speller.encode(data), data, speller), _ALONE


def _faithful(tokens: Sequence[int], data: bytes, speller: Speller) -> Sequence[int]:
    """The first of `tokens` that spell the beginning of `data`."""
    done = 0
    for i, token in enumerate(tokens):
        piece = speller.table[token] or b""
        if not piece or not data.startswith(piece, done):
            return tokens[:i]
        done += len(piece)
    return tokens


def _calibrated(trie: TreeBuilder, calibrator: Calibrator) -> TokenTree:
    """The trie with scores from experience: of each node given its parent, by what it was given."""
    done = TreeBuilder(trie.tokens[0])
    for node in range(1, len(trie)):
        parent, kind = trie.parents[node], trie.sources[node]
        share = trie.scores[node] / max(trie.scores[parent], 1e-9)
        label = f"model:{kind}.{int(share * 10)}"
        score = calibrator.probability(label, share * _TRUST[kind]) * done.scores[parent]
        done.add(parent, trie.tokens[node], score, label)
    return done.build()
