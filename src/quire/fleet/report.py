"""Report: the state that a replica sends to gateways, from its scheduler and its steps."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.scheduler import Scheduler
from quire.fleet.rates import StepRates
from quire.fleet.state import ReplicaState
from quire.request import Event

STATE_EVERY = 0.05  # s between states while the load is unchanged: a state costs more than the tokens of a step


class Report:
    """Measures a replica. Only the engine thread may use it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.rates = StepRates()
        self.uncached: dict[str, int] = {}  # tokens that each open request is expected to compute
        self.prompt_tokens = self.decoded_tokens = 0  # computed since the start
        self._scheduler = scheduler
        self._num_planned = 0

    def observe(self, events: Sequence[Event], seconds: float, num_silent: int = 0) -> None:
        """Take in a step that was computed and committed.

        events: its events. num_silent: requests that decoded in it and have no event.
        """
        self.rates.observe(*self.count(events, num_silent), seconds)

    def count(self, events: Sequence[Event], num_silent: int = 0) -> tuple[int, int]:
        """Return the prompt tokens and the decoded sequences that steps computed since the last call."""
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
        """Count the tokens of the steps since the last call, all of which only decoded."""
        num_planned = self._scheduler.num_planned
        self.decoded_tokens += num_planned - self._num_planned
        self._num_planned = num_planned

    def state(self, *, draining: bool, taken: int = 0, published: int = 0) -> ReplicaState:
        """Return the current state of the replica.

        taken, published: blocks that requests have allocated, and blocks that have become reusable, which the pools and
        indexes do not count yet.
        """
        scheduler, manager, rates = self._scheduler, self._scheduler.manager, self.rates
        free, cached = self._free_blocks(taken, published)
        waiting = sum([max(0, request.num_missing - 1) for request in scheduler.running])
        for queue in (scheduler.waiting, scheduler.swapped):
            for request in queue:
                if request.group is None or request.group.members[0] is request:
                    # Other waiting members may find the blocks of the first one in the cache.
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
        """Return the state after steps in which only the same requests decoded.

        taken, published: see `state`.
        """
        return before.with_room(*self._free_blocks(taken, published))

    def _free_blocks(self, taken: int, published: int) -> tuple[int, int]:
        """Return the numbers of free blocks and of reusable free blocks, in the group with the fewest free ones."""
        pools, indexes = self._scheduler.manager.pools, self._scheduler.manager.indexes
        fewest = min(range(len(pools)), key=lambda g: pools[g].num_free) if len(pools) > 1 else 0
        free = pools[fewest].num_free - taken
        # Some of the index's blocks may be owned; counting these would delay the step too much.
        return free, min(free, len(indexes[fewest]) + published)

    def _reading(self) -> dict[str, float]:
        """Return the seconds that reading a block from each source takes."""
        sources = () if self._scheduler.prefetch is None else self._scheduler.prefetch.sources
        return {f"seconds_a_{source.name}_block": source.seconds_a_block for source in sources}


def load_differs(state: ReplicaState | None, sent: ReplicaState | None) -> bool:
    """Return whether a request began or ended, or a prompt was partly computed, between two states of a replica."""
    return _load(state) != _load(sent)


def _load(state: ReplicaState | None) -> tuple[int, ...] | None:
    return None if state is None else (state.waiting_tokens, state.num_waiting, state.num_running)
