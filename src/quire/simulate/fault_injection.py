"""Fault injection in a cell: kills, hangs, slow hosts and partitions, from a fleet's file."""

from __future__ import annotations

from collections.abc import Sequence

from quire.fleet.wire import SILENCE
from quire.simulate.cell import Cell
from quire.simulate.replica import SimulatedHost, SimulatedReplica
from quire.simulate.spec import Happening


class Trouble:
    """Injects faults into the replicas of a cell."""

    def __init__(self, cell: Cell, happenings: Sequence[Happening]) -> None:
        """Create this before the cell runs."""
        self._cell = cell
        for one in happenings:
            cell.push(one.at, self._happen, one)

    def _happen(self, happening: Happening) -> None:
        cell = self._cell
        for replica in cell.replicas:
            if replica.is_up and happening.target in (replica.name, replica.host.name, replica.kind):
                cell.note(happening.what, replica.number)
                getattr(self, f"_{happening.what}")(replica, happening)

    def _kill(self, replica: SimulatedReplica, happening: Happening) -> None:
        cell = self._cell
        drawn = cell.drawn_at(replica)
        before = len(replica.host.computing)
        replica.interrupt(cell.now)
        replica.is_up = False
        if len(replica.host.computing) != before:
            cell.rate_changed(replica.host, replica)
        cell.push(cell.now + cell.delay(cell.spec.network.to_replica), cell.lose, replica, drawn, cell.now)
        cell.push(cell.now + happening.duration, cell.restart, replica)

    def _hang(self, replica: SimulatedReplica, happening: Happening) -> None:
        cell = self._cell
        replica.hung_until = cell.now + happening.duration
        if not cell.hold_up(replica, happening.duration):
            cell.push(replica.hung_until, cell.interrupt, replica)
        self._fall_silent(replica, happening.duration)

    def _partition(self, replica: SimulatedReplica, happening: Happening) -> None:
        replica.cut_off_until = self._cell.now + happening.duration
        self._fall_silent(replica, happening.duration)

    def _slow(self, replica: SimulatedReplica, happening: Happening) -> None:
        replica.host.slowness *= happening.factor
        self._cell.rate_changed(replica.host, None)
        self._cell.push(self._cell.now + happening.duration, self._be_fast, replica.host, happening.factor)

    def _be_fast(self, host: SimulatedHost, factor: float) -> None:
        host.slowness /= factor
        self._cell.rate_changed(host, None)

    def _fall_silent(self, replica: SimulatedReplica, seconds: float) -> None:
        """Stop a replica's messages to gateways. If that lasts long enough, they lose it until it returns."""
        cell = self._cell
        if seconds <= SILENCE or not cell.gateways:
            return
        replica.is_mute = True
        cell.push(cell.now + SILENCE, cell.lose, replica, cell.drawn_at(replica), cell.now)
        cell.push(cell.now + seconds, self._rejoin, replica)

    def _rejoin(self, replica: SimulatedReplica) -> None:
        """Reconnect a silent replica, and abort its earlier requests, which have moved."""
        replica.is_mute = False
        self._cell.forget_others(replica)
        self._cell.welcome(replica)
