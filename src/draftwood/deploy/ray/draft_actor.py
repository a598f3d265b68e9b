"""A draft model in an actor of its own, and how an engine asks it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from draftwood.arguments import device_of, dtype_of
from draftwood.deploy.ray.cluster import ray
from draftwood.deploy.ray.messages import Facts
from draftwood.draft.remote import Answer, Ask, DraftDesk
from draftwood.draft.vocabulary import shared_vocabulary
from draftwood.errors import ConfigError, DraftwoodError
from draftwood.kv import BlockPool
from draftwood.models.load import Placement, load_model
from draftwood.models.memory import available_bytes
from draftwood.models.sources import resolve
from draftwood.text import Tokenizer

_BLOCK = 16
_CONTEXTS = 4  # full contexts of KV that a draft actor has room for, if nobody says otherwise
_CALL_S = 10.0  # an answer that takes longer does not come


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """What a draft actor loads.

    Attributes:
        model: the draft model, as `LLM` takes it.
        target: the model it drafts for: the two must share their vocabulary.
        device, dtype, quantization: see `LLM`.
        kv_memory: bytes for its KV; None for four full contexts, within an eighth of the memory.
        debug_kv: see `EngineConfig`.
    """

    model: str
    target: str
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_memory: int | None = None
    debug_kv: bool = False


class DraftActor:
    """A desk in a process of its own. Its KV never leaves it.

    Args:
        settings: what to load. What is wrong with it is told by `about`.
    """

    def __init__(self, settings: DraftSettings) -> None:
        self._desk: DraftDesk | None = None
        try:
            self._desk, self._facts = _open(settings)
        except DraftwoodError as error:
            self._facts = Facts(problem=str(error), kind=type(error).__name__)

    def about(self) -> Facts:
        """What it has loaded, or why it could not."""
        return self._facts

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def answer(self, ask: Ask) -> Answer:
        """Drafts."""
        assert self._desk is not None, self._facts.problem
        return self._desk.answer(ask)

    def pause(self, seconds: float) -> None:
        """Does nothing for a while: for tests and drills of what happens then."""
        time.sleep(seconds)


def _open(settings: DraftSettings) -> tuple[DraftDesk, Facts]:
    device, dtype = device_of(settings.device), dtype_of(settings.dtype)
    placement = Placement(device, dtype, settings.quantization, draft=True)
    model, files, _ = load_model(settings.model, placement, None)
    target = Tokenizer.load(resolve(settings.target).path)
    shared = shared_vocabulary(target, Tokenizer.load(files.path))
    if not shared:
        raise ConfigError(
            f"draft {settings.model!r} has another vocabulary than {settings.target!r}: leave out "
            "--draft-actors, and it drafts in the replicas"
        )
    bytes_per_block = model.spec.kv.bytes_per_token * _BLOCK
    wanted = _CONTEXTS * (-(-model.spec.max_model_len // _BLOCK)) * bytes_per_block
    memory = settings.kv_memory or min(wanted, available_bytes(device) // 8)
    pool = BlockPool(
        model.spec.kv,
        None,
        num_blocks=max(memory // bytes_per_block, 2),
        block_size=_BLOCK,
        debug=settings.debug_kv,
    )
    facts = Facts(model.spec, block_size=_BLOCK, num_tokens=shared)
    return DraftDesk(model, pool, shared), facts


class RayCall:
    """Asks a draft actor, in the thread of a `Link`: it may wait as long as it likes.

    Ray starts a dead actor again by itself; until it is back, questions fail.

    Args:
        name: of the actor.
        namespace: where it is known.
    """

    def __init__(self, name: str, namespace: str) -> None:
        self._name = name
        self._namespace = namespace
        self._actor: Any = None

    def __call__(self, ask: Ask) -> Answer:
        """The actor's answer.

        Raises:
            Exception: there is none; what Ray says about it.
        """
        if self._actor is None:
            self._actor = ray.get_actor(self._name, namespace=self._namespace)
        ref: Any = self._actor.answer.remote(ask)
        try:
            answer: Answer = ray.get(ref, timeout=_CALL_S)
        except ray.exceptions.GetTimeoutError:
            ray.cancel(ref)  # if it still waits for its turn
            raise
        except ray.exceptions.ActorDiedError:
            self._actor = None  # another one may take its name
            raise
        return answer
