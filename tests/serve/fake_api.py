"""A server with the page and an API that streams a recorded answer, or fails as it is told to.

python -m tests.serve.fake_api      to look at the page by hand, at http://127.0.0.1:8765
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from draftwood.serve.page import mount_page
from tests.serve.record import ANSWERS

MODEL = "smollm2-135m"
KEY = "sesame"
REFUSALS: dict[str, tuple[int, str, dict[str, str]]] = {
    "busy": (429, "queue full", {"Retry-After": "3"}),
    "long": (400, "the prompt has 9000 tokens, and the context holds 2048", {}),
    "broken": (500, "the engine has ended", {}),
}


class FakeAPI:
    """The application and what was asked of it.

    Attributes:
        pace: seconds between chunks times this.
        url: where it runs, once it does.
        wants_key: whether requests need `KEY`.
    """

    def __init__(self, pace: float = 1.0) -> None:
        self.pace = pace
        self.wants_key = False
        self.asked: list[dict[str, Any]] = []
        self.num_open = 0
        self.num_cut = 0
        self.url = ""
        self._answers = json.loads(ANSWERS.read_text(encoding="utf-8"))
        self.question: str = self._answers["question"]
        self.app = FastAPI()
        mount_page(self.app)
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/chat/completions")(self._chat)

    async def _models(self, request: Request) -> Response:
        if not self._may(request):
            return _refusal(401, "wrong key", {})
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.asked.append(body)
        if not self._may(request):
            return _refusal(401, "wrong key", {})
        question = body["messages"][-1]["content"]
        if question in REFUSALS:
            return _refusal(*REFUSALS[question])
        return StreamingResponse(self._stream(body, question), media_type="text/event-stream")

    def _may(self, request: Request) -> bool:
        return not self.wants_key or request.headers.get("Authorization") == f"Bearer {KEY}"

    async def _stream(self, body: dict[str, Any], question: str) -> AsyncIterator[str]:
        answer = self._answers["speculative" if body["speculation"] else "plain"]
        self.num_open += 1
        try:
            yield _event({"choices": [_choice({"role": "assistant", "content": ""})]})
            for number, chunk in enumerate(answer["chunks"]):
                if question == "error" and number == 5:
                    yield _event({"error": {"message": "out of memory", "type": "server_error"}})
                    return
                if question == "cut" and number == 5:
                    return
                rounds = chunk["rounds"]
                await asyncio.sleep(self.pace * sum(one["total_s"] for one in rounds))
                more = {"draftwood": {"rounds": rounds}} if body.get("rounds") else {}
                yield _event({"choices": [_choice({"content": chunk["content"]})], **more})
            yield _event({"choices": [_choice({}, answer["finish_reason"])]})
            yield _event(_sums(answer))
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cut += 1
            raise
        finally:
            self.num_open -= 1


def _choice(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": reason}


def _sums(answer: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = answer["prompt_tokens"], answer["completion_tokens"]
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
        "metrics": {
            "speculative_decoding": {"mean_acceptance_length": answer["mean_acceptance_length"]},
            "num_cached_tokens": answer["num_cached_tokens"],
            "tokens_per_s": answer["tokens_per_s"],
            "plain_tokens_per_s": answer["plain_tokens_per_s"],
        },
    }


def _event(body: dict[str, Any]) -> str:
    whole = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": MODEL, **body}
    return f"data: {json.dumps(whole, ensure_ascii=False)}\n\n"


def _refusal(status: int, message: str, headers: dict[str, str]) -> Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "code": None}}
    return JSONResponse(body, status, headers=headers)


class Running:
    """The application on a port of its own, in a thread."""

    def __init__(self, app: FastAPI, port: int = 0) -> None:
        config = uvicorn.Config(
            app, host="127.0.0.1", port=port, log_level="error", lifespan="off", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        end = time.monotonic() + 20
        while not self._server.started:
            assert time.monotonic() < end, "the server does not start"
            time.sleep(0.01)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Ends it, whatever is still open."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)


if __name__ == "__main__":
    running = Running(FakeAPI().app, 8765)
    print(running.url)
    threading.Event().wait()
