"""From requests to tickets and back."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from dataclasses import replace
from hashlib import blake2b

from draftwood.engine.checkpoint import Maker, SavedRequest
from draftwood.serve.errors import ApiError
from draftwood.serve.generation import Generation, Outbox
from draftwood.serve.held import Held
from draftwood.serve.requests import ChatRequest, CompletionRequest, Sampling
from draftwood.serve.service import Caller
from draftwood.serve.tickets import Ticket

_NO_TEXT = frozenset({"stream", "stream_options"})  # fields that do not change what is said
_BODIES: dict[str, type[Sampling]] = {"chat": ChatRequest, "completion": CompletionRequest}


def ticket_of(held: Held, body: Sampling, caller: Caller, maker: Maker) -> Ticket:
    """The ticket of a request that the engine has accepted."""
    [first, *_] = held.generations
    deadline = first.deadline
    return Ticket(
        owner=caller.owner,
        request_id=caller.request_id,
        kind=kind_of(body),
        body=body.model_dump(mode="json", by_alias=True, exclude_none=True),
        response_id=held.response_id,
        created=held.created,
        client=caller.name,
        priority=first.priority,
        deadline_s=None if deadline is None else deadline - time.monotonic() + time.time(),
        maker=maker,
        prompts=tuple(_begun(one) for one in held.generations),
    )


def generations_of(held: Held, ticket: Ticket) -> list[Generation]:
    """The generations of a request that goes on, without a reader."""
    outbox = Outbox(asyncio.get_running_loop(), 0)
    made: list[Generation] = []
    for saved in ticket.prompts:
        made.append(_generation(saved, outbox, len(made), ticket, held))
    return made


def _generation(
    saved: SavedRequest, outbox: Outbox, place: int, ticket: Ticket, held: Held
) -> Generation:
    left_s = None if ticket.deadline_s is None else ticket.deadline_s - time.time()
    return Generation(
        id=saved.request_id,
        prompt_ids=saved.prompt_ids,
        params=saved.params,
        outbox=outbox,
        first_index=place * saved.params.n,
        priority=ticket.priority,
        client=ticket.client,
        deadline=None if left_s is None else time.monotonic() + left_s,
        wants_rounds=bool(ticket.body.get("rounds") and ticket.body.get("stream")),
        on_end=held.ended,
    )


def fill(outbox: Outbox, ticket: Ticket) -> list[Generation]:
    """Puts a whole answer where its reader looks; returns generations that have ended."""
    assert ticket.outputs is not None
    for piece in ticket.outputs:
        outbox.put(replace(piece))  # a reader may add to what it takes
    for index, logprobs in (ticket.prompt_logprobs or {}).items():
        outbox.prompt_logprobs[index] = list(logprobs)
    return [
        Generation(
            id=saved.request_id,
            prompt_ids=saved.prompt_ids,
            params=saved.params,
            outbox=outbox,
            ended=True,
        )
        for saved in ticket.prompts
    ]


def _begun(one: Generation) -> SavedRequest:
    """A prompt's first output as it was before its first token; what is read here never changes."""
    [first, *_] = one.seqs
    return SavedRequest(
        request_id=one.id,
        tokens=array("i", one.prompt_ids),
        num_prompt_tokens=len(one.prompt_ids),
        params=one.params,
        seed=first.seed,
        max_length=first.max_length,
    )


def kind_of(body: Sampling) -> str:
    """Which endpoint a body is of."""
    return "chat" if isinstance(body, ChatRequest) else "completion"


def body_of(ticket: Ticket) -> Sampling:
    """The request of a ticket."""
    return _BODIES[ticket.kind].model_validate(dict(ticket.body))


def question_of(kind: str, body: Sampling) -> str:
    """A digest of what was asked: two requests with the same one get the same answer."""
    fields = body.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=set(_NO_TEXT))
    text = json.dumps([kind, fields], sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def in_use(request_id: str) -> ApiError:
    """An id that already stands for another request."""
    return ApiError(
        409,
        f"X-Request-Id {request_id!r} is another request's: send the same body to get its answer, "
        "or choose another id",
        code="request_id_in_use",
    )


def unknown(request_id: str) -> ApiError:
    """An id that stands for none."""
    return ApiError(
        404,
        f"request {request_id!r} is not known here, or no longer: send it anew, without "
        "Last-Event-ID",
        code="request_not_found",
    )
