"""Steps: begins and ends the steps of a cell's replicas, next to one another on their hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.cache.incoming import ArrivingBlocks, Fault
from quire.engine.prefetch import NAP
from quire.request import Event, Request
from quire.simulate.peers import Peers
from quire.simulate.replica import SimulatedHost, SimulatedReplica
from quire.simulate.timeline import Timeline


class Steps:
    """Applies the decisions of replicas about their steps: each returns the time at which its current one ends."""

    def __init__(
        self, replicas: Sequence[SimulatedReplica], timeline: Timeline,
        deliver: Callable[[SimulatedReplica, list[Event]], None],
        refuse: Callable[[SimulatedReplica, Request], None],
        on_idle: Callable[[SimulatedReplica], None],
    ) -> None:  # fmt: skip
        """deliver: called with the events of a step. refuse: with a request that can never run at a replica.

        on_idle: called with a replica that has nothing to compute.
        """
        self._replicas = replicas
        self._timeline = timeline
        self._deliver = deliver
        self._refuse = refuse
        self._on_idle = on_idle

    def hold_up(self, replica: SimulatedReplica, seconds: float) -> bool:
        """Delay the end of a replica's current step. Return False if there is no step."""
        return self._ends_at(replica, replica.delay(self._timeline.now, seconds))

    def take_core(self, replica: SimulatedReplica, turn: int) -> None:
        """Charge half of the CPU time of event loops, gateway and client for a request, at its arrival or its end.

        If no core is free, the step of one of the replicas is delayed by it, of each replica in turns.
        """
        host, seconds = replica.host, replica.cost.server.host_request / 2
        if seconds and host.rates().full:
            computing = [other for other in host.replicas if other.number in host.computing]
            self.hold_up(computing[turn % len(computing)], seconds)

    def interrupt(self, replica: SimulatedReplica) -> None:
        """Make a replica read its inbox at the end of its current step, or now if it is idle."""
        now = self._timeline.now
        if replica.is_busy:
            self._ends_at(replica, replica.cut(now))
        elif replica.is_up and now >= replica.hung_until:
            self._begin(replica)

    def rate_changed(self, host: SimulatedHost, cause: SimulatedReplica | None) -> None:
        """Cut the leaps on a host whose rates have changed, so that new rates apply from the next step on."""
        rates = host.rates()
        for other in host.replicas:
            if other is not cause and other.leap is not None and other.cost.rates != rates:
                self._ends_at(other, other.cut(self._timeline.now))

    def _ends_at(self, replica: SimulatedReplica, at: float | None) -> bool:
        """Schedule the end of a step. Return False if no step was begun."""
        if at is None:
            return False
        replica.version += 1
        replica.ends = at
        self._timeline.push(at, self._end, replica, replica.version, step_of=replica.number)
        return True

    def _begin(self, replica: SimulatedReplica) -> None:
        before = len(replica.host.computing)
        end, refused = replica.begin(self._timeline.now)
        for request in refused:
            self._refuse(replica, request)
        if not self._ends_at(replica, end):
            self._on_idle(replica)
        if len(replica.host.computing) != before:
            self.rate_changed(replica.host, replica)
        if replica.peers is not None:
            self._schedule_reads(replica, replica.peers)

    def _end(self, replica: SimulatedReplica, version: int) -> None:
        """Handle the end of a step or a leap."""
        if version != replica.version:
            return
        events, more = replica.end(self._timeline.now)
        self._deliver(replica, events)
        if not self._ends_at(replica, more):
            self._begin(replica)

    # ------------------------------------------------------------------------------------------- blocks of others

    def _schedule_reads(self, replica: SimulatedReplica, peers: Peers) -> None:
        """Schedule the ends of the reads that a replica has begun, and its checks for arrived blocks."""
        for at, batch in peers.begun:
            self._timeline.push(at, self._have_read, replica, peers, batch)
        peers.begun.clear()
        if replica.looks_again:
            replica.version += 1
            self._timeline.later(NAP, self._look_for_blocks, replica, replica.version)

    def _look_for_blocks(self, replica: SimulatedReplica, version: int) -> None:
        if version == replica.version:
            self.interrupt(replica)

    def _have_read(self, replica: SimulatedReplica, peers: Peers, batch: ArrivingBlocks) -> None:
        """Complete a read of another replica's blocks, except those that it no longer has."""
        if replica.peers is not peers or not replica.is_up:
            return
        now = self._timeline.now
        named = (one for one in self._replicas if one.name == batch.place)
        holder = next((one for one in named if one.is_up or one.draining), None)
        if holder is None or now < max(holder.hung_until, holder.cut_off_until, replica.cut_off_until):
            peers.end(batch, lambda _: Fault.IO)
        else:
            peers.end(batch, lambda read: None if holder.has_block(read, now) else Fault.ABSENT)
        if replica.looks_again:
            self.interrupt(replica)
