"""Starts servers that will be killed: `tests/serve/test_kills.py` talks to it.

It imports everything once, with one thread, and forks for each start: the child is `draftwood
serve` as a user would start it, only sooner there.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from draftwood.cli.app import run
from draftwood.llm import LLM
from draftwood.sampling import SamplingParams


def main() -> None:
    """Reads arguments of a command, one JSON list a line; answers with its pid and exit code."""
    import draftwood.serve.start  # noqa: F401

    torch.set_num_threads(1)
    with LLM(sys.argv[1]) as llm:  # much is imported late
        llm.generate("a", SamplingParams(max_tokens=8, structured={"regex": "a*"}))
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 2)
            os.dup2(log, 1)
            os._exit(run(json.loads(line)))
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
