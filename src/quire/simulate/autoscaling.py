"""Autoscaling of a cell's replicas by the fleet's policy."""

from __future__ import annotations

from collections.abc import Callable

from quire.fleet.scaling import Meter, Target, target
from quire.simulate.cell import Cell
from quire.simulate.flow import Flow
from quire.simulate.replica import SimulatedReplica
from quire.simulate.spec import AutoscalingSpec

READ = ("waiting_tokens", "max_running", "seconds_a_step", "seconds_a_prompt_token", "seconds_a_sequence")


class Autoscaler:
    """Reads the loads of a cell's replicas, and starts and drains replicas."""

    def __init__(self, cell: Cell, spec: AutoscalingSpec, make: Callable[[int], SimulatedReplica]) -> None:
        """Create this before the cell runs. spec: with the bounds of this cell. make: creates a replica by number."""
        self._cell = cell
        self._spec = spec
        self._make = make
        self._meters: dict[tuple[int, int], Meter] = {}  # by number and incarnation: a new process counts from 0
        self._target = Target(len(cell.replicas), 0.0)
        cell.timeline.push(spec.every, self._scale)

    def _scale(self) -> None:
        cell, spec, now = self._cell, self._spec, self._cell.timeline.now
        if not cell.clients.are_open:
            return
        there = [one for one in cell.replicas if one.is_there]
        loads = []
        for replica in there:
            replica.catch_up(now, last=False)
            state = replica.state()
            found = {name: getattr(state, name) for name in READ}
            found |= {"prompt_tokens": replica.report.prompt_tokens, "decoded_tokens": replica.report.decoded_tokens}
            meter = self._meters.setdefault((replica.number, replica.incarnation), Meter())
            loads.append(meter.read(found, now))
        before = self._target.replicas
        self._target = target(loads, now, self._target, spec.least, spec.most)
        if self._target.replicas != before:
            cell.timeline.note("scale", self._target.replicas)
        for _ in range(self._target.replicas - before):
            cell.timeline.later(spec.start_seconds, self._start)
        for replica in there[::-1][: max(0, before - self._target.replicas)]:
            self._drain(replica)
        cell.timeline.later(spec.every, self._scale)

    def _start(self) -> None:
        """Start a new replica, or restart one that has drained."""
        cell = self._cell
        gone = [one for one in cell.replicas if one.draining and not one.is_up]
        if gone:
            gone[0].draining = False
            cell.restart(gone[0])
        else:
            cell.join(self._make(len(cell.replicas)))

    def _drain(self, replica: SimulatedReplica) -> None:
        """Drain a replica: it accepts no further requests, and its requests move to others."""
        cell = self._cell
        replica.draining = True
        cell.timeline.note("drain", replica.number)
        if cell.gateways:
            for flow in cell.router.at(replica):
                self._move(flow, replica)
        replica.announce(cell.timeline.now)
        if not replica.num_requests and not replica.is_busy:
            cell.remove(replica)

    def _move(self, flow: Flow, replica: SimulatedReplica) -> None:
        """Move a request to another replica, if one can take it."""
        cell = self._cell
        if not any(one.is_there and one.bits == replica.bits for one in cell.replicas):
            return
        drawn = replica.num_drawn(flow.request, cell.timeline.now)
        cell.take_back(flow)
        flow.passed_over.add(replica.number)
        flow.num_lost -= 1  # `resume` counts it, but it was not lost
        cell.resume(flow, drawn, cell.timeline.now)
