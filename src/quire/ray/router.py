"""The router of Ray Serve, by which a gateway learns what replicas there are. No request goes through it.

Ray pickles this module by value: what is a global here is a copy in each process. So its state is elsewhere, and what
it needs of Quire it imports where it is used.
"""

from __future__ import annotations

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica


class QuireRouter(FIFOMixin, RequestRouter):
    """Hands on which replicas run. FIFOMixin: without it, two calls out of one request stop the router."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray calls this with all replicas whenever one comes, goes, or tells something else of itself."""
        super().update_replicas(replicas)
        from quire.ray.membership import MEMBERS

        MEMBERS.update({str(replica.replica_id): replica.routing_stats for replica in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, in one rank.

        No client's request comes here: a replica has no method that computes tokens, and the gateway chooses by its
        score. What comes is the one call with which a gateway's process gets its router, and any replica can answer it.
        """
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # Ray waits between two tries only if this is set
        return [candidate_replicas]
