"""Simulation: the real scheduler and block manager on a virtual clock, with a runner that only computes step costs.

The machine's clock and random numbers are not used, so the same rows and options give the same run.
"""

from __future__ import annotations

import gc
import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from quire.cache.groups import NO_STATES, has_states
from quire.cache.manager import BlockManager
from quire.cache.sizing import state_pools
from quire.config import EngineConfig
from quire.engine.cost import CostModel, Device, ModelCost
from quire.engine.plan import Plan, StepOutput
from quire.engine.policy import ORDERS
from quire.engine.scheduler import Scheduler
from quire.engine.speculation import NUM_GUESSES, Speculation
from quire.engine.trace import TraceRow
from quire.errors import BadValue, ConfigError, RequestError, check_number
from quire.request import Event, FinishReason, Request, SamplingParams
from quire.simulate.decoders import Decoders, drawn_token
from quire.simulate.drafter import SimulatedDrafter
from quire.simulate.figures import Histogram, SimulationResult
from quire.simulate.leap import Leap
from quire.simulate.prompts import NamedTokens, named_prompt

SAMPLE_EVERY = 61  # steps between samples of all blocks; a prime, so that equal requests are not sampled equally full


@contextmanager
def no_collector() -> Iterator[None]:
    """Disable the garbage collector: a run makes no cycles, and traversing its blocks takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class VirtualClock:
    """A clock that advances only when it is set."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class SimulatedStep(NamedTuple):
    """A step that has begun."""

    plan: Plan
    output: StepOutput
    seconds: float  # duration
    decoders: Sequence[Request] = ()  # requests that get a token each in addition to the plan


# ------------------------------------------------------------------------------------------------------ simulation


