"""A log of events of blocks and requests: recorded as they happen, reported as lines of JSON on demand.

A line contains ids and counts, never a token. All times are seconds since the log began.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.cache import events as cache
from quire.cache.events import CacheEvent
from quire.engine.engine import Engine
from quire.request import Event, FinishReason, Miss, PrefixReport, Request
from quire.server.http.sse import dumps

MAX_UNREPORTED = 8192  # events that are kept until they are reported; if there are more, the oldest are lost

WAITING, RUNNING, SWAPPED = "waiting", "running", "swapped"
# The events with which a request starts or resumes.
BEGINNINGS = frozenset({cache.BlocksAllocated, cache.BlocksShared, cache.BlocksForked, cache.BlocksSwappedIn})
PLAIN = {cache.BlocksAllocated: "allocated", cache.BlocksShared: "shared", cache.BlocksFreed: "freed"}
ONE_BLOCK_EACH = {"stored": 4, "evicted": 3, "forgotten": 3}  # lines that are joined, and the fields that must agree
ON_DISK = (cache.DiskBlockStored, cache.DiskBlockRemoved)
SWAPS = {cache.BlocksSwappedOut: "swapped_out", cache.BlocksSwappedIn: "swapped_in"}


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """An open request, as the log has seen it."""

    request: Request
    arrived: float
    state: str = WAITING
    ran: float | None = None  # when it first ran
    spoke: float | None = None  # when its first token arrived
    num_prompt: int = 0  # tokens of the prompt that were counted as computed, or found in the cache
    num_generated: int = 0  # tokens that were counted as generated, or inherited from a parent
    num_in_steps: int = 0  # tokens of the prompt that were found in the cache, or reported in a step
    reported: tuple[int, ...] = ()  # its last reported numbers


class EventLog:
    """Records the events of an engine. Call all methods on the engine's thread."""

    def __init__(self, engine: Engine, reports_salts: bool = True) -> None:
        """Start to record. reports_salts: whether a miss may reveal that the same text is cached under another salt."""
        self._reports_salts = reports_salts
        self.requests: dict[str, TrackedRequest] = {}  # by request id
        self.counts = {"copies": 0, "swapped_out": 0, "swapped_in": 0, "evictions": 0}  # blocks, so far
        self.num_prompt_tokens = self.num_generated_tokens = 0  # computed and generated, so far
        self._scheduler = engine.scheduler
        self._start = engine.scheduler.clock()
        # Entries are lines about requests and steps, or events with their request's ordinal, the block's predecessor
        # (for BlockStored), and the index of the entry's block in the event (for BlockStored and BlockRemoved).
        self._unreported: deque[tuple[CacheEvent, int, int, int] | list[Any]] = deque(maxlen=MAX_UNREPORTED)
        self._silent: dict[str, TrackedRequest] = {}  # the requests that have run, but have no token yet
        self._states: Counter[str] = Counter()  # number of requests in each state
        self._last_met = -1  # ordinal
        self._num_steps = 0
        self._num_planned = engine.scheduler.num_planned  # tokens, up to the last reported step
        self._step_end: float | None = None  # of the last step, if there was work left for another one
        self._meet(self._start)
        self._reconcile(self._start)
        engine.listen(self._hear)

    def __len__(self) -> int:
        """Return the number of unreported events. Any thread may call it."""
        return len(self._unreported)

    @property
    def now(self) -> float:
        """The current time."""
        return self._at(self._scheduler.clock())

    def _at(self, moment: float) -> float:
        return round(moment - self._start, 4)

    # ------------------------------------------------------------------------------------------------- recording

    def _hear(self, event: CacheEvent) -> None:
        if isinstance(event, ON_DISK):  # does not change a block of a pool
            return
        name, ordinal = getattr(event, "request_id", None), -1
        if name is not None:
            tracked = self.requests.get(name) or self._arrive(self._scheduler.requests[name], event.time)
            ordinal = tracked.request.schedule.ordinal
            if tracked.state is not RUNNING and event.__class__ in BEGINNINGS:
                self._run(tracked, event.time)
        if isinstance(event, cache.BlockCopied):
            self.counts["copies"] += 1
        elif isinstance(event, cache.BlockRemoved):
            self.counts["evictions"] += len(event.blocks) * event.evicted
        elif isinstance(event, (cache.BlocksSwappedOut, cache.BlocksSwappedIn)):
            self.counts[SWAPS[type(event)]] += len(event.blocks)
        before = -1
        if isinstance(event, cache.BlockStored) and event.parent_block_hash is not None:
            found = self._scheduler.manager.indexes[event.group].block_of(event.parent_block_hash)
            before = -1 if found is None else found
        # One entry for each block that becomes reusable, or is not any more: the event of a long prompt has many.
        for at in range(len(event.blocks) if isinstance(event, (cache.BlockStored, cache.BlockRemoved)) else 1):
            self._unreported.append((event, ordinal, before, at))
            before = event.blocks[at] if isinstance(event, cache.BlockStored) else -1

    def observe(self, events: Sequence[Event]) -> None:
        """Record the events of a step."""
        scheduler, silent = self._scheduler, self._silent
        now = scheduler.clock()
        self._meet(scheduler.manager.now)
        step = self._step(events, now) if scheduler.num_planned != self._num_planned else None
        self._step_end = now if scheduler.has_work else None
        if silent:
            for event in events:
                # The events of a beam search, which chooses the tokens itself, have only logprobs.
                if event.token is not None or event.logprobs is not None:
                    tracked = silent.pop(event.request_id, None)
                    if tracked is not None:
                        tracked.spoke = self._at(now)
                        self._unreported.append(["first_token", tracked.spoke, tracked.request.schedule.ordinal])
        for event in [event for event in events if event.finish_reason is not None]:
            self._end(event, now)
        if self._states[RUNNING] != len(scheduler.running) or self._states[SWAPPED] != len(scheduler.swapped):
            self._reconcile(now)
        if step is not None:  # last, because the entries since the previous step belong to this one
            self._unreported.append(step)

    def _step(self, events: Sequence[Event], now: float) -> list[Any]:
        """Return a line about a step that computed tokens: time, duration, token counts, and chunks of prompts."""
        scheduler, pieces = self._scheduler, []
        spoke = {event.request_id for event in events if event.token is not None} if self._silent else set()
        for tracked in self._silent.values():
            request = tracked.request
            is_whole = request.id in spoke or request.finish_reason is not None
            start = max(tracked.num_in_steps, request.cache.num_cached)
            end = request.num_prompt if is_whole else min(request.cache.num_computed, request.num_prompt)
            if end > start:
                pieces.append([request.schedule.ordinal, start, end - start])
                tracked.num_in_steps = end
        num_decoded = len(events) - (sum(event.request_id in self._silent for event in events) if self._silent else 0)
        num_computed = scheduler.num_planned - self._num_planned
        self._num_planned = scheduler.num_planned
        self._num_steps += 1
        begun = scheduler.manager.now if self._step_end is None else self._step_end
        line = ["step", self._at(now), self._num_steps, round(now - begun, 4), max(0, num_computed - num_decoded)]
        waiting = len(scheduler.waiting) + len(scheduler.swapped)
        return [*line, num_decoded, waiting, scheduler.hold(), pieces]

    def _meet(self, now: float) -> None:
        """Find the requests that have arrived."""
        new: list[Request] = []
        for request in reversed(self._scheduler.requests.values()):
            if request.schedule.ordinal <= self._last_met:
                break
            new.append(request)
        for request in reversed(new):
            self._last_met = request.schedule.ordinal
            if request.id not in self.requests:
                self._arrive(request, now)

    def _arrive(self, request: Request, now: float) -> TrackedRequest:
        tracked = self.requests[request.id] = TrackedRequest(request, self._at(now))
        self._states[WAITING] += 1
        limit = self._scheduler.longest(request)
        about = [request.schedule.ordinal, request.id, request.num_prompt, limit, request.sample_index, family(request)]
        self._unreported.append(["arrived", tracked.arrived, *about])
        return tracked

    def _run(self, tracked: TrackedRequest, now: float) -> None:
        """Record that a request got blocks."""
        request = tracked.request
        if tracked.state is WAITING:  # a swapped request returns with all that it had
            tracked.num_prompt = min(request.cache.num_cached, request.num_prompt)
        self._move(tracked, RUNNING)
        if tracked.ran is None:
            tracked.ran = self._at(now)
            tracked.num_generated = request.num_generated
            self._silent[request.id] = tracked
            self._unreported.append(["ran", tracked.ran, request.schedule.ordinal, self.report(request)])
        else:
            self._unreported.append(["resumed", self._at(now), request.schedule.ordinal])

    def report(self, request: Request) -> PrefixReport | None:
        """Return the prefix cache's report on a request, without the information that must not be reported."""
        found = request.cache.prefix_report
        if found is None or found.miss is not Miss.SALT or self._reports_salts:
            return found
        return replace(found, miss=Miss.UNSEEN)

    def _move(self, tracked: TrackedRequest, state: str) -> None:
        self._states[tracked.state] -= 1
        self._states[state] += 1
        tracked.state = state
        tracked.reported = ()  # a snapshot in between may have reported other numbers

    def _reconcile(self, now: float) -> None:
        """Find the requests that lost their blocks, but have not ended."""
        for tracked in self.requests.values():
            request = tracked.request
            state = RUNNING if request.cache.block_ids else SWAPPED if request.cache.host_block_ids else WAITING
            if state is RUNNING and tracked.state is not RUNNING:  # it has run since before the log began
                self._run(tracked, now)
            elif state is not tracked.state:
                if tracked.state is RUNNING:
                    self._unreported.append(
                        ["preempted", self._at(now), request.schedule.ordinal, state, request.num_generated]
                    )
                self._move(tracked, state)

    def _end(self, event: Event, now: float) -> None:
        tracked = self.requests.pop(event.request_id, None)
        error = None if event.error is None else event.error.partition(":")[0]  # the rest may contain client data
        line = ["ended", self._at(now), -1, event.request_id, event.finish_reason, 0, 0, error, 0, 0]
        if tracked is not None:  # otherwise it arrived and ended between two steps
            request = tracked.request
            self._silent.pop(request.id, None)
            self._states[tracked.state] -= 1
            self._count(tracked)
            line[2], line[5], line[6] = request.schedule.ordinal, request.num_prompt, request.num_generated
            line[8:] = drafts_of(request)
        self._unreported.append(line)

    def _count(self, tracked: TrackedRequest) -> None:
        """Count the tokens that a request has computed and generated since the last call."""
        request = tracked.request
        # An embedded request ends with LENGTH, without a token.
        whole = tracked.spoke is not None or request.finish_reason is FinishReason.LENGTH
        computed = request.num_prompt if whole else min(request.cache.num_computed, request.num_prompt)
        self.num_prompt_tokens += max(0, computed - tracked.num_prompt)
        tracked.num_prompt = max(computed, tracked.num_prompt)
        self.num_generated_tokens += max(0, request.num_generated - tracked.num_generated)
        tracked.num_generated = request.num_generated

    # ------------------------------------------------------------------------------------------------- reporting

    def take(self) -> list[bytes]:
        """Return a line for each event since the last call: its name, the time, and its fields."""
        self._meet(self._scheduler.clock())
        lines: list[list[Any]] = []
        while self._unreported:
            heard = self._unreported.popleft()
            if isinstance(heard, list):
                lines.append([plain(value) for value in heard])
                continue
            line = self._line(*heard)
            if lines and (fixed := ONE_BLOCK_EACH.get(line[0])) and lines[-1][:fixed] == line[:fixed]:
                for whole, part in zip(lines[-1][fixed:], line[fixed:], strict=True):
                    whole += part
            else:
                lines.append(line)
        return [dumps([_shortened(value) for value in line]) for line in lines]

    def _line(self, event: CacheEvent, ordinal: int, before: int, at_block: int) -> list[Any]:
        at, group = self._at(event.time), event.group
        if isinstance(event, (cache.BlocksAllocated, cache.BlocksShared, cache.BlocksFreed)):
            return [PLAIN[type(event)], at, group, ordinal, event.blocks]
        if isinstance(event, cache.BlocksForked):
            return ["forked", at, group, ordinal, event.parent_id, event.blocks]
        if isinstance(event, cache.BlockCopied):
            return ["copied", at, group, ordinal, event.src, event.dst]
        if isinstance(event, (cache.BlocksSwappedOut, cache.BlocksSwappedIn)):
            return [SWAPS[type(event)], at, group, ordinal, event.blocks, event.host_blocks]
        if isinstance(event, cache.HostBlocksFreed):
            return ["host_freed", at, group, ordinal, event.host_blocks]
        if isinstance(event, cache.BlockStored):
            name = _name(event.block_hashes[at_block])
            return ["stored", at, group, ordinal, [event.blocks[at_block]], [name], [before + 1]]
        if isinstance(event, cache.BlockRemoved):
            what = "evicted" if event.evicted else "forgotten"
            return [what, at, group, [event.blocks[at_block]], [_name(event.block_hashes[at_block])]]
        return ["cleared", at, group]

    def numbers(self) -> list[list[int]]:
        """Return the changed numbers of running requests.

        For each of them: its ordinal, tokens generated and stored, blocks freed in each group, and draft tokens that
        were computed and accepted.
        """
        rows = []
        for request in self._scheduler.running:
            tracked = self.requests[request.id]
            numbers = (
                request.num_generated,
                max(request.cache.num_computed, request.cache.num_cached),
                *request.cache.num_freed,
                *drafts_of(request),
            )
            if numbers != tracked.reported:
                tracked.reported = numbers
                self._count(tracked)
                rows.append([request.schedule.ordinal, *numbers])
        return rows


