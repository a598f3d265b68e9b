"""What the front and a replica say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draftwood.models.base import ModelSpec
from draftwood.sampling import SamplingParams, TokenLogprobs
from draftwood.serve.errors import ApiError, as_api_error
from draftwood.serve.generation import Piece


@dataclass(frozen=True, slots=True)
class Addressed:
    """A call for one replica.

    Attributes:
        replica: its name; "" for any.
        only: no other will do: the call waits for it.
    """

    replica: str = ""
    only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Addressed):
    """A prompt and what to make of it. Sent twice, it gives the same text twice.

    Attributes:
        id, prompt_ids, params, first_index, priority, client, wants_rounds: see `Generation`. The
            parameters have a seed.
        seconds: that are left for it; None for no limit.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    first_index: int = 0
    priority: int = 0
    client: str = ""
    wants_rounds: bool = False
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The replica has found a job sound, and begins."""


@dataclass(frozen=True, slots=True)
class Told:
    """What is new of a job's texts.

    Attributes:
        pieces, rounds: see `News`.
        prompt_logprobs: see `Outbox`; in the first message that has any.
    """

    pieces: list[Piece]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A job came to no end, or to a wrong one: an `ApiError` as a value."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] | None = None

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        """Any error, as the API says it."""
        shown = as_api_error(error)
        headers = dict(shown.headers) if shown.headers else None
        return cls(shown.status_code, str(shown.detail), shown.param, shown.code, headers)

    @property
    def error(self) -> ApiError:
        """The same to raise."""
        return ApiError(
            self.status, self.message, param=self.param, code=self.code, headers=self.headers
        )


Message = Accepted | Told | Refusal


@dataclass(frozen=True, slots=True)
class Facts:
    """What a replica or a draft actor says of itself when it is ready.

    Attributes:
        spec: its model; None if it could not be loaded.
        problem: why not.
        kind: the name of the error's class, for the front to raise the same.
        block_size: of its KV.
        drafter: the name of its drafter.
        num_tokens: of a draft actor: ids that its model shares with the target.
    """

    spec: ModelSpec | None = None
    problem: str = ""
    kind: str = ""
    block_size: int = 16
    drafter: str = ""
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """How a replica fares.

    Attributes:
        num_open: texts accepted and not ended.
        num_waiting_tokens: prompt tokens that it has yet to read.
        metrics: what Prometheus would read from it.
        drafts: how many sequences and rounds had a draft in time, waited for one, or went without.
    """

    num_open: int
    num_waiting_tokens: int
    metrics: bytes = b""
    drafts: dict[str, int] = field(default_factory=dict)
