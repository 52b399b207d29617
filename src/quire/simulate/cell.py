"""A cell: replicas, the gateways that choose among them, and their clients, on one virtual clock.

The parts make the decisions. `routing` selects the replica of a request, the replica accepts it or not and plans its
steps, `fleet.resume` decides whether a request survives a loss, and `clients` whether a client asks again. A cell
passes requests and tokens between them, with the latencies of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quire.errors import BadValue
from quire.fleet.index import FleetIndex
from quire.fleet.resume import why_to_end
from quire.request import Event, FinishReason, Request
from quire.simulate.clients import Clients
from quire.simulate.flow import Flow
from quire.simulate.gateway import SimulatedGateway
from quire.simulate.loads import Job
from quire.simulate.outcome import Outcome
from quire.simulate.replica import SimulatedReplica
from quire.simulate.routing import Router
from quire.simulate.spec import FleetSpec
from quire.simulate.steps import Steps
from quire.simulate.timeline import Timeline


class Cell:
    """A simulated cell. It can `run` once."""

    def __init__(
        self, spec: FleetSpec, replicas: list[SimulatedReplica], jobs: Iterator[Job], seed: str, outcome: Outcome
    ) -> None:  # fmt: skip
        self.spec = spec
        self.replicas = replicas
        self.outcome = outcome
        self.gateways = [SimulatedGateway(i, replicas, spec.gateways.lag) for i in range(spec.gateways.count)]
        self.timeline = Timeline(seed, spec.network.jitter)
        self.steps = Steps(replicas, self.timeline, self._deliver, self._refuse, self._remove_drained)
        self.router = Router(self.gateways, replicas, self.timeline, self._send, self._fail)
        self.clients = Clients(spec, jobs, self.timeline, outcome, self.router.route, self.router.leave, self.take_back)
        self._num_drawn = 0.0  # tokens of all replicas, at the last sample

    def run(self, advance: Callable[[], None] = lambda: None) -> Outcome:
        """Serve the load to its end. advance: called at the end of each request."""
        for replica in self.replicas:
            for gateway in self.gateways:
                gateway.find(replica.number, 0.0)
        self.clients.begin(advance)
        self.timeline.push(self.outcome.resolution, self._tick)
        self.outcome.hashes.append(self.timeline.run())
        for replica in self.replicas:
            for engine in replica.engines():
                found = engine.result()
                self.outcome.itl.merge(engine.itl)
                counts = {"steps": found.steps, "preemptions": found.preemptions, "evicted": found.evicted_blocks}
                self.outcome.counts.update(counts)
        self._forget_blocks()
        return self.outcome

    def _forget_blocks(self) -> None:
        """Free the indexes of blocks, which are most of a cell's memory.

        A cell is part of reference cycles, so it is collected late, and the collector would traverse every block first.
        """
        for gateway in self.gateways:
            gateway.index = FleetIndex()
        for replica in self.replicas:
            for engine in replica.engines():
                for index in engine.scheduler.manager.indexes:
                    index.clear()

    def _latency(self) -> float:
        """Return the latency of a message between a gateway and a replica."""
        return self.timeline.delay(self.spec.network.to_replica)

    # ----------------------------------------------------------------------------------------- requests to replicas

    def _send(self, flow: Flow, slot: int) -> None:
        """Send a request to the replica that was chosen for it."""
        self.outcome.routed[self.replicas[slot].name] += 1
        self.timeline.note("route", flow.number, slot)
        self.timeline.later(self._latency(), self._read, flow, slot, flow.routing)

    def _fail(self, flow: Flow, why: str) -> None:
        self.clients.fail(flow, why)

    def _is_expected(self, flow: Flow, slot: int, routing: int) -> bool:
        """Return whether a request may still arrive where it was sent. If the replica died, its gateway finds out."""
        replica = self.replicas[slot]
        return (
            not flow.is_done
            and (flow.replica, flow.routing) == (slot, routing)
            and replica.is_up
            and replica.incarnation == flow.incarnation
        )

    def _read(self, flow: Flow, slot: int, routing: int) -> None:
        """Handle a request that arrived at its replica, which reads requests in the order of arrival."""
        if not self._is_expected(flow, slot, routing):
            return
        replica, server, now = self.replicas[slot], self.replicas[slot].cost.server, self.timeline.now
        overhead = server.request + server.prompt_token * len(flow.request.tokens)
        replica.reads_until = max(now + overhead, replica.reads_until)
        if replica.reads_until > now:
            self.timeline.push(replica.reads_until, self._admit, flow, slot, routing)
        else:
            self._admit(flow, slot, routing)

    def _admit(self, flow: Flow, slot: int, routing: int) -> None:
        """Handle a request that its replica has read."""
        if not self._is_expected(flow, slot, routing):
            return
        replica, now = self.replicas[slot], self.timeline.now
        if replica.cut_off_until > now:
            self.timeline.push(replica.cut_off_until, self._admit, flow, slot, routing)
            return
        if replica.is_full:
            self.router.leave(flow)
            flow.passed_over.add(slot)
            self.timeline.later(self._latency(), self.router.route, flow)
            return
        if flow.bits is None:
            flow.bits = replica.bits
        self.steps.take_core(replica, flow.number)
        replica.take(flow.request, now, flow.number, flow.job.name)
        self.steps.interrupt(replica)

    def _refuse(self, replica: SimulatedReplica, request: Request) -> None:
        """Handle a request that can never run."""
        flow = self.router.find(request.id)
        if flow is not None:
            self.clients.refused(flow, replica.engine.first_refusal)

    def take_back(self, flow: Flow) -> None:
        """Abort a request at its replica."""
        if flow.replica >= 0:
            replica = self.replicas[flow.replica]
            if flow.request.id in replica.engine.scheduler.requests:
                replica.aborted.append(flow.request.id)
                self.steps.interrupt(replica)
            else:
                replica.inbox = type(replica.inbox)(one for one in replica.inbox if one[0] is not flow.request)

    # ------------------------------------------------------------------------------------------ tokens from replicas

    def _deliver(self, replica: SimulatedReplica, events: list[Event]) -> None:
        """Send the tokens of a step to the gateways."""
        if replica.is_mute:
            return
        now = self.timeline.now
        start = max(now, replica.cut_off_until)
        for event in events:
            flow = self.router.find(event.request_id)
            if flow is None:
                continue
            if event.token is not None and not flow.has_begun:
                flow.has_begun = True
                self._report(flow, start, self._first)
            if event.token is not None and flow.lost_at is not None:
                self.outcome.stalls.add(now - flow.lost_at)
                flow.lost_at = None
            if event.finish_reason is FinishReason.LENGTH:
                self.router.drawn_all(flow)
                self._report(flow, start, self._finished)

    def _report(self, flow: Flow, start: float, what: Callable[[Flow], None]) -> None:
        """Schedule a delivery to a flow's gateway, after all earlier ones: a connection preserves the order."""
        flow.heard = max(flow.heard, start + self._latency())
        self.timeline.push(flow.heard, what, flow)

    def _first(self, flow: Flow) -> None:
        """Handle a first token that a gateway received."""
        if flow.is_done:
            return
        report = flow.request.cache.prefix_report
        cached = report.num_cached if report is not None else 0
        if self.gateways:
            self.gateways[flow.gateway].averages.began(cached, flow.job.prompt_tokens)
        self.clients.first(flow, cached)

    def _finished(self, flow: Flow) -> None:
        """Handle a last token that a gateway received."""
        if flow.is_done:
            return
        replica = self.replicas[flow.replica]
        # Fewer than requested if the answer reaches the longest sequence that the replica serves.
        new_tokens = replica.engine.scheduler.longest(flow.request) - flow.job.prompt_tokens
        if self.gateways:
            self.gateways[flow.gateway].averages.ended(new_tokens)
        self.steps.take_core(replica, flow.number + 1)
        if flow.ledger is not None:
            flow.enter(flow.request.num_generated)
            if len(flow.ledger.tokens) != new_tokens:
                raise BadValue(f"request {flow.number} got {len(flow.ledger.tokens)} of {new_tokens} tokens")
        self.clients.finished(flow, new_tokens)

    # ------------------------------------------------------------------------------- replicas that leave and return

    def lose(self, replica: SimulatedReplica, drawn: dict[Flow, int], since: float) -> None:
        """Make gateways notice that a replica is gone, and resume its requests at other replicas."""
        self.timeline.note("lost", replica.number)
        for gateway in self.gateways:
            gateway.lose(replica.number)
        for flow in self.router.at(replica):
            self.resume(flow, drawn.get(flow, 0), since)

    def resume(self, flow: Flow, drawn: int, since: float) -> None:
        """Continue a request at another replica, after the tokens that its gateway received."""
        if flow.is_done:
            return
        self.router.leave(flow)
        if not self.gateways:  # its tokens are lost
            self.clients.fail(flow, "connection lost")
            return
        flow.num_lost += 1
        if why_to_end("exact", flow.num_lost, "the request", "") is not None:
            self.clients.fail(flow, "503")
            return
        flow.lost_at = since
        delivered = flow.go_on(drawn)
        self.outcome.counts["resumed"] += 1
        self.timeline.note("resume", flow.number, delivered)
        self.router.route(flow)

    def restart(self, replica: SimulatedReplica) -> None:
        """Restart a replica with an empty cache."""
        replica.past.append(replica.engine)
        replica.start()
        replica.incarnation += 1
        replica.is_up = True
        self.welcome(replica)

    def join(self, replica: SimulatedReplica) -> None:
        """Add a new replica."""
        self.replicas.append(replica)
        self.welcome(replica)

    def welcome(self, replica: SimulatedReplica) -> None:
        """Connect gateways to a new or restarted replica, and route waiting flows."""
        self.timeline.note("back", replica.number)
        for gateway in self.gateways:
            gateway.find(replica.number, self.timeline.now)
        self.router.look_again()

    def forget_others(self, replica: SimulatedReplica) -> None:
        """Abort the requests at a replica that its gateways have given up."""
        known = {flow.request.id for flow in self.router.at(replica)}
        replica.aborted += [name for name in replica.engine.scheduler.requests if name not in known]
        replica.inbox.clear()
        self.steps.interrupt(replica)

    def remove(self, replica: SimulatedReplica) -> None:
        """Remove a replica that has drained."""
        replica.is_up = False
        replica.host.computing.discard(replica.number)
        for gateway in self.gateways:
            gateway.lose(replica.number)

    def _remove_drained(self, replica: SimulatedReplica) -> None:
        if replica.draining and not replica.num_requests:
            self.remove(replica)

    # --------------------------------------------------------------------------------------------------- sampling

    def _tick(self) -> None:
        """Sample the state of the fleet for the time series."""
        now, resolution = self.timeline.now, self.outcome.resolution
        numbers = self.outcome.moment(now - resolution / 2).numbers
        drawn = 0
        for replica in self.replicas:
            if replica.is_up:
                replica.catch_up(now, last=False)
                numbers.update(replica.numbers())
            drawn += sum(engine.num_drawn for engine in replica.engines())
        numbers["new_tokens"] += round(drawn - self._num_drawn)
        self._num_drawn = drawn
        if self.clients.are_open:
            self.timeline.later(resolution, self._tick)
