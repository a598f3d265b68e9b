"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwood.errors import PromptError
from draftwood.sampling import TokenLogprobs
from draftwood.serve.formats import Json, text_logprobs
from draftwood.serve.generation import Piece
from draftwood.serve.requests import CompletionRequest
from draftwood.serve.responder import Responder
from draftwood.serve.sampling import completion_params
from draftwood.serve.service import Answer, Caller, Service
from draftwood.text import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids and, for echoing, as text.

    Attributes:
        ids: as the model sees it.
        text: as the client sent it, or the text of its ids.
        offsets: where each token's text begins; empty unless log-probabilities are wanted too.
    """

    ids: list[int]
    text: str = ""
    offsets: tuple[int, ...] = ()


async def start_completion(
    service: Service, body: CompletionRequest, caller: Caller
) -> CompletionResponder:
    """Queues a completion request; returns who writes its response.

    Raises:
        ApiError, DraftwoodError: it cannot be served.
    """
    service.check_model(body.model)
    params = completion_params(body)
    tokenizer = service.llm.tokenizer
    prompts = await service.off_loop(lambda: read_prompts(body, tokenizer))
    answer = service.open(body, [prompt.ids for prompt in prompts], params, caller)
    await answer.accepted()
    return CompletionResponder(service, body, answer, prompts)


async def reopen_completion(
    service: Service, body: CompletionRequest, answer: Answer
) -> CompletionResponder:
    """Who writes the response to a request that is kept."""
    prompts = [Prompt(list(one.prompt_ids)) for one in answer.generations]
    if body.echo:
        tokenizer = service.llm.tokenizer
        prompts = await service.off_loop(lambda: read_prompts(body, tokenizer))
    return CompletionResponder(service, body, answer, prompts)


def read_prompts(body: CompletionRequest, tokenizer: Tokenizer) -> list[Prompt]:
    """All prompts of a request: a text, texts, ids, or lists of ids.

    Raises:
        PromptError: one is empty, or holds an id that does not exist.
    """
    given = body.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    items: Sequence[object] = given if several else [given]
    prompts = []
    for item in items:
        ids = tokenizer.encode(item) if isinstance(item, str) else _ids(item, tokenizer)
        if not ids:
            raise PromptError("the prompt is empty: give at least one token")
        prompts.append(_echoed(body, item, ids, tokenizer) if body.echo else Prompt(ids))
    return prompts


def _ids(item: object, tokenizer: Tokenizer) -> list[int]:
    assert isinstance(item, list)
    for token in item:
        if token >= len(tokenizer):
            raise PromptError(
                f"token id {token} does not exist: the vocabulary has {len(tokenizer)} ids"
            )
    return list(item)


def _echoed(body: CompletionRequest, item: object, ids: list[int], tokenizer: Tokenizer) -> Prompt:
    text = item if isinstance(item, str) else tokenizer.decode(ids, skip_special_tokens=False)
    if body.logprobs is None:
        return Prompt(ids, text)
    reader = Detokenizer(tokenizer, (), skip_special_tokens=False)
    for token in ids:
        reader.append(token)
    return Prompt(ids, text, tuple(min(offset, len(text)) for offset in reader.offsets))


@dataclass(slots=True)
class _Output:
    """What has come of one output so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    begun: bool = False


class CompletionResponder(Responder):
    """Writes text completions.

    Args:
        service, body, answer: see `Responder`.
        prompts: of the request, in order.
    """

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        answer: Answer,
        prompts: Sequence[Prompt],
    ) -> None:
        super().__init__(service, body, answer)
        self._prompts = prompts
        self._echo = bool(body.echo)
        self._empty = body.max_tokens == 0
        self._wants_logprobs = body.logprobs is not None
        self._outputs = [_Output() for _ in range(answer.num_outputs)]

    def take(self, piece: Piece) -> None:
        """Keeps a piece for the whole."""
        output, new = self._outputs[piece.index], self._new(piece)
        output.text += new.text
        output.tokens += new.tokens
        output.logprobs += new.logprobs
        output.offsets += new.offsets

    def choice(self, index: int) -> Json:
        """A whole text."""
        return self._written(index, self._outputs[index])

    def delta(self, piece: Piece) -> Json:
        """A piece of a text."""
        return self._written(piece.index, self._new(piece))

    def _new(self, piece: Piece) -> _Output:
        """What a piece adds; the first one begins with the prompt, if that is wanted."""
        output = self._outputs[piece.index]
        new = self._prompt(piece) if self._echo and not output.begun else _Output()
        output.begun = True
        if self._empty:
            return new
        new.text += piece.text
        if self._wants_logprobs:
            shown = self.shown(piece)
            start = len(self._prompts[piece.index // self._n].text)
            new.tokens += [one.token for one in shown]
            new.logprobs += shown
            new.offsets += [start + offset for offset in piece.offsets[: len(shown)]]
        return new

    def _prompt(self, piece: Piece) -> _Output:
        place = piece.index // self._n
        prompt = self._prompts[place]
        if not self._wants_logprobs:
            return _Output(prompt.text)
        known = self._answer.outbox.prompt_logprobs.get(place * self._n, [])
        return _Output(prompt.text, list(prompt.ids), [None, *known], list(prompt.offsets))

    def _written(self, index: int, output: _Output) -> Json:
        ending = self._endings.get(index)
        logprobs = None
        if self._wants_logprobs:
            logprobs = text_logprobs(output.logprobs, output.tokens, output.offsets, self._texts)
        choice: Json = {"index": index, "text": output.text, "logprobs": logprobs}
        if ending is None:
            return choice | {"finish_reason": None}
        reason = "length" if self._empty else ending.reason
        return choice | {"finish_reason": reason, "stop_reason": ending.stop}
