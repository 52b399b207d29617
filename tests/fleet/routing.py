"""A fleet on a virtual clock: replicas with steps, seats and an LRU cache each, and a rule that routes requests.

The score, the index and the rates are the real ones; only the replicas are models. A replica's step takes
a + b * prompt tokens + c * sequences seconds. It computes prompts first come, first served, up to a budget of tokens,
and every sequence whose prompt is computed draws a token. `python -m tests.fleet.routing` prints a table.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from statistics import fmean
from typing import Any

from quire.fleet.index import Expectation, FleetIndex
from quire.fleet.rates import StepRates
from quire.fleet.score import Candidate, Demand, PlacementChoice, choose
from quire.fleet.state import ReplicaState

BLOCK = 16  # tokens
BUDGET = 512  # tokens a step
SEATS = 32
A, B, C = 0.010, 0.0004, 0.0006  # seconds of a step, a prompt token, a sequence


def state(**known: Any) -> ReplicaState:
    """A replica that is idle and empty, but for what is given."""
    numbers: dict[str, Any] = {
        "waiting_tokens": 0,
        "num_waiting": 0,
        "num_running": 0,
        "max_running": SEATS,
        "free_blocks": 1_000,
        "cached_blocks": 0,
        "num_blocks": 1_000,
        "block_size": BLOCK,
        "seconds_a_step": A,
        "seconds_a_prompt_token": B,
        "seconds_a_sequence": C,
        "draining": False,
    }
    return ReplicaState(**numbers | known)


@dataclass(frozen=True)
class Job:
    """A request of a trace."""

    name: str
    time: float  # of arrival, seconds
    prompt: tuple[int, ...]  # digests of its full blocks
    answer: tuple[int, ...]  # digests of the full blocks of what it generates
    num_tokens: int  # of the prompt: its full blocks and a part of one
    new_tokens: int


Trace = list[Job]


def sessions(seed: int, num_sessions: int, num_jobs: int, turn_tokens: int = 200) -> Trace:
    """Conversations: each prompt is all that was said before and something new. Arrivals come one a second.

    A conversation that has 8 turns ends, and another one takes its place.
    """
    rng, fresh, trace, time = random.Random(seed), count(1), [], 0.0
    talks: list[list[int]] = [[] for _ in range(num_sessions)]
    turns = [rng.randrange(8) for _ in range(num_sessions)]
    for talk, before in zip(talks, turns, strict=True):
        talk.extend(next(fresh) for _ in range(before * turn_tokens * 3 // 2 // BLOCK))
    for i in range(num_jobs):
        time += rng.expovariate(1.0)
        which = rng.randrange(num_sessions)
        if turns[which] == 8:
            talks[which], turns[which] = [], 0
        turns[which] += 1
        asked = tuple(next(fresh) for _ in range(rng.randint(turn_tokens // 2, turn_tokens * 3 // 2) // BLOCK))
        new_tokens = rng.randint(turn_tokens // 4, turn_tokens * 3 // 4)
        prompt = (*talks[which], *asked)
        answer = tuple(next(fresh) for _ in range(new_tokens // BLOCK))
        talks[which] = [*prompt, *answer]
        trace.append(
            Job(f"session-{i}", time, prompt, answer, len(prompt) * BLOCK + rng.randrange(1, BLOCK), new_tokens)
        )
    return trace


def shared_prefixes(seed: int, num_prefixes: int, num_jobs: int, prefix_blocks: int = 64) -> Trace:
    """Questions about documents, some of them asked for far more often (1 / rank). Arrivals come one a second."""
    rng, fresh, trace, time = random.Random(seed), count(num_prefixes * prefix_blocks), [], 0.0
    weights = [1 / rank for rank in range(1, num_prefixes + 1)]
    for i in range(num_jobs):
        time += rng.expovariate(1.0)
        [which] = rng.choices(range(num_prefixes), weights)
        prefix = range(which * prefix_blocks, (which + 1) * prefix_blocks)
        prompt = (*prefix, *(next(fresh) for _ in range(rng.randint(1, 6))))
        new_tokens = rng.randint(20, 120)
        answer = tuple(next(fresh) for _ in range(new_tokens // BLOCK))
        trace.append(
            Job(f"question-{i}", time, prompt, answer, len(prompt) * BLOCK + rng.randrange(1, BLOCK), new_tokens)
        )
    return trace


def infinite_hits(trace: Trace, warm_up: float = 0.2) -> float:
    """Share of the prompt tokens that one cache which never evicts would have had, without the first jobs."""
    known: set[int] = set()
    cached = asked = 0
    for i, job in enumerate(trace):
        if i >= int(warm_up * len(trace)):
            found = next((i for i, digest in enumerate(job.prompt) if digest not in known), len(job.prompt))
            cached += found * BLOCK
            asked += job.num_tokens
        known.update(job.prompt, job.answer)
    return cached / asked


class Work:
    """A job at its replica."""

    def __init__(self, job: Job, uncached: int, expectation: Expectation | None) -> None:
        self.job = job
        self.uncached = uncached  # tokens that it was expected to compute when it was routed
        self.expectation = expectation
        self.num_computed = 0  # tokens of the prompt
        self.num_cached = 0  # of these, tokens that were found
        self.owned: list[int] = []  # digests of its blocks that others can use
        self.num_private = 0  # its other blocks
        self.first_token = 0.0  # when


class Replica:
    """Steps, seats and a cache."""

    def __init__(self, num_blocks: int, slowness: float) -> None:
        self.num_blocks = num_blocks
        self.slowness = slowness  # its steps take so many times as long
        self.rates = StepRates()
        self.began = 0.0  # when it sent its state, and began the latest step
        self.num_steps = 0
        self.inbox: list[Work] = []  # came after the last state was sent
        self.waiting: list[Work] = []
        self.prefilling: list[Work] = []
        self.decoding: list[tuple[int, str, Work]] = []  # heap by the step that draws the last token
        self.owners: Counter[int] = Counter()  # by digest
        self.idle: OrderedDict[int, None] = OrderedDict()  # reusable, without an owner; the next to be evicted first
        self.num_private = 0  # blocks with an owner and no digest
        self.events: list[tuple[bool, int]] = []  # (stored or else removed, digest)

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_free(self) -> int:
        return self.num_blocks - len(self.owners) - self.num_private

    def state(self) -> ReplicaState:
        """As it was sent after the last step: without the inbox."""
        missing = sum(work.job.num_tokens - work.num_computed for work in self.prefilling)
        return state(
            waiting_tokens=missing + sum(work.uncached for work in self.waiting),
            num_waiting=len(self.waiting),
            num_running=self.num_running,
            free_blocks=self.num_free,
            cached_blocks=len(self.idle),
            num_blocks=self.num_blocks,
            seconds_a_step=self.rates.seconds_a_step,
            seconds_a_prompt_token=self.rates.seconds_a_prompt_token,
            seconds_a_sequence=self.rates.seconds_a_sequence,
        )

    def begin(self, now: float) -> tuple[list[tuple[Work, int]], float] | None:
        """The next step's prompts with their tokens, and its seconds; None: there is nothing to do."""
        self.began = now
        self.waiting += self.inbox
        self.inbox.clear()
        self._admit_all()
        budget = BUDGET - len(self.decoding)
        prompts = []
        for work in self.prefilling:
            if tokens := min(budget, work.job.num_tokens - work.num_computed):
                prompts.append((work, tokens))
                budget -= tokens
        if not prompts and not self.decoding:
            return None
        num_prompt = sum(tokens for _, tokens in prompts)
        seconds = (A + B * num_prompt + C * len(self.decoding)) * self.slowness
        self.rates.observe(num_prompt, len(self.decoding), seconds)
        return prompts, seconds

    def end(self, prompts: list[tuple[Work, int]], now: float) -> list[Work]:
        """A step is done. Returns the work that ended with it."""
        self.num_steps += 1
        ended = []
        while self.decoding and self.decoding[0][0] <= self.num_steps:
            work = heappop(self.decoding)[2]
            self._publish(work, work.job.answer)
            self._release(work)
            ended.append(work)
        for work, tokens in prompts:
            before = work.num_computed // BLOCK
            work.num_computed += tokens
            self._publish(work, work.job.prompt[before : work.num_computed // BLOCK])
            if work.num_computed == work.job.num_tokens:
                self.prefilling.remove(work)
                work.first_token = now
                heappush(self.decoding, (self.num_steps + work.job.new_tokens, work.job.name, work))
        return ended

    def _has(self, digest: int) -> bool:
        return digest in self.owners or digest in self.idle

    def _admit_all(self) -> None:
        """First come, first served, but for those whose next block another one is just computing: they wait for it."""
        coming: dict[int, set[int]] = {}  # by the block's place in its prompt

        def add(work: Work) -> None:
            at = work.num_computed // BLOCK
            if at < len(work.job.prompt) and not self._has(work.job.prompt[at]):
                coming.setdefault(at, set()).add(work.job.prompt[at])

        for work in self.prefilling:
            add(work)
        for work in list(self.waiting):
            prompt = work.job.prompt
            if any(at < len(prompt) and prompt[at] in digests for at, digests in coming.items()):
                continue
            if self.num_running == SEATS or not self._admit(work):
                return
            self.waiting.remove(work)
            self.prefilling.append(work)
            add(work)

    def _admit(self, work: Work) -> bool:
        """Take blocks for all that the job will compute, if there are so many."""
        job = work.job
        found = job.prompt[: next((i for i, digest in enumerate(job.prompt) if not self._has(digest)), None)]
        fresh = -(-(job.num_tokens + job.new_tokens) // BLOCK) - len(found)
        if fresh + sum(digest in self.idle for digest in found) > self.num_free:
            return False
        for digest in found:
            self.idle.pop(digest, None)
        self.owners.update(found)
        work.owned += found
        work.num_private += fresh
        self.num_private += fresh
        while self.num_free < len(self.idle):
            self.events.append((False, self.idle.popitem(last=False)[0]))
        work.num_cached = work.num_computed = len(found) * BLOCK
        return True

    def _publish(self, work: Work, digests: Sequence[int]) -> None:
        for digest in digests:
            if not self._has(digest):
                self.owners[digest] = 1
                work.owned.append(digest)
                work.num_private -= 1
                self.num_private -= 1
                self.events.append((True, digest))

    def _release(self, work: Work) -> None:
        """Its blocks are free; tails are evicted before heads."""
        self.num_private -= work.num_private
        for digest in reversed(work.owned):
            self.owners[digest] -= 1
            if not self.owners[digest]:
                del self.owners[digest]
                self.idle[digest] = None


Rule = Callable[["Fleet", Job, float], PlacementChoice | int]  # the last one: now


@dataclass
class Fleet:
    """Replicas, and the gateway's view of them."""

    num_replicas: int
    num_blocks: int  # of each one's cache
    rule: Rule
    slowness: Sequence[float] = ()  # of each replica; empty: all are 1.0
    index: FleetIndex = field(default_factory=FleetIndex)
    num_routed: int = 0
    prompt_tokens: int = 0  # of the jobs that were admitted
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        slowness = self.slowness or [1.0] * self.num_replicas
        self.replicas = [Replica(self.num_blocks, slow) for slow in slowness]

    def candidates(self, job: Job, now: float) -> list[Candidate]:
        """All replicas, as a gateway sees them."""
        runs = self.index.runs(job.prompt)
        return [
            Candidate(
                slot=slot,
                name=f"replica {slot}",
                fingerprint="",
                state=replica.state(),
                step_age=now - replica.began,
                num_blocks=runs.get(slot, 0),
                unseen_tokens=sum(work.uncached for work in replica.inbox),
                unseen_requests=len(replica.inbox),
            )
            for slot, replica in enumerate(self.replicas)
        ]

    def demand(self, job: Job, new_tokens: float) -> Demand:
        """What a gateway knows of a job: an average of the answers, and the hit rate until now."""
        hit_rate = self.cached_tokens / max(1, self.prompt_tokens)
        return Demand(request_id=job.name, num_tokens=job.num_tokens, new_tokens=new_tokens, hit_rate=hit_rate)

    def route(self, job: Job, now: float) -> int:
        """Send a job to the replica that the rule says. Returns its slot."""
        chosen = self.rule(self, job, now)
        self.num_routed += 1
        if isinstance(chosen, int):
            self.replicas[chosen].inbox.append(Work(job, job.num_tokens, None))
            return chosen
        slot = chosen.best.candidate.slot
        work = Work(job, chosen.best.uncached_tokens, self.index.expect(slot, job.prompt))
        self.replicas[slot].inbox.append(work)
        return slot

    def hear(self, slot: int) -> None:
        """Take in the events of the replica's cache."""
        for stored, digest in self.replicas[slot].events:
            (self.index.store if stored else self.index.remove)(slot, (digest,))
        self.replicas[slot].events.clear()


def round_robin(fleet: Fleet, job: Job, now: float) -> int:
    return fleet.num_routed % fleet.num_replicas


def by_score(new_tokens: float) -> Rule:
    """The product's rule, with so many new tokens expected of every job."""

    def chosen(fleet: Fleet, job: Job, now: float) -> PlacementChoice:
        return choose(fleet.demand(job, new_tokens), fleet.candidates(job, now))

    return chosen


@dataclass(frozen=True)
class Result:
    """What became of a trace. Times are in seconds."""

    mean_first_token: float
    mean_end: float
    hit_rate: float  # share of the prompt tokens that were cached
    num_routed: tuple[int, ...]  # jobs of each replica


def simulate(trace: Trace, rate: float, fleet: Fleet, warm_up: float = 0.2) -> Result:
    """Run a trace at `rate` jobs a second. The first share of the jobs, `warm_up`, is left out of all means."""
    events: list[tuple[float, int, Job | int, list[tuple[Work, int]]]] = []
    order, now = count(), 0.0
    for job in trace:
        heappush(events, (job.time / rate, next(order), job, []))
    routed: Counter[int] = Counter()
    busy: set[int] = set()
    first_tokens, ends, cached, asked = [], [], 0, 0
    counted = {job.name for job in trace[int(warm_up * len(trace)) :]}

    def start(slot: int) -> None:
        begun = fleet.replicas[slot].begin(now)
        fleet.hear(slot)
        if begun is not None:
            busy.add(slot)
            heappush(events, (now + begun[1], next(order), slot, begun[0]))

    while events:
        now, _, what, prompts = heappop(events)
        if isinstance(what, Job):
            slot = fleet.route(what, now)
            routed[slot] += 1
            if slot not in busy:
                start(slot)
            continue
        busy.discard(what)
        for work in fleet.replicas[what].end(prompts, now):
            if work.expectation is not None:
                fleet.index.settle(work.expectation)
            fleet.prompt_tokens += work.job.num_tokens
            fleet.cached_tokens += work.num_cached
            if work.job.name in counted:
                first_tokens.append(work.first_token - work.job.time / rate)
                ends.append(now - work.job.time / rate)
                cached += work.num_cached
                asked += work.job.num_tokens
        fleet.hear(what)
        start(what)
    each = tuple(routed[slot] for slot in range(fleet.num_replicas))
    return Result(fmean(first_tokens), fmean(ends), cached / asked, each)


def sustained_rate(trace: Trace, make: Callable[[], Fleet], first_token: float = 1.0) -> float:
    """The highest rate, jobs a second, at which the mean time to the first token is at most that many seconds."""
    low, high = 0.5, 1.0
    while simulate(trace, high, make()).mean_first_token <= first_token:
        low, high = high, 2 * high
    for _ in range(5):
        middle = (low + high) / 2
        if simulate(trace, middle, make()).mean_first_token <= first_token:
            low = middle
        else:
            high = middle
    return low


def mean_new_tokens(trace: Trace) -> float:
    """What a gateway has learnt to expect of an answer."""
    return fmean(job.new_tokens for job in trace)


def report(name: str, trace: Trace, num_blocks: int, num_replicas: int = 4) -> None:
    """Print a table: what each rule makes of the trace, at a share of the load that each rule sustains."""
    infinite = infinite_hits(trace)
    rules: dict[str, Rule] = {"round robin": round_robin, "score": by_score(mean_new_tokens(trace))}

    def fleet(rule: str) -> Fleet:
        return Fleet(num_replicas, num_blocks, rules[rule])

    print(f"{name}: one infinite cache has {infinite:.1%} of the prompt tokens")
    for limit in rules:
        most = sustained_rate(trace, partial(fleet, limit))
        for load in (0.3, 0.8):
            print(f"  {load:.0%} of what {limit} sustains, {load * most:.2f} jobs a second")
            for rule in rules:
                result = simulate(trace, load * most, fleet(rule))
                times = (
                    f"{result.mean_first_token * 1000:8.1f} ms to the first token, {result.mean_end:6.2f} s to the end"
                )
                print(f"    {rule:11} {times}, {result.hit_rate:.1%} of the prompt tokens cached")


if __name__ == "__main__":  # python -m tests.fleet.routing; each cache has half the blocks that are in use
    report("sessions", sessions(1, 40, 1000), 1_500)
    report("shared prefixes", shared_prefixes(1, 40, 1000), 1_280)
    report("nothing shared", shared_prefixes(1, 1, 1000, prefix_blocks=0), 1_280)
