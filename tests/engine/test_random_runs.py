"""100 small runs over random pools, policies and loads, with aborts in every state: all end, and nothing leaks.

Every fifth of them runs on a memory: each request must read its own tokens through its tables, the events must rebuild
the books, and some of these runs have allocations and look-ups that fail, some a disk, of which all they read must be
right, too. 24 more runs guess tokens, and are done without drafts as well. With --long there are 10,000 and 1,000.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.cache.disk.store import DiskStore
from quire.cache.disk.tier import DiskTier
from quire.cache.groups import CacheGroup, RowGroup, StateGroup, has_states
from quire.cache.incoming import Arrivals
from quire.config import MAX_SPECULATIVE_TOKENS, CacheConfig, EngineConfig
from quire.engine.cost import DEVICES, ModelCost
from quire.engine.decode_rows import DecodeRows
from quire.engine.flatten import Buffers, flatten
from quire.engine.inflight_prefixes import unforked
from quire.engine.plan import INVALID_TOKEN, Plan, PlanItem, StepOutput
from quire.engine.policy import by_priority
from quire.engine.prefetch import Prefetch
from quire.engine.speculation import PromptLookup, Speculation
from quire.models.batch import Batch
from quire.models.model import WeightBytes
from quire.request import Event, FinishReason, Request, SampleGroup, SamplingParams, Task, TokenLogprobs
from quire.simulate.simulation import SimulatedStep, Simulation
from tests.engine.fakes import (
    CIRCLE,
    FakeRunner,
    assert_same_batches,
    circling,
    continuation,
    digest,
    forget_free_blocks,
    logprobs_after,
)
from tests.engine.test_cache_events import Replay
from tests.marks import quick

pytestmark = pytest.mark.slow

GROUPS = (
    (CacheGroup((0,)),),
    (CacheGroup((0,)), CacheGroup((1,), window=6)),
    (CacheGroup((0,), window=9),),
    (CacheGroup((0,), window=3), CacheGroup((1,), window=11)),
    (CacheGroup((0,)), CacheGroup((1,), window=2), CacheGroup((2,), window=17)),
    (CacheGroup((0,), window=1), CacheGroup((1,))),
    (CacheGroup((0,)), StateGroup((1,), piece=4), RowGroup((1,), piece=4)),
    (CacheGroup((0,), window=3), StateGroup((1,), piece=8), RowGroup((1,), piece=8)),
    (StateGroup((0,), piece=4), RowGroup((0,), piece=4)),
)

SEEDS, LONG_SEEDS, SHARDS = range(900, 1_200), range(10_000), 3  # the first shard of the former sees all there is
RARE = ("aborted swapped", "restarted", "aborted with drafts")  # a shard may see none of them unless it is long
CHECKED = 5  # every so manieth run has a memory, and is audited after each step; the others at the end
REPEATED = 20  # every so manieth run is done twice
MAX_STEPS = 2000
MAX_MODEL_LEN = 40

# What every shard must have seen, so that the runs prove something about it.
SEEN = """
preempted, swapped out, swapped in, restarted, restarted from the host, copied, found a prefix, forked, refused, failed
with states, embedded, scored, preempted without drawing, decoded as rows
written to a disk, read from a disk
aborted waiting, aborted running, aborted swapped, aborted unforked, aborted as it was preempted, aborted as it computed
""".replace("\n", ", ").strip(", ").split(", ")  # fmt: skip


def cost(groups: tuple[CacheGroup, ...]) -> ModelCost:
    return ModelCost(
        groups=groups,
        max_model_len=MAX_MODEL_LEN,
        layer_params=10_000,
        head_params=1_000,
        number_bytes=2,
        weights=WeightBytes(layers=20_000, head=2_000),
    )


class Search:
    """A beam search that chooses at random: which beams die, which are forked."""

    def __init__(self, run: RandomRun, group: SampleGroup) -> None:
        self.run, self.beams, self.spare = run, group.members[:1], group.members[1:]
        self.heard: set[Request] = set()

    def take(self, request: Request, ended: bool) -> None:
        run, rng, scheduler = self.run, self.run.rng, self.run.scheduler
        self.heard.add(request)
        if ended or len(request.tokens) + 1 >= scheduler.longest(request):
            for member in (*self.beams, *self.spare):
                scheduler.finish(member.id, FinishReason.STOP)
            self.beams = []
        if not self.beams or not self.heard.issuperset(self.beams):
            return
        self.heard.clear()
        width = len(self.beams) + len(self.spare)
        parents = [rng.choice(self.beams) for _ in range(rng.randint(1, width))]
        self.spare += [beam for beam in self.beams if beam not in parents]
        self.beams = []
        for parent in parents:
            heir = parent
            if parent in self.beams:
                heir = self.spare.pop()
                heir.tokens = parent.tokens + array("i", [rng.randrange(3)])
                scheduler.fork(parent, heir)
                run.asked[heir.id] = heir
            self.beams.append(heir)
        for parent in dict.fromkeys(parents):
            scheduler.extend(parent, rng.randrange(3))


class Disk:
    """A disk beside a runner's memory. What its threads do happens between two steps."""

    def __init__(self, run: RandomRun, runner: FakeRunner) -> None:
        self.run, self.memory = run, runner.memory
        self.directory = TemporaryDirectory(prefix="quire-runs-")
        manager = run.scheduler.manager
        widths = [blocks.shape[1] * blocks.itemsize for blocks in self.memory]
        store = DiskStore(Path(self.directory.name), b"secret", widths, [run.rng.choice([1, 4, 60])] * len(widths))
        prefetch = Prefetch(manager, Arrivals(), 1.0, run.clock)
        prefetch.arrivals.wait = lambda seconds: None  # type: ignore[method-assign]
        self.tier = manager.disk = DiskTier(store, self, prefetch.arrivals)
        prefetch.sources.append(self.tier.reader)
        manager.memory, run.scheduler.prefetch = self, prefetch

    def read_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        out[:] = self.memory[group][block].view(np.uint8)

    def write_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        self.memory[group][block] = data.view(self.memory[group].dtype)

    def step(self) -> None:
        rng, counts = self.run.rng, self.tier.counts
        written, read = counts.blocks, self.tier.reader.counts.blocks
        for _ in range(rng.randrange(4)):
            self.tier.write_next()
        for _ in range(rng.randrange(4)):
            self.tier.reader.read_next()
        if rng.random() < 0.1:
            self.restart()
        self.run.seen["written to a disk"] += counts.blocks - written
        self.run.seen["read from a disk"] += self.tier.reader.counts.blocks - read

    def restart(self) -> None:
        """Nothing is in memory any more but what runs."""
        while self.tier.write_next():
            pass
        manager = self.run.scheduler.manager
        manager.disk = None
        manager.reset_prefix_cache()
        manager.disk = self.tier

    def close(self) -> None:
        assert not self.tier.reader.counts.misses.keys() & {"checksum", "io"}
        self.tier.store.audit()
        self.tier.store.close()
        self.directory.cleanup()


