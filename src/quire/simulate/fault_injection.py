"""Fault injection in a cell: kills, hangs, slow hosts and partitions, from a fleet's file."""

from __future__ import annotations

from collections.abc import Sequence

from quire.fleet.wire import SILENCE
from quire.simulate.cell import Cell
from quire.simulate.flow import Flow
from quire.simulate.replica import SimulatedHost, SimulatedReplica
from quire.simulate.spec import Happening


class Trouble:
    """Injects faults into the replicas of a cell."""

    def __init__(self, cell: Cell, happenings: Sequence[Happening]) -> None:
        """Create this before the cell runs."""
        self._cell = cell
        for one in happenings:
            cell.timeline.push(one.at, self._happen, one)

    def _happen(self, happening: Happening) -> None:
        cell = self._cell
        for replica in cell.replicas:
            if replica.is_up and happening.target in (replica.name, replica.host.name, replica.kind):
                cell.timeline.note(happening.what, replica.number)
                getattr(self, f"_{happening.what}")(replica, happening)

    def _kill(self, replica: SimulatedReplica, happening: Happening) -> None:
        cell = self._cell
        drawn = drawn_at(cell, replica)
        before = len(replica.host.computing)
        replica.interrupt(cell.timeline.now)
        replica.is_up = False
        if len(replica.host.computing) != before:
            cell.steps.rate_changed(replica.host, replica)
        at_gateways = cell.timeline.delay(cell.spec.network.to_replica)
        cell.timeline.later(at_gateways, cell.lose, replica, drawn, cell.timeline.now)
        cell.timeline.later(happening.duration, cell.restart, replica)

    def _hang(self, replica: SimulatedReplica, happening: Happening) -> None:
        cell = self._cell
        replica.hung_until = cell.timeline.now + happening.duration
        if not cell.steps.hold_up(replica, happening.duration):
            cell.timeline.push(replica.hung_until, cell.steps.interrupt, replica)
        self._fall_silent(replica, happening.duration)

    def _partition(self, replica: SimulatedReplica, happening: Happening) -> None:
        replica.cut_off_until = self._cell.timeline.now + happening.duration
        self._fall_silent(replica, happening.duration)

    def _slow(self, replica: SimulatedReplica, happening: Happening) -> None:
        replica.host.slowness *= happening.factor
        self._cell.steps.rate_changed(replica.host, None)
        self._cell.timeline.later(happening.duration, self._be_fast, replica.host, happening.factor)

    def _be_fast(self, host: SimulatedHost, factor: float) -> None:
        host.slowness /= factor
        self._cell.steps.rate_changed(host, None)

    def _fall_silent(self, replica: SimulatedReplica, seconds: float) -> None:
        """Stop a replica's messages to gateways. If that lasts long enough, they lose it until it returns."""
        cell = self._cell
        if seconds <= SILENCE or not cell.gateways:
            return
        replica.is_mute = True
        cell.timeline.later(SILENCE, cell.lose, replica, drawn_at(cell, replica), cell.timeline.now)
        cell.timeline.later(seconds, self._rejoin, replica)

    def _rejoin(self, replica: SimulatedReplica) -> None:
        """Reconnect a silent replica, and abort its earlier requests, which have moved."""
        replica.is_mute = False
        self._cell.forget_others(replica)
        self._cell.welcome(replica)


def drawn_at(cell: Cell, replica: SimulatedReplica) -> dict[Flow, int]:
    """Return the number of drawn tokens of each flow at a replica."""
    return {flow: replica.num_drawn(flow.request, cell.timeline.now) for flow in cell.router.at(replica)}
