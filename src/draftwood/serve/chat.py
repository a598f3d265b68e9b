"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwood.serve.errors import ApiError
from draftwood.serve.formats import Json, chat_logprobs
from draftwood.serve.generation import Piece
from draftwood.serve.messages import template_messages
from draftwood.serve.requests import ChatRequest
from draftwood.serve.responder import Responder
from draftwood.serve.sampling import chat_params
from draftwood.serve.service import Answer, Caller, Service
from draftwood.serve.tools import Call, ToolReader, ToolUse, tool_use

_OWN_VARIABLES = frozenset({"conversation", "messages", "tools", "tokenize", "return_dict"})


async def start_chat(service: Service, body: ChatRequest, caller: Caller) -> ChatResponder:
    """Queues a chat request; returns who writes its response.

    Raises:
        ApiError, DraftwoodError: it cannot be served.
    """
    service.check_model(body.model)
    tools = tool_use(body)
    params = chat_params(body, tools.structured)
    messages = template_messages(body.messages)
    variables = body.chat_template_kwargs or {}
    own = sorted(_OWN_VARIABLES & set(variables))
    if own:
        raise ApiError(
            400, f"chat_template_kwargs cannot set {own[0]!r}", param="chat_template_kwargs"
        )
    tokenizer = service.llm.tokenizer
    prompt_ids = await service.off_loop(
        lambda: tokenizer.encode_chat(messages, tools.shown, **variables)
    )
    answer = service.open(body, [prompt_ids], params, caller)
    await answer.accepted()
    return ChatResponder(service, body, answer, tools)


async def reopen_chat(service: Service, body: ChatRequest, answer: Answer) -> ChatResponder:
    """Who writes the response to a request that is kept."""
    return ChatResponder(service, body, answer, tool_use(body))


@dataclass(slots=True)
class _Output:
    """What has come of one output so far."""

    reader: ToolReader | None
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    begun: bool = False


class ChatResponder(Responder):
    """Writes chat completions.

    Args:
        service, body, answer: see `Responder`.
        tools: what the request says about tools.
    """

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest, answer: Answer, tools: ToolUse) -> None:
        super().__init__(service, body, answer)
        self._wants_logprobs = bool(body.logprobs)
        self._outputs = [_Output(tools.reader(f"{self.id}:{i}")) for i in range(answer.num_outputs)]

    def take(self, piece: Piece) -> None:
        """Keeps a piece for the whole."""
        output = self._outputs[piece.index]
        text, calls = _read(output, piece)
        output.text += text
        output.calls += calls
        output.logprobs += self._logprobs(piece)

    def choice(self, index: int) -> Json:
        """A whole answer."""
        output = self._outputs[index]
        message: Json = {"role": "assistant", "content": output.text, "refusal": None}
        if output.calls:
            message["content"] = output.text or None
            message["tool_calls"] = [call.to_json() for call in output.calls]
        logprobs = {"content": output.logprobs, "refusal": None} if self._wants_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs} | self._finish(index)

    def delta(self, piece: Piece) -> Json:
        """A piece of an answer; the first one says whose it is."""
        output = self._outputs[piece.index]
        text, calls = _read(output, piece)
        delta: Json = {"content": text}
        if not output.begun:
            output.begun = True
            delta = {"role": "assistant"} | delta
        if calls:
            first = len(output.calls)
            delta["tool_calls"] = [
                {"index": first + i} | call.to_json() for i, call in enumerate(calls)
            ]
            output.calls += calls
        logprobs = self._logprobs(piece)
        shown = {"content": logprobs, "refusal": None} if logprobs else None
        choice = {"index": piece.index, "delta": delta, "logprobs": shown}
        return choice | self._finish(piece.index)

    def _logprobs(self, piece: Piece) -> list[Json]:
        if not self._wants_logprobs:
            return []
        return [chat_logprobs(one, self._texts) for one in self.shown(piece)]

    def _finish(self, index: int) -> Json:
        ending = self._endings.get(index)
        if ending is None:
            return {"finish_reason": None}
        called = self._outputs[index].calls and ending.reason == "stop"
        reason = "tool_calls" if called else ending.reason
        return {"finish_reason": reason, "stop_reason": ending.stop}


def _read(output: _Output, piece: Piece) -> tuple[str, list[Call]]:
    """What of a piece is text to show, and which calls it completes."""
    if output.reader is None:
        return piece.text, []
    found = output.reader.read(piece.text, ended=piece.ending is not None)
    return found.text, list(found.calls)
