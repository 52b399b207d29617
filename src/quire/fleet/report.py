"""Report: what a replica says of itself, from its scheduler and the steps that it made."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.scheduler import Scheduler
from quire.fleet.rates import StepRates
from quire.fleet.state import ReplicaState
from quire.request import Event

STATE_EVERY = 0.05  # s: while the load stays the same, a state costs more than a step's tokens


class Report:
    """The engine thread's."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.rates = StepRates()
        self.uncached: dict[str, int] = {}  # tokens that a request is expected to compute, until it ends
        self.prompt_tokens = self.decoded_tokens = 0  # that were computed since it began
        self._scheduler = scheduler
        self._num_planned = 0

    def observe(self, events: Sequence[Event], seconds: float, num_silent: int = 0) -> None:
        """A step was computed and committed.

        events: what came of it. num_silent: requests that decoded in it and have no event.
        """
        self.rates.observe(*self.count(events, num_silent), seconds)

    def count(self, events: Sequence[Event], num_silent: int = 0) -> tuple[int, int]:
        """Count what steps computed since the last time: tokens of prompts, and sequences that decoded."""
        num_planned = self._scheduler.num_planned
        rows, self._num_planned = num_planned - self._num_planned, num_planned
        for event in events:
            if event.finish_reason is not None:
                self.uncached.pop(event.request_id, None)
        drawn = len({event.request_id for event in events if event.token is not None}) + num_silent
        computed, decoded = max(0, rows - drawn), min(rows, drawn)
        self.prompt_tokens += computed
        self.decoded_tokens += decoded
        return computed, decoded

    def count_decoded(self) -> None:
        """Count what steps computed since the last time, all of which only decoded."""
        num_planned = self._scheduler.num_planned
        self.decoded_tokens += num_planned - self._num_planned
        self._num_planned = num_planned

    def state(self, *, draining: bool, taken: int = 0, published: int = 0) -> ReplicaState:
        """The replica at this moment.

        taken, published: blocks that requests have taken and that have become reusable, but not in the books yet.
        """
        scheduler, manager, rates = self._scheduler, self._scheduler.manager, self.rates
        free, cached = self._free_blocks(taken, published)
        waiting = sum([max(0, request.num_missing - 1) for request in scheduler.running])
        for queue in (scheduler.waiting, scheduler.swapped):
            for request in queue:
                if request.group is None or request.group.members[0] is request:
                    # What one of them computes, others that wait may find in the cache.
                    waiting += min(request.num_missing, self.uncached.get(request.id, request.num_missing))
        return ReplicaState(
            waiting_tokens=waiting,
            num_waiting=len(scheduler.waiting) + len(scheduler.swapped),
            num_running=len(scheduler.running),
            max_running=scheduler.max_num_seqs,
            free_blocks=free,
            cached_blocks=cached,
            num_blocks=manager.num_blocks,
            block_size=manager.block_size,
            seconds_a_step=rates.seconds_a_step,
            seconds_a_prompt_token=rates.seconds_a_prompt_token,
            seconds_a_sequence=rates.seconds_a_sequence,
            draining=draining,
            **self._reading(),
        )

    def later(self, before: ReplicaState, taken: int, published: int) -> ReplicaState:
        """The replica after steps in which the same requests decoded since that state, and nothing else happened.

        taken, published: as `state` has them.
        """
        return before.with_room(*self._free_blocks(taken, published))

    def _free_blocks(self, taken: int, published: int) -> tuple[int, int]:
        """Free blocks, and those of them that can be reused, of the group that has the fewest."""
        pools, indexes = self._scheduler.manager.pools, self._scheduler.manager.indexes
        fewest = min(range(len(pools)), key=lambda g: pools[g].num_free) if len(pools) > 1 else 0
        free = pools[fewest].num_free - taken
        # Some of the index's blocks may be owned; to count these takes longer than a step may wait.
        return free, min(free, len(indexes[fewest]) + published)

    def _reading(self) -> dict[str, float]:
        """Seconds that it takes to read a block from each source."""
        sources = () if self._scheduler.prefetch is None else self._scheduler.prefetch.sources
        return {f"seconds_a_{source.name}_block": source.seconds_a_block for source in sources}


def load_differs(state: ReplicaState | None, sent: ReplicaState | None) -> bool:
    """Whether a request began or ended, or a part of a prompt was computed, between two states of a replica."""
    return _load(state) != _load(sent)


def _load(state: ReplicaState | None) -> tuple[int, ...] | None:
    return None if state is None else (state.waiting_tokens, state.num_waiting, state.num_running)