class Simulation:
    """A scheduler and its cache on a virtual clock. Call `run` with a trace, or `add` requests and `step`."""

    def __init__(
        self,
        model: ModelCost,
        device: Device,
        config: EngineConfig,
        *,
        num_host_blocks: int = 0,
        seed: int = 0,
        hashed: bool = False,
        sample_every: int = SAMPLE_EVERY,
        leaps: bool = True,
        cost: CostModel | None = None,
        draft_acceptance: float | None = None,
    ) -> None:
        """num_host_blocks: room for swapped requests, for preemption="swap"; seed: of the prompts' tokens.

        hashed: compute the result's trace_hash. sample_every: steps between samples of the cache; 0: none.
        leaps: do not plan for requests that only decode; the result is the same.
        cost: the cost of steps; None: the time that the device needs to read and to multiply.
        draft_acceptance: probability that a draft token is right; None: no drafts.
        Raises ConfigError if the config has no number of blocks or its sequences are too long.
        """
        cache, longest = config.cache, config.max_model_len or model.max_model_len
        if cache.num_blocks is None:
            raise ConfigError("num_blocks is unset; a simulation has no memory to size the cache by, so give a number")
        if longest > model.max_model_len:
            raise ConfigError(f"max_model_len is {longest}; the model was made for up to {model.max_model_len}")
        if (cache.preemption == "swap") != (num_host_blocks > 0):
            raise ConfigError(
                f"preemption is {cache.preemption!r} with {num_host_blocks} blocks on the host; 'swap' needs some and "
                f"'recompute' takes none"
            )
        pools = state_pools(cache, cache.num_blocks, config.max_num_seqs) if has_states(model.groups) else NO_STATES
        self.clock = VirtualClock()
        self.seed = seed
        self.scheduler = Scheduler(
            BlockManager(
                model.groups,
                cache.num_blocks,
                cache.block_size,
                config.most_tokens,
                num_host_blocks=num_host_blocks,
                state_pools=pools._replace(hosts=config.max_num_seqs if num_host_blocks else 0),
                state_snapshot_interval=cache.state_snapshot_interval,
                enable_prefix_caching=cache.enable_prefix_caching,
                retained_share=cache.prompt_cache_share,
            ),
            max_model_len=longest,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.most_tokens,
            order=ORDERS[config.scheduling_policy],
            clock=self.clock,
        )
        manager = self.scheduler.manager
        self._pools = [manager.pools[g] for g in manager.attention_groups]
        self._state_pools = [manager.pools[g] for g in manager.state_groups]
        self.cost = cost or CostModel(model, device, cache.block_size)
        self.ttft, self.itl = Histogram(), Histogram()
        self.first_refusal: str | None = None
        self.num_steps = 0
        self.num_uncounted = 0  # blocks evicted for a step that never ended
        self._started: float | None = None  # when the first request arrived
        self.sample_every = sample_every
        self.leaps = leaps and draft_acceptance is None
        count = NUM_GUESSES if config.num_speculative_tokens is None else config.num_speculative_tokens
        if draft_acceptance is not None and count:
            check_number(ConfigError, "draft_acceptance", draft_acceptance, 0.0, 1.0)
            drafter = SimulatedDrafter(draft_acceptance, seed)
            self.scheduler.speculation = Speculation([drafter], count, self.clock)
        self.decoders = Decoders(self.scheduler, is_sparse=bool(self.cost.model.indexes))
        self._hash = blake2b(digest_size=16) if hashed else None
        self._params: dict[int, SamplingParams] = {}  # by max_tokens
        self._arrivals: dict[str, float] = {}  # of requests without a token yet
        self._latest: dict[str, float] = {}  # times of the other requests' latest tokens
        self._counts: Counter[str] = Counter()
        self._owned_slots = self._wasted_slots = self._most_used = 0
        self._owned_rows = self._wasted_rows = self._most_states = 0

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self.clock.now

    @property
    def num_drawn(self) -> int:
        """The number of tokens drawn so far."""
        return self._counts["new"]

    def run(self, rows: Iterable[TraceRow], advance: Callable[[], None] = lambda: None) -> SimulationResult:
        """Serve a trace to its end. `advance` is called at the end of each request."""
        pending = deque(sorted(enumerate(rows), key=lambda numbered: numbered[1].arrival))
        while pending or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.clock.now = max(self.clock.now, pending[0][1].arrival)
            while pending and pending[0][1].arrival <= self.clock.now:
                number, row = pending.popleft()
                if not self.add(self._request(number, row), row.arrival):
                    advance()
            if self.scheduler.has_work:
                for event in self.go_on(pending[0][1].arrival if pending else math.inf):
                    if event.finish_reason is not None:
                        advance()
        return self.result()

    def go_on(self, until: float) -> list[Event]:
        """Run a step, or several steps that only decode, up to the first one that ends at `until` or later.

        For several steps, return only the events of requests that end.

        Raises BadValue if no request can continue.
        """
        if not self.can_leap():
            return self._make(self.begin())
        leap, ends = Leap(self), []
        while leap.times[-1] < until and leap.plan_ahead(until):
            ends += leap.apply(leap.num_planned)
        if not leap.num_applied:
            return self._make(self.begin())
        leap.close()
        return ends

    def _request(self, number: int, row: TraceRow) -> Request:
        count = max(1, row.new_tokens)  # a request in a trace without new tokens was aborted; here it gets one
        params = self._params.get(count)
        if params is None:
            params = self._params[count] = SamplingParams(max_tokens=count, ignore_eos=True)
        tokens = cast("array[int]", named_prompt(row, number, self.seed))
        return Request(str(number), tokens, row.prompt_tokens, params)

    def add(self, request: Request, arrival: float | None = None) -> bool:
        """Queue a request that arrived at `arrival` or now. If it can never run, count it and return False."""
        self._counts["requests"] += 1
        try:
            self.scheduler.add(request)
        except RequestError as error:
            self.first_refusal = self.first_refusal or str(error)
            self._counts["refused"] += 1
            return False
        self._counts["prompt"] += request.num_prompt
        self._name_blocks(request)
        self._arrivals[request.id] = self.clock.now if arrival is None else arrival
        if self._started is None:
            self._started = self._arrivals[request.id]
        return True

    def _name_blocks(self, request: Request) -> None:
        """Give a request the digests of all blocks that it will fill."""
        lookup, tokens = self.scheduler.manager.lookup, cast("object", request.tokens)
        if lookup.enable_prefix_caching and isinstance(tokens, NamedTokens):
            lookup.know_digests(request, 0)
            tokens.extend_digests(
                request.cache.digests, self.scheduler.longest(request) // lookup.block_size, lookup.block_size
            )

    def step(self) -> list[Event]:
        """Run one step, in which all running requests are planned. Raises BadValue if no request can continue."""
        return self._make(self._begin_all())

    def _make(self, step: SimulatedStep) -> list[Event]:
        self.clock.now += step.seconds
        return self.finish(step)

    def can_leap(self) -> bool:
        """Return whether the next step only decodes all running requests, so it needs no plan."""
        if not self.leaps:
            return False
        self.decoders.gather(self._latest)
        return self.decoders.are_alone()

    def begin(self) -> SimulatedStep:
        """Plan a step that begins now."""
        if self.leaps:
            self.decoders.gather(self._latest)
            if self.decoders.leave_enough():
                return self._begin_beside_decoders()
        return self._begin_all()

    def _begin_all(self) -> SimulatedStep:
        self._scatter()
        plan = self.scheduler.plan()
        output = self.compute(plan)
        drawn = len(output.tokens) + sum(map(len, output.tokens_after_drafts.values()))
        return SimulatedStep(plan, output, self.cost.seconds(plan, drawn))

    def _begin_beside_decoders(self) -> SimulatedStep:
        decoders = self.decoders
        self.scheduler.manager.now = self.clock.now
        decoders.take([request for _, request in decoders.blocks_wanted(decoders.step + 1)])
        requests, count = self.scheduler.running[: decoders.count], decoders.count
        with decoders.offload_if_large():
            plan = self.scheduler.plan()
        output = self.compute(plan)
        seconds = self.cost.seconds(plan, len(output.tokens) + count, count, decoders.keys + count)
        return SimulatedStep(plan, output, seconds, requests)

    def _scatter(self) -> None:
        """Return all decoders to the scheduler's planning."""
        for request in self.decoders.scatter():
            self._latest[request.id] = self.decoders.latest

    def finish(self, step: SimulatedStep) -> list[Event]:
        """Commit a step that ends now. Raises BadValue if no request can continue."""
        plan, ending = step.plan, []
        if step.decoders:
            plan.num_tokens += len(step.decoders)
            self.decoders.go_on(1)
            ending = self.decoders.end()
        ending += self.scheduler.commit(plan, step.output)
        if plan.is_empty and not (ending or plan.preempted or step.decoders):
            running, swapped, waiting = self.scheduler.running, self.scheduler.swapped, self.scheduler.waiting
            raise BadValue(
                f"no request can continue: {len(running)} run, {len(swapped)} are swapped out, {len(waiting)} wait"
            )
        self._observe(step, ending)
        return ending

    def compute(self, plan: Plan) -> StepOutput:
        """Return a fake output: some token for each request that draws one, and empty hidden states."""
        tokens, after = {}, {}
        for item in plan.items:
            request, length = item.request, len(item.request.tokens)
            if item.samples:
                tokens[request.id] = drawn_token(request, length)
                if item.drafts:
                    after[request.id] = [drawn_token(request, length + 1 + k) for k in range(len(item.drafts))]
        states: dict[str, NDArray[np.float32] | None] = {
            item.request.id: np.empty(0, np.float32) for item in plan.items if item.embeds
        }
        return StepOutput(tokens, hidden_states=states, tokens_after_drafts=after)

    def _observe(self, step: SimulatedStep, events: Sequence[Event]) -> None:
        """Add the figures of a step."""
        now, arrivals, latest, plan = self.clock.now, self._arrivals, self._latest, step.plan
        before: dict[float, int] = {}  # most requests drew their last token at the same time
        num_new = len(step.decoders)
        if step.decoders:
            before[self.decoders.latest] = num_new
            self.decoders.latest = now
        for event in events:
            name = event.request_id
            if event.token is not None:
                num_new += 1
                last = latest.get(name)
                latest[name] = now
                if last is None:
                    self.ttft.add(now - arrivals.pop(name))
                elif last < now:  # tokens of one step count as one arrival
                    before[last] = before.get(last, 0) + 1
            if event.finish_reason is not None:
                self.ended(event)
        for last, count in before.items():
            self.itl.add(now - last, count)
        counts = self._counts
        counts["new"] += num_new
        counts["computed"] += plan.num_tokens
        counts["swapped"] += len(plan.swap_out) + len(plan.swap_in)
        counts["copied"] += len(plan.copies)
        if self._hash is not None:
            self._hash.update(_written(plan, now, step.decoders).encode())
        if self.sample_every and self.num_steps % self.sample_every == 0:
            self.look()
        self.note_blocks(now)
        self.num_steps += 1

    def look(self) -> None:
        """Sample the waste of the cache."""
        self.decoders.update_all()
        usage = self.scheduler.usage()
        self._owned_slots += usage.used_slots
        self._wasted_slots += usage.wasted_slots
        _, rows = self.scheduler.state_usage()
        self._owned_rows += rows.used_slots
        self._wasted_rows += rows.wasted_slots

    def note_blocks(self, now: float) -> None:  # noqa: ARG002 (a replica's override uses it)
        """Record the number of used blocks after a step that ends at `now`."""
        self._most_used = max(self._most_used, sum([pool.num_used for pool in self._pools]))
        if self._state_pools:
            self._most_states = max(self._most_states, sum([pool.num_used for pool in self._state_pools]))

    # --------------------------------------------------------------------------------------- calls from a leap

    def decoded(self, times: Sequence[float], start: int, stop: int) -> None:
        """Count a token of each decoder in each of the steps that end at times[start + 1 .. stop]."""
        count = self.decoders.count
        self.itl.add_between([self.decoders.latest, *times[start + 1 : stop + 1]], count)
        self.decoders.latest = times[stop]
        self._counts["new"] += count * (stop - start)
        self._counts["computed"] += count * (stop - start)
        self.num_steps += stop - start
        if self._hash is not None:
            for i in range(start + 1, stop + 1):
                self._hash.update(_decode_written(count, times[i]).encode())

    def ended(self, event: Event) -> None:
        """Count a request that ended."""
        self._arrivals.pop(event.request_id, None)
        self._latest.pop(event.request_id, None)
        self._counts["finished" if event.finish_reason is FinishReason.LENGTH else "ended early"] += 1

    def leapt(self, now: float) -> None:
        """Set the clock to the end of a leap."""
        self.clock.now = now

    def result(self) -> SimulationResult:
        """Return the figures so far."""
        counts, hits = self._counts, self.scheduler.manager.hits
        seconds = self.clock.now - (self._started or 0.0)
        new, prompt = counts["new"], counts["prompt"]
        return SimulationResult(
            requests=counts["requests"],
            finished=counts["finished"],
            refused=counts["refused"],
            ended_early=counts["ended early"],
            first_refusal=self.first_refusal,
            steps=self.num_steps,
            seconds=seconds,
            prompt_tokens=prompt,
            new_tokens=new,
            computed_tokens=counts["computed"],
            new_tokens_per_second=new / seconds if seconds else 0.0,
            total_tokens_per_second=(prompt + new) / seconds if seconds else 0.0,
            ttft=self.ttft.as_dict(),
            itl=self.itl.as_dict(),
            preemptions=self.scheduler.num_preemptions,
            swapped_blocks=counts["swapped"],
            copied_blocks=counts["copied"],
            evicted_blocks=self.scheduler.manager.num_evicted - self.num_uncounted,
            hit_rate=hits.rate,
            waste=self._wasted_slots / self._owned_slots if self._owned_slots else 0.0,
            most_used_blocks=self._most_used,
            row_waste=self._wasted_rows / self._owned_rows if self._owned_rows else 0.0,
            most_used_states=self._most_states,
            trace_hash=None if self._hash is None else self._hash.hexdigest(),
        )


def _written(plan: Plan, now: float, others: Sequence[Request] = ()) -> str:
    """Return all decisions of a step as text. others: further requests that get a token each."""
    rest = (plan.swap_out, plan.swap_in, plan.copies, plan.preempted, plan.resumed, plan.failed)
    if not any(rest) and all(item.num_new == 1 and item.start >= item.request.num_prompt for item in plan.items):
        return _decode_written(len(others) + len(plan.items), now)
    items = [*((request.id, 1) for request in others), *((item.request.id, item.num_new) for item in plan.items)]
    moves = [[(m.group, m.src, m.dst) for m in part] for part in (plan.swap_out, plan.swap_in, plan.copies)]
    named = [[request.id for request in part] for part in (plan.preempted, plan.resumed)]
    return f"{now!r} {items} {moves} {named} {[(request.id, str(error)) for request, error in plan.failed]}\n"


def _decode_written(count: int, now: float) -> str:
    """Return the same for a step that decodes all running requests, which earlier decisions determine."""
    return f"{now!r} {count}\n"
