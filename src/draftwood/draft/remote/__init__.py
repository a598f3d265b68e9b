"""Drafting in another process, while the target verifies.

The *desk* holds a draft model and its KV and answers questions about sequences (`desk.py`). The
engine's side is a `Drafter` that never waits longer than a deadline (`drafter.py`). Between them
is a *link*: a thread that carries one question at a time (`link.py`), over whatever can call a
function elsewhere; `deploy/ray` does it with an actor. Messages are tokens and scores
(`messages.py`), never tensors.
"""

from draftwood.draft.remote.desk import DraftDesk
from draftwood.draft.remote.drafter import RemoteDrafter
from draftwood.draft.remote.link import Link
from draftwood.draft.remote.messages import Answer, Ask, Draft, Manner, Wish

__all__ = ["Answer", "Ask", "Draft", "DraftDesk", "Link", "Manner", "RemoteDrafter", "Wish"]
