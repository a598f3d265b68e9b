"""What a request's reader has been given, so that another replica can go on from there.

A text is a function of its request, so a second try gives the same one from its beginning, and
what was given already is left out. It is compared on the way: should two replicas disagree (other
processors, other versions), the stream ends in an error rather than in a text made of both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwood.serve.errors import ApiError
from draftwood.serve.generation import Piece


@dataclass(slots=True)
class _Output:
    """What was given of one output, and how much of it this try has said again."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    num_chars_again: int = 0
    num_tokens_again: int = 0
    num_logprobs_again: int = 0
    ended: bool = False


class Progress:
    """Pieces of all outputs of one prompt, each part of them once, over as many tries as it takes.

    Attributes:
        num_outputs_ended: how many have come to their end.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, _Output] = {}
        self.num_outputs_ended = 0

    @property
    def begun(self) -> bool:
        """Whether anything was given."""
        return bool(self._outputs)

    def again(self) -> None:
        """Another try begins."""
        for output in self._outputs.values():
            output.num_chars_again = output.num_tokens_again = output.num_logprobs_again = 0

    def fresh(self, piece: Piece) -> Piece | None:
        """What of a piece was not given yet; None for nothing.

        Raises:
            ApiError: this try says something else than an earlier one.
        """
        output = self._outputs.setdefault(piece.index, _Output())
        if output.ended:
            return None
        chars = min(len(output.text) - output.num_chars_again, len(piece.text))
        tokens = min(len(output.tokens) - output.num_tokens_again, len(piece.token_ids))
        logprobs = min(output.num_logprobs - output.num_logprobs_again, len(piece.logprobs))
        begin, start = output.num_chars_again, output.num_tokens_again
        same = (
            output.text[begin : begin + chars] == piece.text[:chars]
            and output.tokens[start : start + tokens] == piece.token_ids[:tokens]
        )
        output.num_chars_again += len(piece.text)
        output.num_tokens_again += len(piece.token_ids)
        output.num_logprobs_again += len(piece.logprobs)
        behind = piece.ending is not None and (
            output.num_chars_again < len(output.text)
            or output.num_tokens_again < len(output.tokens)
        )
        if not same or behind:
            raise ApiError(500, "two replicas gave different texts", code="replicas_disagree")
        new = Piece(
            piece.index,
            piece.text[chars:],
            piece.token_ids[tokens:],
            piece.logprobs[logprobs:],
            piece.offsets[tokens:],
            piece.ending,
        )
        output.text += new.text
        output.tokens += new.token_ids
        output.num_logprobs += len(new.logprobs)
        output.ended = piece.ending is not None
        self.num_outputs_ended += output.ended
        return new if new.text or new.token_ids or new.ending is not None else None
