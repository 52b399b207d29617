"""A gateway on a virtual clock: the real index, score and averages, with a delayed view of replicas."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from quire.fleet.averages import Averages
from quire.fleet.index import Expectation, FleetIndex
from quire.fleet.score import Candidate, PlacementChoice, choose, eligible, step_age, with_holders
from quire.fleet.state import ReplicaState
from quire.simulate.replica import Outbox, SimulatedReplica

NO_DISKS = FleetIndex()  # simulated replicas keep no blocks on disks


@dataclass(slots=True, eq=False)
class Sent:
    """A request that was sent to a replica."""

    slot: int
    uncached: int
    at: float
    expectation: Expectation
    is_seen: bool = False  # a received state counts it


class SimulatedGateway:
    """A gateway that knows of each replica the messages that it has received so far."""

    def __init__(self, number: int, replicas: Sequence[SimulatedReplica], lag: float) -> None:
        self.number = number
        self.lag = lag
        self.replicas = replicas
        self.index = FleetIndex()
        self.averages = Averages()
        self.lost: set[int] = set()  # slots that do not answer
        self._states: dict[int, tuple[float, ReplicaState]] = {}  # by slot, with the time of arrival
        self._reads_peers = False  # whether any replica reads blocks of others
        # By slot: reused candidates, for requests of which the replica has no block, if its state counts all its load.
        self._same: dict[int, Candidate] = {}
        self._sent: dict[int, Sent] = {}  # by flow
        self._unseen: dict[int, dict[int, Sent]] = {}  # by slot and flow

    def hear(self, now: float) -> None:
        """Take in the messages that have arrived."""
        horizon, number, lost = now - self.lag, self.number, self.lost
        for slot, replica in enumerate(self.replicas):
            if slot in lost or not replica.is_up or replica.cut_off_until > now:
                continue
            if replica.leap is not None:
                replica.tell(horizon)
            box = replica.boxes[number]
            if box.blocks:
                self._hear_of_blocks(slot, box, horizon)
            while box.states and box.states[0][0] <= horizon:
                at, state, started = box.states.popleft()
                self._states[slot] = (at + self.lag, state)
                for flow in started:
                    if unseen := self._unseen.get(slot):
                        unseen.pop(flow, None)

    def _hear_of_blocks(self, slot: int, box: Outbox, horizon: float) -> None:
        while box.blocks and box.blocks[0][0] <= horizon:
            _, stored, digests = box.blocks.popleft()
            (self.index.store if stored else self.index.remove)(slot, digests)

    def _runs(self, digests: Sequence[int], now: float) -> dict[int, int]:
        """Return the runs of the index. Evictions are fetched only here, where they matter."""
        runs, horizon, is_late = self.index.runs(digests), now - self.lag, False
        for slot in runs:
            replica = self.replicas[slot]
            if slot not in self.lost and replica.cut_off_until <= now and replica.owes_evictions(horizon):
                replica.catch_up(horizon)
                self._hear_of_blocks(slot, replica.boxes[self.number], horizon)
                is_late = True
        return self.index.runs(digests) if is_late else runs

    def choose(
        self, name: str, tokens: int, most: int, digests: Sequence[int], bits: str | None,
        passed_over: Collection[int], now: float,
    ) -> PlacementChoice:  # fmt: skip
        """Choose a replica for a request. tokens: to compute. most: to generate at most. Raises NoReplica."""
        self.hear(now)
        runs = self._runs(digests, now)
        given = self.index.held_runs(digests, NO_DISKS) if runs and self._reads_peers else {}
        candidates = []
        for slot, (came, state) in self._states.items():
            num_blocks, unseen = runs.get(slot, 0), self._unseen.get(slot)
            if not (num_blocks or unseen):  # most replicas of a fleet
                same = self._same.get(slot)
                if same is None or same.state is not state:
                    same = self._same[slot] = self._candidate(slot, state, 0.0, 0, 0, 0, 0)
                same.step_age = step_age(state, came, now, now)
                candidates.append(same)
                continue
            uncached, first = 0, now
            if unseen:
                uncached = sum([one.uncached for one in unseen.values()])
                first = min([one.at for one in unseen.values()])
            age = step_age(state, came, first, now)
            num_unseen, num_given = len(unseen) if unseen else 0, given.get(slot, 0)
            candidates.append(self._candidate(slot, state, age, num_blocks, uncached, num_unseen, num_given))
        if given:
            candidates = with_holders(candidates)
        if passed_over:
            candidates = [one for one in candidates if one.slot not in passed_over]
        lost = [f"{self.replicas[slot].name} does not answer" for slot in sorted(self.lost)]
        demand = self.averages.demand(name, tokens, self.averages.new_tokens(most))
        return choose(demand, eligible(candidates, bits, lost))

    def _candidate(
        self, slot: int, state: ReplicaState, age: float, num_blocks: int, uncached: int, unseen: int, given: int
    ) -> Candidate:
        replica = self.replicas[slot]
        return Candidate(
            slot=slot,
            name=replica.name,
            fingerprint=replica.bits,
            state=state,
            step_age=age,
            num_blocks=num_blocks,
            unseen_tokens=uncached,
            unseen_requests=unseen,
            num_given=given if state.seconds_a_peer_block else 0,
        )

    def send(self, flow: int, choice: PlacementChoice, digests: Sequence[int], now: float) -> None:
        """Record that a request is on its way to a replica."""
        slot = choice.best.candidate.slot
        made = Sent(slot, choice.best.uncached_tokens, now, self.index.expect(slot, digests))
        self._sent[flow] = made
        self._unseen.setdefault(slot, {})[flow] = made

    def settle(self, flow: int) -> None:
        """Forget a request that has ended or moves."""
        made = self._sent.pop(flow, None)
        if made is not None:
            self.index.settle(made.expectation)
            if unseen := self._unseen.get(made.slot):
                unseen.pop(flow, None)

    def lose(self, slot: int) -> None:
        """Forget a replica that does not answer any more."""
        self.lost.add(slot)
        self._states.pop(slot, None)
        self.index.clear(slot)

    def find(self, slot: int, now: float) -> None:
        """Connect to a replica, which sends all its blocks."""
        replica = self.replicas[slot]
        self._reads_peers = self._reads_peers or replica.reads_peers
        self.lost.discard(slot)
        box = replica.boxes[self.number]
        box.blocks.clear()
        box.states.clear()
        replica.catch_up(now, last=False)
        box.blocks.clear()
        self.index.replace(slot, replica.held())
        self._states[slot] = (now, replica.state())
