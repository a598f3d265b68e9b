"""Structured output: the form that a text must have, token by token.

A grammar is a rule like any other: at every node it looks at the node's own path and removes what
may not come next. It also knows things before the target does. Drafts that it forbids are dropped
before they are verified, and where it leaves one token only, that token is written down without
asking the target. None of this depends on what was drafted, so the text does not either.

What compiles grammars is outside (`draftwood.grammars`); here is what it must give.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.sampling.structured import StructuredOutputsParams
from draftwood.tree import TokenTree
from draftwood.tree.token_tree import TreeBuilder

_log = logging.getLogger("draftwood")
_SOURCE = "grammar"

# A node to add: its index in the draft if it has one, token, score, source, parent, depth.
_Step = tuple[int | None, int, float, str, int, int]


class GrammarFailureError(Exception):
    """A grammar cannot say what comes next: it has run into a limit, or nothing may."""


class Matcher(Protocol):
    """A place in a grammar, reached by the tokens consumed so far.

    What it says is a function of those tokens. Every method but `fresh` may raise
    GrammarFailureError; then `fresh` is the only one that may still be called.
    """

    def fresh(self) -> Matcher:
        """Another matcher of the same grammar, at its beginning."""

    def consume(self, token: int) -> bool:
        """Moves on by a token; or says False and stays, if the grammar has no such text."""

    def rollback(self, num_tokens: int) -> None:
        """Moves back by so many tokens."""

    def legal(self) -> NDArray[np.bool_]:
        """[vocab_size] booleans: what may come next, the end of the text included."""

    def sole(self) -> int | None:
        """The one legal token, where that is known at little cost; never the end of the text."""


class Compiler(Protocol):
    """Makes matchers."""

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        """A matcher at the beginning of what `params` describes.

        Raises:
            ConfigError: the description is wrong, or the tokenizer cannot be used.
            MissingExtraError: the package that compiles it is not installed.
        """


class Grammar:
    """One request's grammar.

    Args:
        matcher: at the grammar's beginning.
        end_ids: tokens that end the text.
        vocab_size: how many logits there are.
    """

    def __init__(self, matcher: Matcher, end_ids: frozenset[int], vocab_size: int) -> None:
        self._cursor = _Cursor(matcher)
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        # A round's last question is the next one's first: its answer is kept.
        self._last: tuple[list[int], NDArray[np.bool_]] | None = None
        self._failed_at: int | None = None

    def restrict(self, logits: Tensor, raw: Tensor, output: Sequence[int]) -> Tensor:
        """Logits with what may not follow `output` at minus infinity.

        Where the other rules have banned all that is legal, the grammar wins: the legal tokens
        then have the logits from before those rules.

        Args:
            logits: [V] float32 after all other rules.
            raw: [V] float32 before them.
            output: the generated tokens and the path, down to the node.
        """
        illegal = torch.from_numpy(~self._legal(output)).to(logits.device)
        restricted = logits.masked_fill(illegal, float("-inf"))
        if restricted.max() > float("-inf"):
            return restricted
        return raw.clamp(min=-1e9).masked_fill(illegal, float("-inf"))

    def forced(self, output: Sequence[int]) -> int | None:
        """The token after `output` if it is the only legal one, the end of the text included."""
        legal = np.flatnonzero(self._legal(output))
        return int(legal[0]) if len(legal) == 1 else None

    def has_failed(self, num_tokens: int) -> bool:
        """Whether a text of so many tokens was ended because the grammar was at a loss."""
        return self._failed_at is not None and num_tokens > self._failed_at

    def guide(self, tree: TokenTree, output: Sequence[int], budget: int) -> TokenTree:
        """The tree without what is illegal, and with tokens that alone may follow its nodes.

        A drafted end of the text is dropped too: verification finds it without a row of its own.

        Args:
            tree: a draft behind `output`.
            output: the generated tokens.
            budget: most draft nodes.
        """
        try:
            self._cursor.move(output)
            return _guided(tree, self._cursor, self._end_ids, budget)
        except GrammarFailureError:
            self._cursor.reset()  # what was only guessed must not spoil what is to come
            return TokenTree.root(tree.tokens[0])

    def _legal(self, output: Sequence[int]) -> NDArray[np.bool_]:
        """[V] booleans: what may follow. Where the grammar is at a loss, an end token alone."""
        if self._failed_at is None:
            try:
                return self._ask(list(output))
            except GrammarFailureError as error:
                self._failed_at = len(output)
                _log.warning("a grammar failed after %d tokens: %s", len(output), error)
        end_only = np.zeros(self._vocab_size, np.bool_)
        end_only[min(self._end_ids)] = True
        return end_only

    def _ask(self, output: list[int]) -> NDArray[np.bool_]:
        if self._last is None or self._last[0] != output:
            self._cursor.move(output)
            legal = self._cursor.matcher.legal()
            if not legal.any():
                raise GrammarFailureError("no token of the vocabulary may come next")
            self._last = output, legal
        return self._last[1]


class _Cursor:
    """A matcher that knows its way back.

    Attributes:
        matcher: what moves.
        path: the tokens it has consumed.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.path: list[int] = []

    def reset(self) -> None:
        """Back to the beginning, whatever happened to the matcher."""
        self.matcher, self.path = self.matcher.fresh(), []

    def back(self, length: int) -> None:
        """Keeps the first `length` tokens of the path."""
        if length < len(self.path):
            self.matcher.rollback(len(self.path) - length)
            del self.path[length:]

    def consume(self, token: int) -> bool:
        """Goes on by a token if the grammar has such a text."""
        consumed = self.matcher.consume(token)
        if consumed:
            self.path.append(token)
        return consumed

    def move(self, tokens: Sequence[int]) -> None:
        """Goes to where exactly `tokens` are consumed, over what both paths have in common."""
        self.back(_num_common(self.path, tokens))
        for token in tokens[len(self.path) :]:
            if not self.consume(token):
                raise GrammarFailureError(f"token {token} is not in the grammar")


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two paths have in common at their beginning."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:  # nearly always, and ten times faster than looking at each
        return n
    return next(i for i in range(n) if a[i] != b[i])


def _guided(tree: TokenTree, cursor: _Cursor, end_ids: frozenset[int], budget: int) -> TokenTree:
    """See `Grammar.guide`. Depth first, so that the cursor walks each edge once."""
    builder, start = TreeBuilder(tree.tokens[0]), len(cursor.path)
    children: dict[int | None, list[int]] = {}
    for node in range(1, len(tree)):
        children.setdefault(tree.parents[node], []).append(node)

    def steps(old: int | None, new: int, depth: int) -> list[_Step]:
        drafted = {tree.tokens[node]: node for node in children.get(old, ())}
        sole = cursor.matcher.sole()
        if sole is None:
            return [
                (node, token, tree.scores[node], tree.sources[node], new, depth)
                for token, node in drafted.items()
                if token not in end_ids
            ]
        if sole not in drafted and len(builder) > budget:
            return []
        return [(drafted.get(sole), sole, builder.scores[new], _SOURCE, new, depth)]

    pending = steps(0, 0, 1)
    while pending:
        old, token, score, source, parent, depth = pending.pop()
        cursor.back(start + depth - 1)
        if cursor.consume(token):
            pending += steps(old, builder.add(parent, token, score, source), depth + 1)
    return builder.build().best(budget + 1)
