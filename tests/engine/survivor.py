"""A process that may be killed at any moment: `tests/engine/test_crash.py` talks to it.

It imports everything once, with one thread, and forks for each order, as a start takes longer than
all that is tested. A child writes each piece it has given away into a file, flushed, as a network
connection would have carried it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import torch

from draftwood.engine.checkpoint import Offset
from draftwood.llm import LLM, Delta, make_delta
from draftwood.sampling import SamplingParams


def main() -> None:
    """Reads orders, one JSON object a line; answers each with the pid of a child."""
    torch.set_num_threads(1)
    with LLM(sys.argv[1]) as llm:  # much is imported late
        llm.generate("a", SamplingParams(max_tokens=8, structured={"regex": "a*"}))
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                work(**json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def work(
    model: str, folder: str, log: str, requests: list[dict[str, Any]], received: dict[str, Any]
) -> None:
    """Begins with `requests`, or goes on with what a checkpoint has of them."""
    llm = LLM(model, checkpoint=folder, checkpoint_every_s=0.02)
    writer = llm.checkpoints
    assert writer is not None
    with open(log, "a", encoding="utf-8") as file:
        have = {name: Offset(*offset) for name, offset in received.items()}
        known = set(writer.pending)
        seqs = writer.resume()
        for one in requests:
            name = one["id"]
            if name in known or name in received:
                continue
            params = SamplingParams.from_dict(one["params"])
            seqs.append(llm.engine.add(one["prompt"], params, name))
        writer.save()
        print(json.dumps({"began": sorted(known)}), file=file, flush=True)
        while seqs:
            for seq in list(seqs):
                delta = make_delta(seq, have.get(seq.request_id, Offset()))
                if delta is not None:
                    print(json.dumps(piece(delta)), file=file, flush=True)
                    have[seq.request_id] = delta.end
                if seq.finished:
                    seqs.remove(seq)
                    writer.forget(seq.request_id)
            if seqs:
                llm.engine.step()
        print(json.dumps({"done": True}), file=file, flush=True)
        llm.close()


def piece(delta: Delta) -> dict[str, Any]:
    """A piece as it goes over the wire."""
    record: dict[str, Any] = {
        "id": delta.request_id,
        "start": [delta.start.num_tokens, delta.start.num_chars],
        "end": [delta.end.num_tokens, delta.end.num_chars],
        "text": delta.text,
        "tokens": delta.token_ids,
    }
    if delta.output is not None:
        record["reason"] = delta.output.finish_reason
        record["cached"] = delta.output.metrics.num_cached_tokens
        record["resumed"] = delta.output.metrics.num_resumed_tokens
    return record


if __name__ == "__main__":
    main()
