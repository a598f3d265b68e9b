"""What the token ids of two models have to do with each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from draftwood.errors import VocabularyError
from draftwood.text import Speller, Tokenizer


def shared_vocabulary(target: Tokenizer, draft: Tokenizer) -> int | None:
    """How many leading ids mean the same string for both; None when one means another.

    Sizes are not compared: checkpoints pad their vocabularies differently, and equal sizes do not
    make equal tokens.
    """
    pairs = zip(target.token_strings, draft.token_strings, strict=False)
    same = all(ours == theirs for ours, theirs in pairs)
    return min(len(target), len(draft)) if same else None


@dataclass(frozen=True, slots=True)
class Bridge:
    """Two vocabularies and how one's tokens are said in the other.

    Special tokens meet by their string; an end token without a namesake meets the other's end
    token, and so do the tokens that a text begins with.

    Attributes:
        target, draft: the bytes of their tokens.
        to_draft: by target id: the bytes it adds to a text, or the id of the draft's special token
            that stands for it. A special token that has none is written out.
        to_target: draft id to target id, for tokens of equal bytes and for special tokens.
        specials: the draft's special tokens among them.
    """

    target: Speller
    draft: Speller
    to_draft: tuple[bytes | int, ...]
    to_target: dict[int, int]
    specials: frozenset[int]

    @staticmethod
    def make(
        target: Tokenizer,
        draft: Tokenizer,
        *,
        target_size: int | None = None,
        draft_size: int | None = None,
    ) -> Bridge:
        """The bridge between two tokenizers; ids from the sizes on do not exist for the models.

        Raises:
            VocabularyError: one of them does not say what bytes its tokens are.
        """
        ours = _speller(target, target_size, "target")
        theirs = _speller(draft, draft_size, "draft model")
        special = {theirs.specials[w]: t for w, t in ours.specials.items() if w in theirs.specials}
        _pair(special, draft.eos_token_ids & set(theirs.names), target.eos_token_ids)
        _pair(special, theirs.prefix, ours.prefix)
        plain = {t: ours.ids[data] for data, t in theirs.ids.items() if data in ours.ids}
        return Bridge(
            ours,
            theirs,
            tuple(_sayings(ours, special)),
            special | plain,
            frozenset(special),
        )

    @property
    def share(self) -> float:
        """Share of the draft's tokens that the target has too."""
        return (len(self.to_target) - len(self.specials)) / max(len(self.draft.ids), 1)


def _speller(tokenizer: Tokenizer, size: int | None, whose: str) -> Speller:
    try:
        return Speller(tokenizer, size)
    except VocabularyError as error:
        raise VocabularyError(
            f"the draft model has another vocabulary than the target, and the {whose}'s cannot be "
            f"read: {error}; choose a draft model of the same family, or drafter 'auto', which "
            "needs none"
        ) from error


def _pair(special: dict[int, int], theirs: Iterable[int], ours: Iterable[int]) -> None:
    """Adds pairs of what plays the same part and has no namesake."""
    taken = set(special.values())
    free = [token for token in sorted(ours) if token not in taken]
    for token in sorted(theirs):
        if token not in special and free:
            special[token] = free.pop(0)


def _sayings(ours: Speller, special: dict[int, int]) -> Iterable[bytes | int]:
    back = {target: draft for draft, target in special.items()}
    for token, data in enumerate(ours.table):
        if token in back:
            yield back[token]
        elif token in ours.names and token not in ours.prefix:
            yield ours.names[token].encode()
        else:
            yield data or b""
