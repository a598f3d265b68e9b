"""A batch of prompts as one job that survives a crash: the same command goes on with it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from draftwood.cli.running import Request
    from draftwood.engine.checkpoint import CheckpointWriter
    from draftwood.engine.sequence import Sequence as EngineSequence
    from draftwood.outputs import RequestOutput


def names_of(requests: Sequence[Request]) -> list[str]:
    """An id for each request by which the next run of the same command knows it again."""
    return [f"{i}-{_digest(request)}" for i, request in enumerate(requests, start=1)]


def resume_job(checkpoints: CheckpointWriter, names: Sequence[str]) -> dict[str, EngineSequence]:
    """What an earlier run left behind, queued again, by id.

    Raises:
        ConfigError: it was another command's.
    """
    if checkpoints.pending.keys() - set(names):
        raise ConfigError(
            "the checkpoint holds other prompts or parameters than these: repeat the command "
            "that made it, or use another folder"
        )
    return {seq.request_id: seq for seq in checkpoints.resume()}


def end_job(checkpoints: CheckpointWriter, outputs: Sequence[RequestOutput]) -> None:
    """The outputs have been printed: the checkpoint has served."""
    for output in outputs:
        checkpoints.forget(output.request_id)
    checkpoints.save()


def _digest(request: Request) -> str:
    text = repr((list(request.prompt_ids), request.params))
    return blake2b(text.encode(), digest_size=6).hexdigest()
