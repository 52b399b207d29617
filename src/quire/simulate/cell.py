"""A cell: replicas, the gateways that choose among them, and their clients, on one virtual clock."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, cast

from quire.cache.incoming import ArrivingBlocks, Fault
from quire.cache.prefix import root_digest, root_salt
from quire.engine.prefetch import NAP
from quire.errors import BadValue, NoReplica
from quire.fleet.index import FleetIndex
from quire.fleet.resume import MOST_LOST
from quire.request import Event, FinishReason, Request, SamplingParams
from quire.simulate.flow import Flow, request_of
from quire.simulate.gateway import SimulatedGateway
from quire.simulate.loads import Job
from quire.simulate.outcome import Outcome
from quire.simulate.peers import Peers
from quire.simulate.prompts import NamedTokens
from quire.simulate.replica import SimulatedHost, SimulatedReplica, wire_name
from quire.simulate.spec import FleetSpec

PATIENCE = 10.0  # seconds that a request waits while no replica is available: a gateway's default
STEPS, OTHERS = 0, 1  # priorities: at the same time, steps end before other events


class Cell:
    """A simulated cell. It can `run` once."""

    def __init__(
        self, spec: FleetSpec, replicas: list[SimulatedReplica], jobs: Iterator[Job], seed: str, outcome: Outcome
    ) -> None:  # fmt: skip
        self.spec = spec
        self.replicas = replicas
        self.outcome = outcome
        self.now = 0.0
        self.gateways = [SimulatedGateway(i, replicas, spec.gateways.lag) for i in range(spec.gateways.count)]
        self._jobs = jobs
        self._network = random.Random(f"{seed}/network")
        self._heap: list[tuple[float, int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0  # number of events
        self._num_flows = 0
        self._open = 0  # flows that have not ended
        self._has_more = True  # whether there are more jobs
        self._flows: dict[str, Flow] = {}  # by the request's id at its replica
        self._at: dict[int, dict[Flow, None]] = {one.number: {} for one in replicas}
        self._waiting: list[Flow] = []  # flows that wait for a replica
        self._turn = 0
        self._params: dict[int, SamplingParams] = {}
        self._hash = blake2b(digest_size=16)
        self._counted: dict[str, float] = {}

    # ----------------------------------------------------------------------------------------------------- time

    def push(self, at: float, what: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at, OTHERS, 0, self._count, what, arguments))

    def push_end(self, replica: SimulatedReplica, at: float) -> None:
        replica.version += 1
        replica.ends = at
        self._count += 1
        heapq.heappush(self._heap, (at, STEPS, replica.number, self._count, self._end, (replica, replica.version)))

    def delay(self, seconds: float) -> float:
        jitter = self.spec.network.jitter
        return seconds * (1 + jitter * self._network.expovariate(1.0)) if jitter else seconds

    def note(self, what: str, *words: object) -> None:
        self._hash.update(f"{self.now!r} {what} {words}\n".encode())

    def run(self, advance: Callable[[], None] = lambda: None) -> Outcome:
        """Serve the load to its end. advance: called at the end of each request."""
        self._advance = advance
        for replica in self.replicas:
            for gateway in self.gateways:
                gateway.find(replica.number, 0.0)
        self._next_job()
        self.push(self.outcome.resolution, self._tick)
        heap = self._heap
        while heap:
            self.now, _, _, _, what, arguments = heapq.heappop(heap)
            what(*arguments)
        self.outcome.hashes.append(self._hash.hexdigest())
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

    @property
    def goes_on(self) -> bool:
        return self._has_more or self._open > 0

    # -------------------------------------------------------------------------------------------------- clients

    def _next_job(self) -> None:
        job = next(self._jobs, None)
        self._has_more = job is not None
        if job is not None:
            self.push(job.arrival, self._arrive, job)

    def _arrive(self, job: Job) -> None:
        self._next_job()
        self._ask(job, self.now, 0)

    def _ask(self, job: Job, began: float, attempt: int) -> None:
        self._num_flows += 1
        self._open += 1
        if attempt == 0:
            self.outcome.counts["requests"] += 1
        params = self._params.get(job.new_tokens)
        if params is None:
            params = self._params[job.new_tokens] = SamplingParams(max_tokens=job.new_tokens, ignore_eos=True)
        name = str(self._num_flows)
        request = request_of(name, job, params)
        gateway = self._num_flows % max(1, len(self.gateways))
        flow = Flow(self._num_flows, job, began, attempt, gateway, request, [])
        if self.spec.clients.timeout:
            self.push(self.now + self.spec.clients.timeout, self._time_out, flow)
        self.push(self.now + self.delay(self.spec.network.to_gateway) + self._gateway_seconds, self._route, flow)

    @property
    def _gateway_seconds(self) -> float:
        return self.spec.gateways.seconds if self.gateways else 0.0

    def _time_out(self, flow: Flow) -> None:
        if not flow.is_done:
            self.take_back(flow)
            self._fail(flow, "timeout")

    def _fail(self, flow: Flow, why: str) -> None:
        """End a flow with an error for its client, which may retry."""
        if flow.is_done:
            return
        flow.is_done = True
        self._open -= 1
        self._flows.pop(flow.request.id, None)
        self._leave(flow)
        self.outcome.errors[why] += 1
        self.note("fail", flow.number, why)
        if flow.attempt < self.spec.clients.retries:
            self.outcome.counts["retries"] += 1
            self._open += 1  # until the retry
            wait = self.spec.clients.backoff * 2**flow.attempt
            self.push(self.now + wait, self._ask_again, flow)
        else:
            self.outcome.counts["failed"] += 1
            self._advance()

    def _ask_again(self, flow: Flow) -> None:
        self._open -= 1
        self._ask(flow.job, flow.began, flow.attempt + 1)

    def _first(self, flow: Flow) -> None:
        """Record that a gateway received the first token."""
        if flow.is_done:
            return
        report = flow.request.cache.prefix_report
        cached = report.num_cached if report is not None else 0
        if self.gateways:
            self.gateways[flow.gateway].averages.began(cached, flow.job.prompt_tokens)
        seconds = self.now + self.delay(self.spec.network.to_gateway) - flow.began
        self.note("first", flow.number, seconds)
        self.outcome.ttft.add(seconds)
        counts = {"prompt_tokens": flow.job.prompt_tokens, "cached_tokens": cached}
        self.outcome.counts.update(counts)
        moment = self.outcome.moment(self.now)
        moment.ttft.add(seconds)
        moment.numbers.update(counts)

    def _finished(self, flow: Flow) -> None:
        """Record that a gateway received the last token."""
        if flow.is_done:
            return
        flow.is_done = True
        self._open -= 1
        # Fewer than requested if the answer reaches the longest sequence that the replica serves.
        new_tokens = self.replicas[flow.replica].engine.scheduler.longest(flow.request) - flow.job.prompt_tokens
        if self.gateways:
            self.gateways[flow.gateway].averages.ended(new_tokens)
        self._take_core(self.replicas[flow.replica], flow.number + 1)
        self._leave(flow)
        if flow.ledger is not None:
            flow.enter(flow.request.num_generated)
            if len(flow.ledger.tokens) != new_tokens:
                raise BadValue(f"request {flow.number} got {len(flow.ledger.tokens)} of {new_tokens} tokens")
        at = self.now + self.delay(self.spec.network.to_gateway)
        self.note("finished", flow.number, at)
        self.outcome.e2e.add(at - flow.began)
        self.outcome.counts.update({"finished": 1, "new_tokens": new_tokens})
        self.outcome.seconds = max(self.outcome.seconds, at)
        self._advance()
        if flow.job.then is not None:
            self._open += 1
            self.push(at + flow.job.think, self._next_turn, flow.job.then)

    def _next_turn(self, job: Job) -> None:
        self._open -= 1
        self._ask(job, self.now, 0)

    # ------------------------------------------------------------------------------------------------- gateways

    def _route(self, flow: Flow) -> None:
        """Send a request to a replica, if one can take it."""
        if flow.is_done:
            return
        request = flow.request
        try:
            slot = self._chosen(flow, request)
        except NoReplica:
            self._found_none(flow)
            return
        flow.waits_until = None
        replica = self.replicas[slot]
        flow.replica, flow.incarnation = slot, replica.incarnation
        self._flows[request.id] = flow
        self._at[slot][flow] = None
        self.outcome.routed[replica.name] += 1
        self.note("route", flow.number, slot)
        flow.routing += 1
        self.push(self.now + self.delay(self.spec.network.to_replica), self._read, flow, slot, flow.routing)

    def _chosen(self, flow: Flow, request: Request) -> int:
        if not self.gateways:
            there = [
                one for one in self.replicas if one.is_up and not one.draining and one.number not in flow.passed_over
            ]
            if not there:
                raise NoReplica("no replica is there")
            self._turn += 1
            return there[self._turn % len(there)].number
        gateway = self.gateways[flow.gateway]
        tokens = len(request.tokens) + len(request.to_check)
        if not flow.digests or flow.ledger is not None:
            flow.digests = self._digests(request)
        choice = gateway.choose(
            str(flow.number), tokens, flow.job.new_tokens, flow.digests, flow.bits, flow.passed_over, self.now
        )
        gateway.send(flow.number, choice, flow.digests, self.now)
        slot, request.holder = choice.best.candidate.slot, choice.best.candidate.holder
        self.replicas[slot].report.uncached[request.id] = choice.best.uncached_tokens
        return slot

    def _digests(self, request: Request) -> list[int]:
        """Return the gateways' digests of a request's full blocks, and store them for the replica."""
        manager = self.replicas[0].engine.scheduler.manager
        size, digests = manager.block_size, request.cache.digests
        if not digests:
            digests.append(root_digest(root_salt(manager.lookup.salt, "", "")))
        cast("NamedTokens", request.tokens).extend_digests(digests, len(request.tokens) // size, size)
        return [wire_name(digest) for digest in digests[1:]]

    def _found_none(self, flow: Flow) -> None:
        """Queue a flow until a replica is available or its patience ends. If all replicas are full, fail it."""
        if flow.passed_over and any(one.is_up and not one.draining for one in self.replicas):
            self._fail(flow, "429")  # all are full
            return
        if flow.waits_until is None:
            flow.waits_until = self.now + PATIENCE
            self.push(flow.waits_until, self._give_up, flow)
            self._waiting.append(flow)
        elif flow not in self._waiting:
            self._waiting.append(flow)

    def _give_up(self, flow: Flow) -> None:
        if flow.waits_until is not None and self.now >= flow.waits_until and not flow.is_done:
            self._fail(flow, "503")

    def _look_again(self) -> None:
        """Route all waiting flows, as a replica is available again."""
        waiting, self._waiting = self._waiting, []
        for flow in waiting:
            flow.passed_over.clear()
            self._route(flow)

    def _leave(self, flow: Flow) -> None:
        """Remove a flow from its replica: it has ended there or moves."""
        if flow.replica >= 0:
            self._at[flow.replica].pop(flow, None)
            self._flows.pop(flow.request.id, None)
            flow.replica = -1
        if self.gateways:
            self.gateways[flow.gateway].settle(flow.number)

    def take_back(self, flow: Flow) -> None:
        """Abort a request at its replica."""
        if flow.replica >= 0:
            replica = self.replicas[flow.replica]
            if flow.request.id in replica.engine.scheduler.requests:
                replica.aborted.append(flow.request.id)
                self.interrupt(replica)
            else:
                replica.inbox = type(replica.inbox)(one for one in replica.inbox if one[0] is not flow.request)

    # ------------------------------------------------------------------------------------------------- replicas

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
        replica, server = self.replicas[slot], self.replicas[slot].cost.server
        overhead = server.request + server.prompt_token * len(flow.request.tokens)
        replica.reads_until = max(self.now + overhead, replica.reads_until)
        if replica.reads_until > self.now:
            self.push(replica.reads_until, self._admit, flow, slot, routing)
        else:
            self._admit(flow, slot, routing)

    def _admit(self, flow: Flow, slot: int, routing: int) -> None:
        """Handle a request that its replica has read."""
        if not self._is_expected(flow, slot, routing):
            return
        replica = self.replicas[slot]
        if replica.cut_off_until > self.now:
            self.push(replica.cut_off_until, self._admit, flow, slot, routing)
            return
        if replica.draining or replica.num_requests >= replica.most:
            self._leave(flow)
            flow.passed_over.add(slot)
            self.push(self.now + self.delay(self.spec.network.to_replica), self._route, flow)
            return
        if flow.bits is None:
            flow.bits = replica.bits
        self._take_core(replica, flow.number)
        replica.take(flow.request, self.now, flow.number, flow.job.name)
        self.interrupt(replica)

    def _take_core(self, replica: SimulatedReplica, turn: int) -> None:
        """Charge half of the CPU time of event loops, gateway and client for a request, at its arrival or its end.

        If no core is free, the step of one of the replicas is delayed by it, of each replica in turns.
        """
        host, seconds = replica.host, replica.cost.server.host_request / 2
        if seconds and host.rates().full:
            computing = [other for other in host.replicas if other.number in host.computing]
            self.hold_up(computing[turn % len(computing)], seconds)

    def hold_up(self, replica: SimulatedReplica, seconds: float) -> bool:
        """Delay the end of a replica's current step. Return False if there is no step."""
        end = replica.delay(self.now, seconds)
        if end is not None:
            self.push_end(replica, end)
        return end is not None

    def interrupt(self, replica: SimulatedReplica) -> None:
        """Make a replica read its inbox at the end of its current step, or now if it is idle."""
        if replica.is_busy:
            end = replica.cut(self.now)
            if end is not None:
                self.push_end(replica, end)
        elif replica.is_up and self.now >= replica.hung_until:
            self._begin(replica)

    def _begin(self, replica: SimulatedReplica) -> None:
        before = len(replica.host.computing)
        end, refused = replica.begin(self.now)
        for request in refused:
            flow = self._flows.get(request.id)
            if flow is not None and not flow.is_done:
                flow.is_done = True
                self._open -= 1
                self._leave(flow)
                self.outcome.counts["refused"] += 1
                self.outcome.first_refusal = self.outcome.first_refusal or replica.engine.first_refusal
                self._advance()
        if end is not None:
            self.push_end(replica, end)
        elif replica.draining and not replica.num_requests:
            self.remove(replica)
        if len(replica.host.computing) != before:
            self.rate_changed(replica.host, replica)
        if replica.peers is not None:
            self._see_to_reads(replica, replica.peers)

    def _see_to_reads(self, replica: SimulatedReplica, peers: Peers) -> None:
        """Schedule the ends of the reads that a replica has begun, and its checks for arrived blocks."""
        for at, batch in peers.begun:
            self.push(at, self._have_read, replica, peers, batch)
        peers.begun.clear()
        if replica.looks_again:
            replica.version += 1
            self.push(self.now + NAP, self._look_for_blocks, replica, replica.version)

    def _look_for_blocks(self, replica: SimulatedReplica, version: int) -> None:
        if version == replica.version:
            self.interrupt(replica)

    def _have_read(self, replica: SimulatedReplica, peers: Peers, batch: ArrivingBlocks) -> None:
        """Complete a read of another replica's blocks, except those that it no longer has."""
        if replica.peers is not peers or not replica.is_up:
            return
        named = (one for one in self.replicas if one.name == batch.place)
        holder = next((one for one in named if one.is_up or one.draining), None)
        if holder is None or self.now < max(holder.hung_until, holder.cut_off_until, replica.cut_off_until):
            peers.end(batch, lambda _: Fault.IO)
        else:
            peers.end(batch, lambda read: None if holder.has_block(read, self.now) else Fault.ABSENT)
        if replica.looks_again:
            self.interrupt(replica)

    def rate_changed(self, host: SimulatedHost, cause: SimulatedReplica | None) -> None:
        """Cut the leaps on a host whose rates have changed, so that new rates apply from the next step on."""
        rates = host.rates()
        for other in host.replicas:
            if other is not cause and other.leap is not None and other.cost.rates != rates:
                end = other.cut(self.now)
                if end is not None:
                    self.push_end(other, end)

    def _end(self, replica: SimulatedReplica, version: int) -> None:
        """Handle the end of a step or a leap."""
        if version != replica.version:
            return
        events, more = replica.end(self.now)
        self._deliver(replica, events)
        if more is not None:
            self.push_end(replica, more)
        else:
            self._begin(replica)

    def _deliver(self, replica: SimulatedReplica, events: list[Event]) -> None:
        """Send the tokens of a step to the gateways."""
        if replica.is_mute:
            return
        start = max(self.now, replica.cut_off_until)
        for event in events:
            flow = self._flows.get(event.request_id)
            if flow is None or flow.is_done:
                continue
            if event.token is not None and not flow.has_begun:
                flow.has_begun = True
                self._send(flow, start, self._first)
            if event.token is not None and flow.lost_at is not None:
                self.outcome.stalls.add(self.now - flow.lost_at)
                flow.lost_at = None
            if event.finish_reason is FinishReason.LENGTH:
                self._at[replica.number].pop(flow, None)
                self._send(flow, start, self._finished)

    def _send(self, flow: Flow, start: float, what: Callable[[Flow], None]) -> None:
        """Schedule a delivery to a flow's gateway, after all earlier ones: a connection preserves the order."""
        flow.heard = max(flow.heard, start + self.delay(self.spec.network.to_replica))
        self.push(flow.heard, what, flow)

    def lose(self, replica: SimulatedReplica, drawn: dict[Flow, int], since: float) -> None:
        """Make gateways notice that a replica is gone, and resume its requests at other replicas."""
        self.note("lost", replica.number)
        for gateway in self.gateways:
            gateway.lose(replica.number)
        for flow in list(self._at[replica.number]):
            self.resume(flow, drawn.get(flow, 0), since)

    def resume(self, flow: Flow, drawn: int, since: float) -> None:
        """Continue a request at another replica, after the tokens that its gateway received."""
        if flow.is_done:
            return
        self._leave(flow)
        if not self.gateways:  # its tokens are lost
            self._fail(flow, "connection lost")
            return
        flow.num_lost += 1
        if flow.num_lost > MOST_LOST:
            self._fail(flow, "503")
            return
        flow.lost_at = since
        delivered = flow.go_on(drawn)
        self.outcome.counts["resumed"] += 1
        self.note("resume", flow.number, delivered)
        self._route(flow)

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
        self._at[replica.number] = {}
        self.welcome(replica)

    def forget_others(self, replica: SimulatedReplica) -> None:
        """Abort the requests at a replica that its gateways have given up."""
        known = {flow.request.id for flow in self._at[replica.number]}
        replica.aborted += [name for name in replica.engine.scheduler.requests if name not in known]
        replica.inbox.clear()
        self.interrupt(replica)

    def flows_at(self, replica: SimulatedReplica) -> list[Flow]:
        """Return the flows at a replica."""
        return list(self._at[replica.number])

    def drawn_at(self, replica: SimulatedReplica) -> dict[Flow, int]:
        """Return the number of drawn tokens of each flow at a replica."""
        return {flow: replica.num_drawn(flow.request, self.now) for flow in self._at[replica.number]}

    def welcome(self, replica: SimulatedReplica) -> None:
        """Connect gateways to a new or restarted replica, and route waiting flows."""
        self.note("back", replica.number)
        for gateway in self.gateways:
            gateway.find(replica.number, self.now)
        self._look_again()

    def remove(self, replica: SimulatedReplica) -> None:
        replica.is_up = False
        replica.host.computing.discard(replica.number)
        for gateway in self.gateways:
            gateway.lose(replica.number)

    # --------------------------------------------------------------------------------------------------- sampling

    def _tick(self) -> None:
        """Sample the state of the fleet for the time series."""
        numbers = self.outcome.moment(self.now - self.outcome.resolution / 2).numbers
        drawn = 0
        for replica in self.replicas:
            if not replica.is_up:
                drawn += sum(engine.num_drawn for engine in replica.engines())
                continue
            replica.catch_up(self.now, last=False)
            scheduler = replica.engine.scheduler
            drawn += sum(engine.num_drawn for engine in replica.engines())
            pool = scheduler.manager.pools[0]
            numbers.update(
                {
                    "replicas": 1,
                    "running": len(scheduler.running),
                    "waiting": len(scheduler.waiting) + len(scheduler.swapped),
                    "used_blocks": replica.used_blocks,
                    "blocks": pool.num_blocks,
                }
            )
        numbers["new_tokens"] += round(drawn - self._counted.get("drawn", 0))
        self._counted["drawn"] = drawn
        if self.goes_on:
            self.push(self.now + self.outcome.resolution, self._tick)
