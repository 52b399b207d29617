"""A replica on a virtual clock: an engine's scheduler and cache, and its messages to gateways."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

from quire.cache.events import BlockRemoved, BlockStored, CacheEvent
from quire.cache.incoming import Read
from quire.config import EngineConfig
from quire.engine.cost import ModelCost
from quire.engine.prefill_budget import PrefillBudget
from quire.fleet.report import STATE_EVERY, Report, load_differs
from quire.fleet.state import ReplicaState
from quire.request import Event, FinishReason, Request
from quire.simulate.device import NO_DEVICE, DeviceFile, Rates, ReplicaCost
from quire.simulate.leap import Leap
from quire.simulate.peers import Peers
from quire.simulate.simulation import SimulatedStep, Simulation

_first_number = Struct("<Q").unpack_from


@dataclass(eq=False)
class SimulatedHost:
    """A machine whose replicas share its memory bandwidth."""

    name: str
    reads: float  # bytes a second of one replica
    total: float  # bytes a second of all replicas together
    per_neighbour: float  # share by which steps take longer for each other replica that computes
    per_machine: int  # replicas, two or more, that use all cores; 0: some cores are free
    replicas: list[SimulatedReplica] = field(default_factory=list)
    computing: set[int] = field(default_factory=set)  # numbers of the replicas that compute now
    slowness: float = 1.0

    def rates(self) -> Rates:
        """Return the rates of steps next to the replicas that compute now."""
        others = max(0, len(self.computing) - 1)
        return Rates(
            max(1.0, (others + 1) * self.reads / self.total),
            self.slowness * (1.0 + self.per_neighbour * others),
            others > 0 and others + 1 >= self.per_machine > 0,
        )


def host_of(name: str, device: DeviceFile) -> SimulatedHost:
    """Return the machine of a device file."""
    reads, total = device.bytes_per_second, device.host_bytes_per_second
    return SimulatedHost(name, reads, total, device.per_neighbour, device.per_machine)


class Outbox:
    """Messages of a replica to one gateway that are not received yet."""

    def __init__(self) -> None:
        self.blocks: deque[tuple[float, bool, list[int]]] = deque()  # time, whether stored or removed, digests
        self.states: deque[tuple[float, ReplicaState, Sequence[int]]] = deque()  # time, state, newly counted flows


class _Engine(Simulation):
    """A simulation that reports the changes of its blocks."""

    replica: SimulatedReplica
    _evicted = 0  # blocks, after the last step

    def note_blocks(self, now: float) -> None:
        """Record the number of used blocks after a step that ends at `now`, and send block events."""
        super().note_blocks(now)
        self.replica.used_blocks = self.scheduler.manager.pools[0].num_used
        self.replica.flush(now)
        self._evicted = self.scheduler.manager.num_evicted

    def lose_step(self) -> None:
        """Exclude the evictions of a step that never ends."""
        self.num_uncounted = self.scheduler.manager.num_evicted - self._evicted


class SimulatedReplica:
    """Runs steps one by one. The cell calls `begin` when a step may start, and `end` when it is over."""

    def __init__(
        self, number: int, name: str, kind: str, bits: str, host: SimulatedHost, model: ModelCost, cost: ReplicaCost,
        config: EngineConfig, queue: int, *, num_gateways: int, host_blocks: int, leaps: bool,
    ) -> None:  # fmt: skip
        self.number, self.name, self.kind, self.bits = number, name, kind, bits
        self.host, self.cost = host, cost
        self.most = config.max_num_seqs + queue  # requests that it accepts at a time
        self.leaps = leaps
        self._model, self._config, self._host_blocks, self._num_gateways = model, config, host_blocks, num_gateways
        self.is_up = True
        self.draining = False
        self.hung_until = self.cut_off_until = 0.0  # seconds
        self.is_mute = False  # gateways have lost it and receive nothing
        self.incarnation = 0
        self.version = 0  # of the current step or leap: ends of older versions are ignored
        self.ends = 0.0  # time when the current step or leap ends
        self.step: SimulatedStep | None = None
        self.leap: Leap | None = None
        self.is_cut = False  # whether the leap ends with its last planned step
        self.past: list[_Engine] = []
        self.start()

    def start(self) -> None:
        """Start with an empty cache."""
        self.engine = _Engine(
            self._model, NO_DEVICE, self._config, num_host_blocks=self._host_blocks, sample_every=0, cost=self.cost,
        )  # fmt: skip
        self.engine.replica = self
        scheduler = self.engine.scheduler
        if self._config.max_num_batched_tokens is None:
            scheduler.pace = PrefillBudget(self.cost.seconds_a_prompt_token)
        self.peers: Peers | None = None
        if self.reads_peers:
            self.peers = Peers(scheduler, self._model, self.cost.block_bytes, self.cost.server.peer_byte)
        self.report = Report(scheduler)
        self.reads_until = 0.0  # when the latest request that arrived has been read
        self.inbox: deque[tuple[Request, float, int]] = deque()  # with the time of arrival and the flow
        self.aborted: list[str] = []  # requests to abort before the next step
        self._served: set[str] = set()  # names of all jobs so far
        self._repeated: set[str] = set()  # requests for repeated jobs, which may find their own answers in the cache
        self.boxes = [Outbox() for _ in range(self._num_gateways)]
        self._events: list[tuple[bool, list[int]]] = []  # block events of this step
        self._started: list[int] = []  # flows that the next state counts for the first time
        self.used_blocks = 0  # after the last step
        self._sent: ReplicaState | None = None
        self._next_state = 0.0
        self._observed = -1  # number of sequences in the decode steps that were observed last
        self._new_segment = False
        self._in_segment: ReplicaState | None = None  # the last state of the current segment
        if self.boxes:
            scheduler.manager.listeners.append(self._hear)

    @property
    def reads_peers(self) -> bool:
        """True if it reads blocks from other replicas. With sliding windows or states it reads none."""
        return self.cost.server.peer_byte > 0.0 and not self.engine.scheduler.manager.frees_early

    # ------------------------------------------------------------------------------------------------- computing

    @property
    def is_busy(self) -> bool:
        """True if a step or a leap has begun."""
        return self.step is not None or self.leap is not None

    @property
    def is_there(self) -> bool:
        """True if it accepts requests, unless it is full."""
        return self.is_up and not self.draining

    @property
    def is_full(self) -> bool:
        """True if it accepts no further request now."""
        return self.draining or self.num_requests >= self.most

    @property
    def num_requests(self) -> int:
        """The number of requests that run or wait."""
        return len(self.engine.scheduler.requests) + len(self.inbox)

    def take(self, request: Request, now: float, flow: int, job: str) -> None:
        """Queue a request for the next step. job: its name, which a repeated request has, too."""
        if job in self._served:
            self._repeated.add(request.id)
        self._served.add(job)
        self.inbox.append((request, now, flow))

    def begin(self, now: float) -> tuple[float | None, list[Request]]:
        """Read the inbox, and begin a step or a leap.

        Return the time of its end, or None without work, and the refused requests.
        """
        engine, refused = self.engine, []
        engine.clock.now = max(engine.clock.now, now)
        while self.inbox:
            request, came, flow = self.inbox.popleft()
            if engine.add(request, came):
                self._started.append(flow)
            else:
                refused.append(request)
        engine.leaps = self.leaps and not self.aborted and not self._awaits_peers
        for name in self.aborted:
            engine.scheduler.finish(name, FinishReason.ABORT)
        self.aborted.clear()
        if not engine.scheduler.has_work:
            self.host.computing.discard(self.number)
            return None, refused
        self.host.computing.add(self.number)
        self.cost.rates = self.host.rates()
        if self._repeated:  # then the order of publishing blocks matters, and decoders publish late
            self._repeated &= engine.scheduler.requests.keys()
            engine.leaps = engine.leaps and not self._repeated
        if engine.can_leap():
            leap = Leap(engine)
            if leap.plan_ahead():
                self.leap, self.is_cut = leap, False
                self._begin_segment()
                return leap.times[-1], refused
        step = engine.begin()
        has_nothing = step.plan.is_empty and not (step.decoders or step.plan.failed or engine.scheduler.is_ending)
        if has_nothing and self._awaits_peers:
            self.host.computing.discard(self.number)
            self.flush(now)
            self._send(now, [])
            return None, refused
        self.step = step
        return now + step.seconds, refused

    @property
    def _awaits_peers(self) -> bool:
        prefetch = self.engine.scheduler.prefetch
        return prefetch is not None and prefetch.is_waiting

    @property
    def looks_again(self) -> bool:
        """True if it is idle until blocks of other replicas arrive, or a request has waited for them long enough."""
        return not self.is_busy and self._awaits_peers

    def cut(self, now: float) -> float | None:
        """Stop a leap after its current step. Return the new end; None if the end does not change."""
        if self.leap is None or self.is_cut:
            return None
        self.is_cut = True
        self.leap.cut(now)
        return self.leap.times[-1]

    def end(self, now: float) -> tuple[list[Event], float | None]:
        """End the step or the planned part of a leap. Return its events, and the leap's next end.

        If `begin` must be called next, there is no end: None.
        """
        engine = self.engine
        if self.step is not None:
            step, self.step = self.step, None
            engine.clock.now = now
            events = engine.finish(step)
            self._observe_step(step, events)
            self._send(now, events)
            return events, None
        leap = self.leap
        if leap is None:
            return [], None
        self._put_due(leap, now, last=False)
        self._observe_leap(leap)
        events = leap.apply(leap.num_planned)
        self.report.count_decoded()
        if self.is_cut or not leap.plan_ahead():
            leap.close()
            self.leap = None
            self._send(now, events)
            return events, None
        self._send(now, events)
        self._begin_segment()
        return events, leap.times[-1]

    def _begin_segment(self) -> None:
        """Begin a segment: steps that decode the same requests."""
        self._new_segment, self._in_segment = True, None

    def interrupt(self, now: float) -> None:
        """Discard the current step or leap. Requests keep the tokens that were drawn until now."""
        if self.step is not None:
            self.engine.lose_step()
        leap, self.step, self.leap = self.leap, None, None
        self.version += 1
        if leap is not None:
            leap.apply(min(leap.num_planned - 1, leap.num_done(now)))
            self.report.count_decoded()
            leap.close()
        self.host.computing.discard(self.number)

    def delay(self, now: float, seconds: float) -> float | None:
        """Delay the end of the current step. Return the new end; None if there is no step."""
        if self.leap is not None:
            self.catch_up(now, last=False)
            self.cut(now)
            self.leap.delay(seconds)
            return self.leap.times[-1]
        return None if self.step is None else self.ends + seconds

    def num_drawn(self, request: Request, now: float) -> int:
        """Return the number of tokens that a request has drawn by now."""
        self.catch_up(now, last=False)
        self.engine.decoders.update(request)
        return request.num_generated

    def catch_up(self, now: float, *, last: bool = True) -> None:
        """Apply the steps of a leap that have ended by now, except the last planned one, and send their states.

        last: create only the last of these states.
        """
        leap = self.leap
        if leap is None:
            return
        done = self._put_due(leap, now, last=last)
        if done > leap.num_applied:
            self._observe_leap(leap)
            leap.apply(done)
            self.report.count_decoded()

    def _put_due(self, leap: Leap, now: float, *, last: bool) -> int:
        """Send the states that are due by now. Return the number of ended steps, without the last planned one."""
        done = min(leap.num_planned - 1, leap.num_done(now))
        due = self._due(leap, done)
        for at in due[-1:] if last else due:
            taken, published = leap.blocks_by(at)
            if self._in_segment is None:
                self._observe_leap(leap)
                self._in_segment = self.state(taken, published)
            else:
                self._in_segment = self.report.later(self._in_segment, taken, published)
            self._put_state(leap.times[at], self._in_segment)
        return done

    def _due(self, leap: Leap, done: int) -> list[int]:
        """Return the planned steps up to `done` after which a state must be sent."""
        times, due = leap.times, []
        at = bisect_left(times, self._next_state, leap.num_applied + 1)
        while self.boxes and at <= done:
            due.append(at)
            self._next_state = times[at] + STATE_EVERY
            at = bisect_left(times, self._next_state, at + 1)
        return due

    def tell(self, now: float) -> None:
        """Send gateways the state that is due by now."""
        leap = self.leap
        if leap is not None and now >= self._next_state:
            self._put_due(leap, now, last=True)

    def has_block(self, read: Read, now: float) -> bool:
        """Return whether a block that another replica reads is in the cache."""
        group, digest = read.name
        found = self.engine.scheduler.manager.indexes[group].entry(digest, read.parent, read.tokens)
        return found is not None and (self.leap is None or found.block not in self.leap.blocks_taken(now)[group])

    def owes_evictions(self, now: float) -> bool:
        """Return whether `catch_up` would report further evictions to gateways."""
        return self.leap is not None and self.leap.evicts_by(now)

    # Of successive steps that decode the same number of sequences, only the first one is observed, since the others add
    # no information.

    def _observe_step(self, step: SimulatedStep, events: Sequence[Event]) -> None:
        items, num_silent = step.plan.items, len(step.decoders)
        only_decodes = all(item.start >= item.request.num_prompt for item in items)
        decoding = len(items) + num_silent if only_decodes else -1
        if decoding >= 0 and decoding == self._observed:
            self.report.count(events, num_silent)
            return
        self._observed = decoding
        self.report.observe(events, step.seconds, num_silent)

    def _observe_leap(self, leap: Leap) -> None:
        count = len(self.engine.scheduler.running)
        if self._new_segment and count != self._observed:
            self._observed = count
            self.report.rates.observe(0, count, leap.seconds)
        self._new_segment = False

    # -------------------------------------------------------------------------------------------------- reporting

    def _hear(self, event: CacheEvent) -> None:
        if isinstance(event, (BlockStored, BlockRemoved)) and event.group == 0:
            stored, names = isinstance(event, BlockStored), list(map(wire_name, event.block_hashes))
            if self._events and self._events[-1][0] is stored:
                self._events[-1][1].extend(names)
            else:
                self._events.append((stored, names))

    def flush(self, now: float) -> None:
        """Send block events to gateways."""
        if self._events:
            for box in self.boxes:
                box.blocks.extend([(now, stored, digests) for stored, digests in self._events])
            self._events.clear()

    def _send(self, now: float, events: Sequence[Event]) -> None:
        """Send the state to gateways if the load has changed or a state is due."""
        if not self.boxes:
            return
        is_decode = self._observed >= 0 and not self._started and not any(one.finish_reason for one in events)
        if is_decode and now < self._next_state:
            return
        state = self.state()
        if now >= self._next_state or load_differs(state, self._sent):
            self._put_state(now, state)
            self._next_state = now + STATE_EVERY

    def _put_state(self, now: float, state: ReplicaState | None = None) -> None:
        state = state or self.state()
        self._sent = state
        for box in self.boxes:
            box.states.append((now, state, self._started))
        self._started = []

    def announce(self, now: float) -> None:
        """Send the state to gateways now, since the replica is new or draining."""
        self._in_segment = None
        if self.boxes:
            self._put_state(now)

    def state(self, taken: int = 0, published: int | None = None) -> ReplicaState:
        """Return the current state. taken, published: see `Report.state`."""
        decoders = self.engine.decoders
        unheard = decoders.unpublished_blocks(decoders.step) if published is None else published
        return self.report.state(draining=self.draining, taken=taken, published=unheard)

    def held(self) -> list[int]:
        """Return the digests of its blocks in the form that gateways use."""
        self.engine.decoders.update_all()
        return [wire_name(one.digest) for one in self.engine.scheduler.manager.indexes[0].by_block.values()]

    # --------------------------------------------------------------------------------------------------- figures

    def numbers(self) -> dict[str, int]:
        """Return the numbers of the time series."""
        scheduler = self.engine.scheduler
        return {
            "replicas": 1,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(scheduler.swapped),
            "used_blocks": self.used_blocks,
            "blocks": scheduler.manager.pools[0].num_blocks,
        }

    def engines(self) -> list[Any]:
        """Return the engines of all its starts."""
        return [*self.past, self.engine]


def wire_name(digest: bytes) -> int:
    """Return a block's name in the form that gateways use."""
    return _first_number(digest)[0]  # type: ignore[no-any-return]
