"""Going on with the requests of an earlier process: whole, or piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from draftwood.engine.checkpoint import CheckpointWriter, Offset
from draftwood.engine.sequence import Sequence
from draftwood.errors import ConfigError
from draftwood.outputs import Delta, RequestOutput, make_delta, make_output

if TYPE_CHECKING:
    from draftwood.llm import LLM


def resume_outputs(llm: LLM) -> list[RequestOutput]:
    """See `LLM.resume`."""
    writer = _writer(llm)
    seqs = writer.resume()
    _run(llm, seqs)
    groups = group(seqs)
    for seq in seqs:
        writer.forget(seq.request_id)
    writer.save(wait=False)
    return [make_output(first, others) for first, *others in groups]


def resume_deltas(llm: LLM, received: Mapping[str, Offset]) -> Iterator[Delta]:
    """See `LLM.resume_stream`."""
    writer = _writer(llm)  # now, not when the first piece is asked for
    return _deltas(llm, writer, received)


def group(seqs: list[Sequence]) -> list[list[Sequence]]:
    """The outputs of each prompt together, the first one first."""
    groups: dict[str, list[Sequence]] = {}
    for seq in seqs:
        first = seq.parent.request_id if seq.parent is not None else seq.request_id
        groups.setdefault(first, []).append(seq)
    return list(groups.values())


def _writer(llm: LLM) -> CheckpointWriter:
    if llm.checkpoints is None:
        raise ConfigError("there is no checkpoint to resume from: give LLM(..., checkpoint=folder)")
    return llm.checkpoints


def _run(llm: LLM, seqs: list[Sequence]) -> None:
    try:
        while not all(seq.finished for seq in seqs):
            llm.engine.step()
    finally:
        _writer(llm).suspend(seq for seq in seqs if not seq.finished)
        for seq in seqs:
            llm.engine.abort(seq)


def _deltas(llm: LLM, writer: CheckpointWriter, received: Mapping[str, Offset]) -> Iterator[Delta]:
    seqs = writer.resume()
    have = {
        seq.request_id: received.get(seq.request_id, writer.delivered_of(seq.request_id))
        for seq in seqs
    }
    open_ = list(seqs)
    try:
        while open_:
            if not any(seq.finished for seq in open_):
                llm.engine.step()
            for seq in list(open_):
                delta = make_delta(seq, have[seq.request_id])
                if delta is None:
                    continue
                yield delta
                have[seq.request_id] = delta.end
                writer.delivered(seq.request_id, delta.end)
                if delta.output is not None:
                    open_.remove(seq)
                    writer.forget(seq.request_id)
        writer.save(wait=False)
    finally:
        writer.suspend(open_)
        for seq in open_:
            llm.engine.abort(seq)
