"""A gateway on a virtual clock: the real index, score and averages, and views that lag."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from quire.fleet.averages import Averages
from quire.fleet.index import Expectation, FleetIndex
from quire.fleet.score import Candidate, Choice, choose, eligible, step_age, with_holders
from quire.fleet.state import ReplicaState
from quire.simulate.replica import Outbox, Replica

NO_DISKS = FleetIndex()  # that replicas keep blocks on


@dataclass(slots=True, eq=False)
class Sent:
    """A request that went to a replica."""

    slot: int
    uncached: int
    at: float
    expectation: Expectation
    is_seen: bool = False  # a state that has come counts it


class Gateway:
    """Knows of each replica what has come from it so far."""

    def __init__(self, number: int, replicas: Sequence[Replica], lag: float) -> None:
        self.number = number
        self.lag = lag
        self.replicas = replicas
        self.index = FleetIndex()
        self.averages = Averages()
        self.lost: set[int] = set()  # slots that do not answer
        self._states: dict[int, tuple[float, ReplicaState]] = {}  # with when it came
        self._reads_peers = False  # whether any replica does
        # By slot: for requests of which the replica has no block, while all that it was sent is in its state.
        self._same: dict[int, Candidate] = {}
        self._sent: dict[int, Sent] = {}  # by flow
        self._unseen: dict[int, dict[int, Sent]] = {}  # by slot and flow

    def hear(self, now: float) -> None:
        """Take in what has come."""
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
        """As the index has them. Of blocks that were evicted it hears only where it matters: here."""
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
    ) -> Choice:  # fmt: skip
        """Where a request goes. tokens: to compute. most: that it may generate. Raises NoReplica."""
        self.hear(now)
        runs = self._runs(digests, now)
        given = self.index.held_runs(digests, NO_DISKS) if runs and self._reads_peers else {}
        candidates = []
        for slot, (came, state) in self._states.items():
            num_blocks, unseen = runs.get(slot, 0), self._unseen.get(slot)
            if not (num_blocks or unseen):  # most of a fleet
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

    def send(self, flow: int, choice: Choice, digests: Sequence[int], now: float) -> None:
        """Count a request as on its way."""
        slot = choice.best.candidate.slot
        made = Sent(slot, choice.best.uncached_tokens, now, self.index.expect(slot, digests))
        self._sent[flow] = made
        self._unseen.setdefault(slot, {})[flow] = made

    def settle(self, flow: int) -> None:
        """A request has ended, or has gone elsewhere."""
        made = self._sent.pop(flow, None)
        if made is not None:
            self.index.settle(made.expectation)
            if unseen := self._unseen.get(made.slot):
                unseen.pop(flow, None)

    def lose(self, slot: int) -> None:
        """A replica does not answer any more."""
        self.lost.add(slot)
        self._states.pop(slot, None)
        self.index.clear(slot)

    def find(self, slot: int, now: float) -> None:
        """A replica answers, for the first time or again: it sends all that it holds."""
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

    @property
    def num_known(self) -> int:
        """Replicas that answer."""
        return len(self._states)