class RandomRun(Simulation):
    """A simulation with a random load and random aborts. Counts in `seen` what happened."""

    may_have_disk = True

    def __init__(self, seed: int, seen: Counter[str], checked: bool) -> None:
        rng = self.rng = random.Random(seed)
        self.seen = seen
        self.groups = rng.choice(GROUPS)
        self.seen["with states"] += has_states(self.groups)
        host_blocks = rng.choice([0, 0, 1, 4, 16, 64])
        size = rng.choice([1, 2, 4] if has_states(self.groups) else [1, 2, 3, 4, 8, 16])
        enough = min(64, -(-rng.randint(20, MAX_MODEL_LEN) // size))  # for one long request, or nearly
        has_rows = checked and seed % 4 > 0  # requests that merely decode are planned as arrays, as engines do
        super().__init__(
            cost(self.groups),
            DEVICES["cpu"],
            EngineConfig(
                max_num_seqs=rng.choice([1, 2, 3, 5, 8]),
                max_num_batched_tokens=rng.choice([1, 2, 4, 8, 16, 64]),
                scheduling_policy=rng.choice(["fcfs", "priority", "shortest"]),
                cache=CacheConfig(
                    block_size=size,
                    num_blocks=rng.choice([enough, min(64, enough + rng.randint(0, 8)), rng.randint(1, 64)]),
                    enable_prefix_caching=rng.random() < 0.7,
                    preemption="swap" if host_blocks else "recompute",
                    state_snapshot_interval=rng.choice([8, 16]),
                ),
            ),
            num_host_blocks=host_blocks,
            hashed=True,
            sample_every=8,
            leaps=not has_rows,
        )
        scheduler = self.scheduler
        if rng.random() < 0.3:  # more seats than there are states for
            scheduler.max_num_seqs *= 3
        self.runner, self.replay, self.disk = None, Replay(), None
        if checked:
            limits = (scheduler.max_num_batched_tokens, scheduler.max_num_seqs, -(-MAX_MODEL_LEN // size))
            pools = scheduler.manager.state_pools
            self.runner = FakeRunner(scheduler.manager.num_blocks, size, self.groups, host_blocks, state_pools=pools)
            self.buffers, self.twin = (Buffers(self.groups, size, *limits) for _ in range(2))
            if has_rows:
                scheduler.rows = DecodeRows(scheduler.manager, scheduler.longest)
            scheduler.manager.listeners.append(self.replay.take)
            if rng.random() < 0.3 and self.may_have_disk:
                self.disk = Disk(self, self.runner)
            if rng.random() < 0.25:
                self.break_things()
        self.asked: dict[str, Request] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.of_prompts: dict[str, list[TokenLogprobs]] = {}
        self.states: dict[str, list[float]] = {}
        self.wanted_from: dict[str, int] = {}  # the first position of a prompt of which logprobs are asked for
        self.to_come = [self.unit(f"u{i}") for i in range(rng.randint(1, 8))]
        self.searches: dict[SampleGroup, Search] = {}
        self.abort_rate = rng.choice([0.0, 0.0, 0.05, 0.3])
        self.failure_rate = rng.choice([0.0, 0.0, 0.02])

    @property
    def window(self) -> int:
        """Tokens that the model sees; 0: all."""
        windows = [group.window for group in self.groups]  # None also for groups of states and of rows
        return 0 if None in windows else max(windows)

    def break_things(self) -> None:
        """Let some allocations and look-ups fail."""
        manager = self.scheduler.manager

        def failing(call: Callable) -> Callable:  # type: ignore[type-arg]
            def wrapped(*arguments: object) -> object:
                if self.rng.random() < 0.03:
                    raise MemoryError("injected")
                return call(*arguments)

            return wrapped

        for pool in (*manager.pools, *manager.host_pools):
            pool.allocate = failing(pool.allocate)
        manager.lookup.match = failing(manager.lookup.match)

    def unit(self, name: str) -> list[Request]:
        """One request, or the samples of one prompt."""
        rng = self.rng
        beginning = [7] * rng.choice([0, 0, 4, 12, 20])  # what many have in common
        prompt = array("i", beginning + [rng.randrange(3) for _ in range(rng.randint(1, 8))])
        group = SampleGroup() if rng.random() < 0.35 else None
        salt, priority, driven = rng.choice(["", "", "", "tenant"]), rng.choice([0, 0, -1, 1]), rng.random() < 0.25
        priority *= self.scheduler.order is by_priority
        prompt_logprobs = 0 if rng.random() < 0.1 and not (group and driven) else None  # no beam search has any
        sampling = SamplingParams(max_tokens=rng.randint(1, 20), prompt_logprobs=prompt_logprobs)
        if group is None:
            task = rng.choice([Task.GENERATE] * 3 + [Task.EMBED, Task.LOGLIKELIHOOD])
            request = Request(f"{name}", prompt, len(prompt), sampling, 0, priority, salt, task=task)
            if task is Task.LOGLIKELIHOOD:
                request.sampling = replace(sampling, prompt_logprobs=0)
                request.first_prompt_logprob = rng.randrange(len(prompt))
            self.wanted_from[name] = request.next_prompt_logprob
            return [request]
        group.members = [
            Request(f"{name}-{i}", prompt[:], len(prompt), sampling, i, priority, salt, group, driven)
            for i in range(rng.randint(2, 4))
        ]
        return group.members

    def arrive(self) -> None:
        unit = self.to_come.pop()
        group = unit[0].group
        for request in unit[:1] if unit[0].driven else unit:
            if not self.add(request):
                self.seen["refused"] += 1
                continue
            self.asked[request.id] = request
            if request.driven and group is not None:
                self.searches[group] = Search(self, group)

    def compute(self, plan: Plan) -> StepOutput:
        """Also the moment between a plan and its commit, where a request may be taken back, too."""
        self.count(plan)
        for what, requests in (
            ("as it was preempted", plan.preempted),
            ("as it computed", [item.request for item in plan.items][: self.rng.random() < 0.2]),
        ):
            if requests and self.rng.random() < self.abort_rate:
                self.abort(self.rng.choice(requests), what)
        if self.runner is None:
            return super().compute(plan)
        self.seen["decoded as rows"] += plan.decode is not None
        output = StepOutput({}) if plan.is_empty else self.runner.run(self.laid_out(plan))
        self.runner.batches.clear()
        return output

    def laid_out(self, plan: Plan) -> Batch:
        """The batch; its rows of requests that merely decode are as if these were laid out one by one."""
        batch = flatten(plan, self.buffers, self.scheduler.rows)
        if plan.decode is not None:
            assert_same_batches(batch, flatten(plan, self.twin))
        return batch

    def count(self, plan: Plan) -> None:
        seen = self.seen
        seen["preempted"] += len(plan.preempted)
        seen["preempted without drawing"] += sum(request.task is not Task.GENERATE for request in plan.preempted)
        seen["restarted"] += sum(not request.cache.host_block_ids for request in plan.preempted)
        seen["swapped out"] += sum(bool(request.cache.host_block_ids) for request in plan.preempted)
        seen["swapped in"] += len(plan.resumed)
        seen["copied"] += len(plan.copies)
        for move in (*plan.swap_out, *plan.swap_in, *plan.copies):
            assert 0 <= move.group < len(self.groups)

    def abort(self, request: Request, state: str) -> None:
        self.seen[f"aborted {state}"] += request.finish_reason is None
        self.scheduler.finish(request.id, FinishReason.ABORT)

    def maybe_abort(self) -> None:
        if self.rng.random() >= self.abort_rate:
            return
        scheduler = self.scheduler
        waiting = list(scheduler.waiting)
        waits = [sibling for request in scheduler.running for sibling in unforked(request, scheduler.waiting)]
        states = {"waiting": waiting, "unforked": waits, "running": scheduler.running, "swapped": scheduler.swapped}
        there = [name for name, requests in states.items() if requests]
        if there:
            state = self.rng.choice(there)
            self.abort(self.rng.choice(states[state]), state)

    def finish(self, step: SimulatedStep) -> list[Event]:
        prefetch = self.scheduler.prefetch
        if step.plan.is_empty and prefetch is not None and prefetch.is_waiting:  # nothing to do until blocks arrive
            return self.scheduler.commit(step.plan, step.output)
        return super().finish(step)

    def one_step(self) -> None:
        if self.disk is not None:
            self.disk.step()
        swapped = list(self.scheduler.swapped)
        if self.rng.random() < self.failure_rate:
            plan = self.scheduler.plan()
            events = self.scheduler.fail(plan, RuntimeError("injected"))
            self.seen["failed"] += len(plan.items)
        else:
            events = self.step()
        # First those that ended, as no beam goes on from them.
        for event in sorted(events, key=lambda event: event.finish_reason is None):
            assert event.error in (None, "RuntimeError: injected", "MemoryError: injected"), event.error
            self.of_prompts.setdefault(event.request_id, []).extend(event.prompt_logprobs)
            if event.hidden_state is not None:
                assert event.finish_reason is FinishReason.LENGTH
                self.states[event.request_id] = event.hidden_state.tolist()
            if event.finish_reason is not None:
                assert event.request_id not in self.reasons
                self.reasons[event.request_id] = event.finish_reason
            request = self.asked[event.request_id]
            if request.driven and request.group is not None:
                self.searches[request.group].take(request, event.finish_reason is not None)
        waiting = self.scheduler.waiting
        self.seen["restarted from the host"] += sum(request in waiting for request in swapped)

    def go(self) -> None:
        scheduler = self.scheduler
        while self.to_come or scheduler.has_work:
            assert self.num_steps < MAX_STEPS, "it does not end"
            while self.to_come and (not scheduler.has_work or self.rng.random() < 0.3):
                self.arrive()
            self.maybe_abort()
            if self.rng.random() < 0.01:
                if scheduler.prefetch is not None:
                    scheduler.prefetch.reset()
                scheduler.manager.reset_prefix_cache()
            if scheduler.has_work:
                self.one_step()
            if self.runner is not None:
                scheduler.audit()
                self.replay.check(self)
                forget_free_blocks(self)
        self.check_end()

    def check_end(self) -> None:
        scheduler, manager = self.scheduler, self.scheduler.manager
        if self.disk is not None:
            self.disk.close()
        scheduler.audit()
        assert not scheduler.has_work
        for listed in (scheduler.running, scheduler.swapped, scheduler.waiting):
            assert not listed
        for pool in (*manager.pools, *manager.host_pools):
            assert pool.num_free == pool.num_blocks
        assert self.reasons.keys() == self.asked.keys()
        for name, reason in self.reasons.items():
            request = self.asked[name]
            if self.runner is not None and not request.driven:
                tokens = request.tokens.tolist()
                prompt = tokens[: request.num_prompt]
                assert tokens == prompt + continuation(prompt, request.num_generated, self.window, self.runner.model)
            if reason is FinishReason.LENGTH:
                self.check_prompt(request)
                assert not request.driven
                assert len(request.tokens) == scheduler.longest(request)
        self.seen["found a prefix"] += manager.hits.hits + manager.hits.partial_hits

    def check_prompt(self, request: Request) -> None:
        """What was asked of the prompt of a request that came to its end."""
        self.seen["embedded"] += request.task is Task.EMBED
        self.seen["scored"] += request.task is Task.LOGLIKELIHOOD
        assert (request.id in self.states) == (request.task is Task.EMBED)
        if self.runner is None:
            return
        prompt = request.tokens[: request.num_prompt].tolist()
        if request.task is Task.EMBED:
            assert self.states[request.id] == [digest(prompt[-self.window :])]
        if request.sampling.prompt_logprobs is not None and request.group is None:  # a fork reports nothing again
            asked = range(self.wanted_from.get(request.id, 0) + 1, len(prompt))
            expected = [logprobs_after(prompt[:i][-self.window :], prompt[i]) for i in asked]
            assert self.of_prompts[request.id] == expected


def random_run(seed: int, seen: Counter[str]) -> str | None:
    one = RandomRun(seed, seen, checked=seed // SHARDS % CHECKED == 0)
    one.scheduler.manager.listeners.append(lambda event: seen.update(forked=type(event).__name__ == "BlocksForked"))
    one.go()
    return one.result().trace_hash


@pytest.mark.parametrize("shard", quick(range(SHARDS), 1, 1))
def test_random_runs(shard: int, long: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in (LONG_SEEDS if long else SEEDS)[shard::SHARDS]:
        try:
            trace_hash = random_run(seed, seen)
            if seed // SHARDS % REPEATED == 0:
                assert random_run(seed, Counter()) == trace_hash
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert not [what for what in SEEN if not seen[what] and (long or what not in RARE)]


# ------------------------------------------------------------------------------------------------------- guesses

GUESSED_SEEDS, LONG_GUESSED_SEEDS, GUESSED_SHARDS = range(80, 104), range(1_000), 1
GUESSED_SEEN = """
all right, some right, none right, overflowed, stopped among drafts, aborted with drafts, failed
preempted, swapped out, swapped in, restarted, copied, found a prefix, forked
""".replace("\n", ", ").strip(", ").split(", ")  # fmt: skip


class GuessedRun(RandomRun):
    """A run of a model that mostly goes in a circle, so that its tokens can be guessed. Some are reported as lost.

    Each token comes with a logprob that depends on everything before it, as the token itself may not.
    """

    def __init__(self, seed: int, seen: Counter[str], num_draft_tokens: int) -> None:
        super().__init__(seed, seen, checked=True)
        assert self.runner is not None
        self.runner.model = circling
        self.scheduler.speculation = Speculation([PromptLookup()], num_draft_tokens) if num_draft_tokens else None
        self.told: dict[str, list[TokenLogprobs]] = {}
        self.items: list[PlanItem] = []  # of the step, those with drafts

    def unit(self, name: str) -> list[Request]:
        """Its prompts go in the circle, too, and some end at a token of it."""
        rng, unit = self.rng, super().unit(name)
        length, start = rng.randint(1, 2 * CIRCLE), rng.randrange(CIRCLE)
        ending = frozenset([rng.randrange(CIRCLE)] if rng.random() < 0.3 else [])
        for request in unit:
            if not request.driven:
                request.tokens += array("i", [(start + i) % CIRCLE for i in range(length)])
                request.num_prompt = len(request.tokens)
                request.sampling = replace(request.sampling, logprobs=0)
                request.ending_tokens = ending
        return unit

    def compute(self, plan: Plan) -> StepOutput:
        self.items = [item for item in plan.items if item.drafts]
        if self.items and self.rng.random() < self.abort_rate:
            self.abort(self.rng.choice(self.items).request, "with drafts")
        output = super().compute(plan)
        for item in self.items:  # from a wrong guess on, what follows may overflow
            drawn = output.tokens_after_drafts[item.request.id]
            expected = [output.tokens[item.request.id], *drawn]
            wrong = [i for i in range(len(drawn)) if list(item.drafts[: i + 1]) != expected[: i + 1]]
            if wrong and self.rng.random() < 0.3:
                drawn[self.rng.choice(wrong)] = INVALID_TOKEN
                self.seen["overflowed"] += 1
        return output

    def step(self) -> list[Event]:
        events = super().step()
        for event in events:
            if event.token is not None:
                assert event.logprobs is not None
                assert event.logprobs.token == event.token
                self.told.setdefault(event.request_id, []).append(event.logprobs)
        for item in self.items:
            self.count_right(item, [event for event in events if event.request_id == item.request.id])
        return events

    def count_right(self, item: PlanItem, events: list[Event]) -> None:
        """events: what the item's request was told."""
        seen, drafts, reason = self.seen, list(item.drafts), events[-1].finish_reason if events else None
        tokens = [event.token for event in events if event.token is not None]
        if not tokens:
            return
        num_right = len(tokens) - 1
        assert tokens[:-1] == drafts[:num_right]
        if tokens == drafts[: len(tokens)]:
            assert reason is FinishReason.STOP
            seen["stopped among drafts"] += 1
        else:
            seen["all right" if num_right == len(drafts) else "some right" if num_right else "none right"] += 1

    def check_end(self) -> None:
        super().check_end()
        for name, reason in self.reasons.items():
            request = self.asked[name]
            if not request.driven:
                tokens, start = request.tokens.tolist(), request.num_prompt
                contexts = (tokens[:at][-self.window :] for at in range(start, len(tokens)))
                assert self.told.get(name, []) == list(map(logprobs_after, contexts, tokens[start:]))
                ends = [token in request.ending_tokens for token in tokens[start:]]
                assert ends.count(True) == ends[-1:].count(True) == (reason is FinishReason.STOP)


def whole_tokens(seed: int, seen: Counter[str], num_draft_tokens: int) -> dict[str, list[int]]:
    """The tokens of each request that got all of them."""
    one = GuessedRun(seed, seen, num_draft_tokens)
    one.scheduler.manager.listeners.append(lambda event: seen.update(forked=type(event).__name__ == "BlocksForked"))
    one.go()
    own = {FinishReason.STOP, FinishReason.LENGTH}
    found = [one.asked[name] for name, reason in one.reasons.items() if reason in own]
    return {request.id: request.tokens.tolist() for request in found if not request.driven}


@pytest.mark.parametrize("shard", range(GUESSED_SHARDS))
def test_random_runs_with_guesses(shard: int, long: bool) -> None:
    seen: Counter[str] = Counter()
    compared, seeds = 0, (LONG_GUESSED_SEEDS if long else GUESSED_SEEDS)[shard::GUESSED_SHARDS]
    for seed in seeds:
        try:
            guessed = whole_tokens(seed, seen, 1 + seed % MAX_SPECULATIVE_TOKENS)
            plain = whole_tokens(seed, Counter(), 0)
            both = plain.keys() & guessed.keys()
            assert {name: plain[name] for name in both} == {name: guessed[name] for name in both}
            compared += len(both)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert compared > len(seeds)
    assert not [what for what in GUESSED_SEEN if not seen[what] and (long or what not in RARE)]
