"""Text: tokenizer and incremental detokenizer."""

from draftwood.text.detokenizer import Detokenizer
from draftwood.text.spelling import Speller
from draftwood.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Speller", "Tokenizer"]
