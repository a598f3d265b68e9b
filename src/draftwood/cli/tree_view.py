"""Each round's tree in the terminal: what was proposed, by whom, and what was right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from draftwood.draft.base import Outcome
    from draftwood.engine.observers import Round
    from draftwood.text import Tokenizer
    from draftwood.tree import TokenTree

_ACCEPTED, _REJECTED, _OWN = "✓", "·", "⇒"


class TreeView:
    """An observer that prints trees.

    Args:
        tokenizer: for the tokens' texts.
        console: where to print.
    """

    def __init__(self, tokenizer: Tokenizer, console: Console) -> None:
        self._tokenizer = tokenizer
        self._console = console
        self._num_rounds: dict[str, int] = {}

    def on_round(self, round_: Round) -> None:
        """Prints the trees of a round."""
        for name, outcome in zip(round_.request_ids, round_.outcomes, strict=True):
            number = self._num_rounds.get(name, 0) + 1
            self._num_rounds[name] = number
            self._print(Text(self._title(name, number, outcome), style="bold"))
            for line in self._lines(outcome):
                self._print(line)

    def _print(self, line: Text) -> None:
        self._console.print(line, no_wrap=True, overflow="ellipsis", crop=self._console.is_terminal)

    def _title(self, name: str, number: int, outcome: Outcome) -> str:
        verdict = outcome.verdict
        return (
            f"{name}, round {number}: {_count(verdict.num_drafted, 'draft token')},"
            f" {verdict.num_accepted} accepted; text {self._spell(*outcome.tokens)}"
        )

    def _lines(self, outcome: Outcome) -> Iterator[Text]:
        tree, path = outcome.tree, frozenset(outcome.verdict.path)
        last = outcome.verdict.path[-1]
        children = _children(tree)

        def below(node: int, indent: str) -> Iterator[Text]:
            rest = children[node]
            if node == last:
                bonus = self._spell(outcome.verdict.next_token)
                yield _line(f"{indent}{'├' if rest else '└'}─{_OWN} ", bonus, "target", "cyan")
            for child in rest:
                end = child == rest[-1]
                yield self._node(tree, child, f"{indent}{'└' if end else '├'}─", child in path)
                yield from below(child, indent + ("  " if end else "│ "))

        yield _line("", self._spell(tree.tokens[0]), "root", "")
        yield from below(0, "")

    def _node(self, tree: TokenTree, node: int, indent: str, accepted: bool) -> Text:
        return _line(
            f"{indent}{_ACCEPTED if accepted else _REJECTED} ",
            self._spell(tree.tokens[node]),
            f"{tree.sources[node] or '?'} {tree.scores[node]:.2f}",
            "bold green" if accepted else "dim",
        )

    def _spell(self, *tokens: int) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return json.dumps(text, ensure_ascii=False)


def _line(before: str, token: str, note: str, style: str) -> Text:
    return Text.assemble((before, ""), (token, style), "  ", (note, "dim"))


def _children(tree: TokenTree) -> list[list[int]]:
    """Children of each node, best score first."""
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents[1:], start=1):
        children[parent].append(node)
    for nodes in children:
        nodes.sort(key=lambda node: -tree.scores[node])
    return children


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