def drafts_of(request: Request) -> tuple[int, int]:
    """Return the numbers of a request's draft tokens that were computed, and of these that were accepted."""
    return request.schedule.num_drafted, request.schedule.num_accepted


def family(request: Request) -> int:
    """Return the ordinal of the first request of the same prompt, which identifies all of them for people."""
    first = request.group.members[0].schedule.ordinal if request.group and request.group.members else -1
    return request.schedule.ordinal if first < 0 else first


def shorten(blocks: Iterable[int]) -> list[int]:
    """Shorten runs of block ids: after an id, -2k means k more ids in ascending order, -2k-1 k more in descending."""
    short: list[int] = []
    last, step, count = -2, 0, 0
    for block in blocks:
        if count and block - last == step:
            count += 1
        elif count == 0 and short and block - last in (1, -1):
            step, count = block - last, 1
        else:
            if count:
                short.append(-2 * count - (step < 0))
            short.append(block)
            count = 0
        last = block
    if count:
        short.append(-2 * count - (step < 0))
    return short


def plain(value: Any) -> Any:
    """Convert a value for JSON."""
    if isinstance(value, PrefixReport):
        found = {"cached": value.num_cached, "miss": value.miss, "text": str(value)}
        return found | ({"differs": value.first_difference} if value.miss is Miss.DIFFERS else {})
    return value


def _shortened(value: Any) -> Any:
    return shorten(value) if isinstance(value, list) and value and isinstance(value[0], int) else value


def _name(digest: bytes) -> str:
    """Return enough of a block's digest to identify it."""
    return digest.hex()[:8]
