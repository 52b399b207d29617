"""The router of Ray Serve that gives a gateway the list of replicas. No request passes through it.

Ray pickles this module by value, so each process has its own copy of a global. Therefore the state is in
`quire.ray.membership`, and imports from Quire are inside the functions that use them.
"""

from __future__ import annotations

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica


class QuireRouter(FIFOMixin, RequestRouter):
    """Passes the running replicas on. FIFOMixin: without it, two calls within one request stop the router."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Pass on all replicas. Ray calls this whenever one is added or removed or changes its stats."""
        super().update_replicas(replicas)
        from quire.ray.membership import MEMBERS

        MEMBERS.update({str(replica.replica_id): replica.routing_stats for replica in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all replicas, in one rank.

        Clients' requests are not routed here: a replica has no method that computes tokens, and the gateway chooses by
        its score. The only call here creates the router in a gateway's process, and any replica can answer it.
        """
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # Ray waits between two tries only if this is set
        return [candidate_replicas]
