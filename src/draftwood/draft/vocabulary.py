"""Whether two models speak the same tokens."""

from __future__ import annotations

from draftwood.errors import VocabularyError
from draftwood.text import Tokenizer


def shared_vocabulary(target: Tokenizer, draft: Tokenizer) -> int:
    """How many leading ids mean the same string for both.

    Sizes are not compared: checkpoints pad their vocabularies differently, and equal sizes do not
    make equal tokens.

    Raises:
        VocabularyError: an id means different strings.
    """
    pairs = zip(target.token_strings, draft.token_strings, strict=False)
    for token, (ours, theirs) in enumerate(pairs):
        if ours != theirs:
            raise VocabularyError(
                f"the draft model has another vocabulary than the target: token {token} is "
                f"{theirs!r} for the draft and {ours!r} for the target; choose a draft model of "
                "the same family, or drafter 'auto', which needs none"
            )
    return min(len(target), len(draft))
