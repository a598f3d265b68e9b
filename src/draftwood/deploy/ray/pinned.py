"""Ray Serve's side of routing: a call goes to the replica that it names.

Which one it names is decided in the front, where it is known what has been sent where and what has
come back (`fleet.py`). Serve keeps the list of replicas, and tells it from here.

Serve copies this module by value: nothing may be kept in it.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from draftwood.deploy.ray import members
from draftwood.deploy.ray.messages import Addressed


class PinnedRouter(RequestRouter):  # type: ignore[misc]
    """Sends a call whose first argument has a `replica` there, others anywhere."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Takes over Serve's list."""
        super().update_replicas(replicas)
        members.tell(self.app_name, frozenset(name_of(replica) for replica in replicas))

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Serve's calls have found one dead, before its controller has."""
        super().on_replica_actor_died(replica_id)
        members.tell(self.app_name, frozenset(name_of(one) for one in self.curr_replicas.values()))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The one that is named; any where none is named, or where it has gone.

        A call that only one can answer waits for it: whoever makes it must limit its time.
        """
        args = pending_request.args if pending_request is not None else ()
        call = args[0] if args and isinstance(args[0], Addressed) else Addressed()
        named = [one for one in candidate_replicas if name_of(one) == call.replica]
        return [named if named or call.only else candidate_replicas]


def name_of(replica: RunningReplica) -> str:
    """What the front calls a replica."""
    return str(replica.replica_id.unique_id)
