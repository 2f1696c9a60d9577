"""Ray Serve's choice of a server, by `Routing`."""

from typing import Any

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

# Ray sends this module by value: what stood in it would be another object than the front's.
from meshwright.serve.replicas import forwarded as shared


class PrefixRouter(RequestRouter):
    """Sends a request where the beginning of its prompt was sent before, unless that server is busy."""

    def initialize_state(self, most_ahead: int) -> None:
        shared.ROUTING.most_ahead = most_ahead

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # Without this, Ray asks again at once while all servers are full.
        pending_request.routing_context.should_backoff = True
        servers = {_name(replica.replica_id): replica for replica in candidate_replicas}
        forwarded: shared.Forwarded = pending_request.args[0]
        if forwarded.server is not None:
            return [[servers[name]] for name in servers if name == forwarded.server]
        return [[servers[name]] for name in shared.ROUTING.ranked(forwarded.beginning, list(servers))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        forwarded: shared.Forwarded = pending_request.args[0]
        if forwarded.server is None:
            shared.ROUTING.send(forwarded.name, forwarded.beginning, _name(replica_id))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        shared.ROUTING.keep(_name(replica.replica_id) for replica in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        shared.ROUTING.keep(_name(other) for other in self.curr_replicas if other != replica_id)


def _name(replica_id: ReplicaID) -> str:
    return replica_id.unique_id
