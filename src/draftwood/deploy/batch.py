"""A batch of request bodies as one packed run: what all adapters share.

A body is JSON: `prompt` or `messages`, and any field of `SamplingParams`; `stream` asks for pieces.
Text that is no JSON object is a prompt. A request that is wrong gets its own error, and the others
their answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwood.engine.sequence import Sequence as EngineSequence
from draftwood.errors import ConfigError, DraftwoodError, PromptError
from draftwood.llm import LLM
from draftwood.outputs import make_output
from draftwood.sampling import SamplingParams

OnPieces = Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: an HTTP status and a JSON object."""

    status: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Parsed:
    prompt_ids: list[int]
    params: SamplingParams
    stream: bool


class BatchRunner:
    """Answers batches of bodies with one engine.

    Args:
        llm: whose engine; it belongs to this runner's thread.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def answer(self, bodies: Sequence[object], on_pieces: OnPieces | None = None) -> list[Reply]:
        """Runs all bodies of a batch together.

        Args:
            bodies: mappings, JSON, or plain prompts.
            on_pieces: told after each round what is new for each body; "" for those that do not
                stream. Not called while none does.

        Returns:
            One reply per body, in order: 200 with the text, or 400 with an error.
        """
        seqs: dict[int, EngineSequence] = {}
        replies: dict[int, Reply] = {}
        streams: set[int] = set()
        try:
            for i, body in enumerate(bodies):
                try:
                    one = self._parse(body)
                    seqs[i] = self._llm.engine.add(one.prompt_ids, one.params)
                except DraftwoodError as error:
                    replies[i] = Reply(400, {"error": str(error)})
                    continue
                if one.stream:
                    streams.add(i)
            self._run(len(bodies), seqs, streams, on_pieces)
        finally:
            for seq in seqs.values():
                self._llm.engine.abort(seq)
        replies |= {i: Reply(200, _body(seq)) for i, seq in seqs.items()}
        return [replies[i] for i in range(len(bodies))]

    def _run(
        self,
        count: int,
        seqs: Mapping[int, EngineSequence],
        streams: set[int],
        on_pieces: OnPieces | None,
    ) -> None:
        shown = dict.fromkeys(streams, 0)
        while not all(seq.finished for seq in seqs.values()):
            self._llm.engine.step()
            pieces = [""] * count
            for i, start in shown.items():
                text = seqs[i].visible_text()
                pieces[i], shown[i] = text[start:], len(text)
            if on_pieces is not None and any(pieces):
                on_pieces(pieces)

    def _parse(self, body: object) -> _Parsed:
        values = dict(_mapping(body))
        stream = bool(values.pop("stream", False))
        ids = self._prompt_ids(values)
        try:
            params = SamplingParams.from_dict(values)
        except TypeError as error:
            raise ConfigError(f"the parameters cannot be used: {error}") from error
        if params.n > 1:
            raise ConfigError(f"n is {params.n}: a request gets one text")
        return _Parsed(ids, params, stream)

    def _prompt_ids(self, values: dict[str, Any]) -> list[int]:
        prompt, messages = values.pop("prompt", None), values.pop("messages", None)
        if (prompt is None) == (messages is None):
            raise PromptError("give either prompt or messages")
        if messages is not None:
            if not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
                raise PromptError("messages is a list of objects with role and content")
            return self._llm.tokenizer.encode_chat(messages)
        if isinstance(prompt, str):
            return self._llm.tokenizer.encode(prompt)
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return prompt
        raise PromptError("prompt is a text or a list of token ids")


def _mapping(body: object) -> Mapping[str, Any]:
    """A body as a mapping.

    Raises:
        PromptError: it is neither JSON nor text.
    """
    if isinstance(body, bytes | bytearray):
        try:
            body = bytes(body).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise PromptError("the body is not valid UTF-8") from error
    if isinstance(body, str):
        try:
            value = json.loads(body)
        except ValueError:
            value = None
        return value if isinstance(value, dict) else {"prompt": body}
    if not isinstance(body, Mapping):
        raise PromptError("the body is a JSON object or a text")
    return body


def _body(seq: EngineSequence) -> dict[str, Any]:
    output = make_output(seq)
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(output.token_ids),
            "cached_tokens": output.metrics.num_cached_tokens,
        },
    }
