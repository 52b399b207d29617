"""Routing: which replica of a cell gets a request, or that it waits or fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, cast

from quire.cache.prefix import root_digest, root_salt
from quire.errors import NoReplica
from quire.simulate.flow import Flow
from quire.simulate.gateway import SimulatedGateway
from quire.simulate.replica import SimulatedReplica, wire_name
from quire.simulate.timeline import Timeline

if TYPE_CHECKING:
    from quire.simulate.prompts import NamedTokens

PATIENCE = 10.0  # seconds that a request waits while no replica is available: a gateway's default


def in_turns(replicas: Sequence[SimulatedReplica], passed_over: Collection[int], turn: int) -> int:
    """Return the number of the replica whose turn it is. Raises NoReplica."""
    there = [one for one in replicas if one.is_there and one.number not in passed_over]
    if not there:
        raise NoReplica("no replica is there")
    return there[turn % len(there)].number


class Router:
    """The flows of a cell, at their replicas or waiting for one. A gateway chooses by the fleet's own decisions."""

    def __init__(
        self, gateways: Sequence[SimulatedGateway], replicas: Sequence[SimulatedReplica], timeline: Timeline,
        send: Callable[[Flow, int], None], fail: Callable[[Flow, str], None],
    ) -> None:  # fmt: skip
        """send: called with a flow and the replica chosen for it. fail: with one that none can serve, and why."""
        self._gateways = gateways
        self._replicas = replicas
        self._timeline = timeline
        self._send = send
        self._fail = fail
        self._flows: dict[str, Flow] = {}  # by the request's id at its replica
        self._at: dict[int, dict[Flow, None]] = {}  # by the number of the replica
        self._waiting: list[Flow] = []  # flows that wait for a replica
        self._turn = 0

    def route(self, flow: Flow) -> None:
        """Send a request to a replica, if one can take it."""
        if flow.is_done:
            return
        try:
            slot = self._chosen(flow)
        except NoReplica:
            self._found_none(flow)
            return
        flow.waits_until = None
        flow.replica, flow.incarnation = slot, self._replicas[slot].incarnation
        self._flows[flow.request.id] = flow
        self._at.setdefault(slot, {})[flow] = None
        flow.routing += 1
        self._send(flow, slot)

    def look_again(self) -> None:
        """Route all waiting flows, as a replica is available again."""
        waiting, self._waiting = self._waiting, []
        for flow in waiting:
            flow.passed_over.clear()
            self.route(flow)

    def find(self, request_id: str) -> Flow | None:
        """Return the open flow of a request at a replica."""
        flow = self._flows.get(request_id)
        return None if flow is None or flow.is_done else flow

    def at(self, replica: SimulatedReplica) -> list[Flow]:
        """Return the flows at a replica."""
        return list(self._at.get(replica.number, ()))

    def drawn_all(self, flow: Flow) -> None:
        """Record that a replica has drawn the last token of a flow, so it cannot be lost there any more."""
        self._at[flow.replica].pop(flow, None)

    def leave(self, flow: Flow) -> None:
        """Remove a flow from its replica: it has ended there or moves."""
        self._flows.pop(flow.request.id, None)
        if flow.replica >= 0:
            self._at[flow.replica].pop(flow, None)
            flow.replica = -1
        if self._gateways:
            self._gateways[flow.gateway].settle(flow.number)

    def _chosen(self, flow: Flow) -> int:
        """Return the number of the replica for a flow. Raises NoReplica."""
        if not self._gateways:
            slot = in_turns(self._replicas, flow.passed_over, self._turn + 1)
            self._turn += 1
            return slot
        gateway, request, now = self._gateways[flow.gateway], flow.request, self._timeline.now
        tokens = len(request.tokens) + len(request.to_check)
        if not flow.digests or flow.ledger is not None:
            flow.digests = self._digests(flow)
        choice = gateway.choose(
            str(flow.number), tokens, flow.job.new_tokens, flow.digests, flow.bits, flow.passed_over, now
        )
        gateway.send(flow.number, choice, flow.digests, now)
        slot, request.holder = choice.best.candidate.slot, choice.best.candidate.holder
        self._replicas[slot].report.uncached[request.id] = choice.best.uncached_tokens
        return slot

    def _digests(self, flow: Flow) -> list[int]:
        """Return the gateways' digests of a request's full blocks, and store them for the replica."""
        manager, request = self._replicas[0].engine.scheduler.manager, flow.request
        size, digests = manager.block_size, request.cache.digests
        if not digests:
            digests.append(root_digest(root_salt(manager.lookup.salt, "", "")))
        cast("NamedTokens", request.tokens).extend_digests(digests, len(request.tokens) // size, size)
        return [wire_name(digest) for digest in digests[1:]]

    def _found_none(self, flow: Flow) -> None:
        """Queue a flow until a replica is available or its patience ends. If all replicas are full, fail it."""
        if flow.passed_over and any(one.is_there for one in self._replicas):
            self._fail(flow, "429")  # all are full
            return
        if flow.waits_until is None:
            flow.waits_until = self._timeline.now + PATIENCE
            self._timeline.push(flow.waits_until, self._give_up, flow)
            self._waiting.append(flow)
        elif flow not in self._waiting:
            self._waiting.append(flow)

    def _give_up(self, flow: Flow) -> None:
        if flow.waits_until is not None and self._timeline.now >= flow.waits_until and not flow.is_done:
            self._fail(flow, "503")
