"""Random operations on a BlockManager beside a memory that holds, in every slot, the token that was written there.

Whatever the manager does, each request must read its own tokens through its tables. The memory follows the manager's
moves and nothing else, so a block that is given out too early, shared while it is written, or found under the wrong
tokens shows at once.
"""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from quire.cache.audit import audit
from quire.cache.disk.store import DiskStore
from quire.cache.disk.tier import DiskTier
from quire.cache.groups import NO_STATES, AnyGroup, CacheGroup, RowGroup, StateGroup, StatePools
from quire.cache.incoming import Arrivals
from quire.cache.manager import BlockManager, Move
from quire.cache.pool import NONE
from quire.cache.scores import ScoredMemory
from quire.engine.prefetch import Prefetch
from quire.request import Request, Retention, SampleGroup, SamplingParams, TokenLogprobs

GROUPS = (
    (CacheGroup((0,)),),
    (CacheGroup((0,)), CacheGroup((1,), window=6)),
    (CacheGroup((0,), window=9),),
    (CacheGroup((0,)), StateGroup((1,), piece=8), RowGroup((1,), piece=8)),
    (CacheGroup((0,)), CacheGroup((1,), window=6), StateGroup((2,), piece=4), RowGroup((2,), piece=4)),
    (StateGroup((0,), piece=8), RowGroup((0,), piece=8)),
)
EMPTY = -1
PARAMS = SamplingParams()
SCORED = SamplingParams(prompt_logprobs=1)


def scored(request: Request, position: int) -> TokenLogprobs:
    """Logprobs of a token that depend on it and on all tokens before it."""
    number = crc32(request.tokens[: position + 1].tobytes())
    best = crc32(request.tokens[:position].tobytes())
    return TokenLogprobs(request.tokens[position], -(number % 4096) / 8, 1 + number % 7, ((best % 4, -best % 64 / 4),))


class Machine:
    """A manager, the requests there are, and the memory."""

    def __init__(
        self,
        groups: tuple[AnyGroup, ...],
        num_blocks: int,
        block_size: int,
        num_host_blocks: int,
        caching: bool,
        state_pools: StatePools = NO_STATES,
        interval: int = 16,
    ) -> None:
        self.manager = BlockManager(
            groups,
            num_blocks,
            block_size,
            8,
            num_host_blocks=num_host_blocks,
            state_pools=state_pools,
            state_snapshot_interval=interval,
            enable_prefix_caching=caching,
        )
        # A block of a state holds the tokens that went into it, each other block one token a slot.
        pools = zip(self.manager.spans, self.manager.pools, self.manager.host_pools, strict=True)
        self.memory, self.host = [], []
        for span, pool, host_pool in pools:
            self.memory.append([[EMPTY] * span for _ in range(pool.num_blocks)])
            self.host.append([[EMPTY] * span for _ in range(host_pool.num_blocks)])
        self.disk: Disk | None = None
        self.running: list[Request] = []
        self.swapped: list[list[Request]] = []  # units
        self.count = 0
        self.seen: dict[str, int] = {}  # how often each thing happened

    @property
    def requests(self) -> list[Request]:
        return self.running + [request for unit in self.swapped for request in unit]

    def happened(self, what: str, times: int = 1) -> None:
        self.seen[what] = self.seen.get(what, 0) + times

    # ------------------------------------------------------------------------------------------- operations

    def add(self, family: int, length: int, salt: str = "", kept: int = 0) -> None:
        """A request whose tokens begin as those of its family do, if there is room for it."""
        rng = random.Random(family)
        tokens = array("i", (rng.randrange(4) for _ in range(length)))
        request = Request(f"r{self.count}", tokens, length, PARAMS, cache_salt=salt)
        request.group = SampleGroup([request])
        request.retention = Retention(f"key {family % 2}", kept) if kept else None
        if family == 0 or (family == 1 and self.count % 2):
            request.sampling, request.first_prompt_logprob = SCORED, self.count % 3 * 2
        request.schedule.sort_key = (self.count, self.count, self.count)
        self.count += 1
        if self.disk is not None:
            self.disk.fetch(request)
        match = self.manager.lookup.match(request)
        if self.manager.has_free(self.manager.needed(request, match)):
            self.manager.admit(request, match)
            self.happened("hit", match.num_blocks > 0)
            self.happened("states hit", match.num_blocks > 0 and len(self.manager.state_groups) > 0)
            self.happened("parted", self.manager.parted_at(request) > request.cache.num_cached)
            self.running.append(request)
            self.compute(request, 8)

    def append(self, request: Request, token: int) -> None:
        request.tokens.append(token)

    def compute(self, request: Request, most: int) -> None:
        """Compute up to that many of the request's tokens, if there is room for them."""
        num_new = min(request.num_missing, most)
        start = request.cache.num_computed
        copies: list[Move] = []
        if num_new == 0 or not self.manager.grow(request, start + num_new, copies):
            self.happened("short", num_new > 0)
            return
        free = [pool.num_free for pool in self.manager.pools]
        self.manager.keep_states(request, start, start + num_new)
        self.happened("states kept", sum(free) - sum(pool.num_free for pool in self.manager.pools))
        for move in copies:
            self.memory[move.group][move.dst] = list(self.memory[move.group][move.src])
        self.happened("copied", len(copies))
        for g, table in enumerate(request.cache.block_ids):
            group, span = self.manager.groups[g], self.manager.spans[g]
            for at in range(group.stored(start, request.cache.num_cached), start + num_new):
                if isinstance(group, StateGroup):
                    if (at + 1) % span == 0 and table[at // span] != NONE:
                        self.owned_alone(g, table[at // span])[:] = request.tokens[: at + 1]
                elif isinstance(group, CacheGroup) or table[at // span] != NONE:
                    self.owned_alone(g, table[at // span])[at % span] = request.tokens[at]
        self.score(request, start, num_new)
        self.manager.advance(request, num_new)
        self.check(request)

    def score(self, request: Request, start: int, num_new: int) -> None:
        """Report the logprobs of the prompt that were stored, and record those that the step computed."""
        if request.sampling is not SCORED:
            return
        found, request.cache.found = request.cache.found, ()
        first = request.next_prompt_logprob + 1
        if [*found] != [scored(request, position) for position in range(first, first + len(found))]:
            raise AssertionError(f"{request.id} gets wrong logprobs from token {first} on")
        request.schedule.num_prompt_logprobs += len(found)
        self.happened("scores found", len(found))
        first, last = request.next_prompt_logprob, min(start + num_new, request.num_prompt - 1)
        if start > first and first < request.num_prompt - 1:
            raise AssertionError(f"{request.id} computes row {start}, and needs row {first}")
        computed = [scored(request, row + 1) for row in range(max(start, first), last)]
        self.manager.record(request, computed)
        request.schedule.num_prompt_logprobs += len(computed)

    def owned_alone(self, group: int, block: int) -> list[int]:
        """What a block holds that is about to be written."""
        owners = self.manager.pools[group].ref_counts[block]
        if owners != 1:
            raise AssertionError(f"block {block} is written, and {owners} own it")
        return self.memory[group][block]

    def guess(self, request: Request, count: int) -> None:
        """Take blocks for a step with guesses that all turn out wrong."""
        if request.num_missing == 1 and self.manager.grow(request, len(request.tokens) + count, copies := []):
            for move in copies:
                self.memory[move.group][move.dst] = list(self.memory[move.group][move.src])
            self.happened("guessed")
            self.compute(request, 1)

    def fork(self, parent: Request) -> None:
        """A sibling that goes on from here, if all of the parent's tokens are computed."""
        if parent.num_missing == 0:
            child = Request(f"r{self.count}", parent.tokens + array("i", [self.count % 4]), 1, PARAMS)
            child.group, child.cache_salt, child.schedule.sort_key = (
                parent.group,
                parent.cache_salt,
                parent.schedule.sort_key,
            )
            self.count += 1
            parent.group.members.append(child)
            self.manager.fork(parent, child)
            self.running.append(child)
            self.happened("forked")
            self.check(child)

    def release(self, request: Request) -> None:
        self.manager.release(request)
        self.running.remove(request)
        request.group.members.remove(request)

    def swap_out(self, request: Request) -> None:
        """Move the request and its running siblings to the host, if they fit there."""
        unit = [member for member in request.group.members if member.cache.block_ids]
        moves = self.manager.swap_out(unit)
        self.happened("host full", moves is None)
        if moves is not None:
            for move in moves:
                self.host[move.group][move.dst] = list(self.memory[move.group][move.src])
            self.running = [request for request in self.running if request not in unit]
            self.swapped.append(unit)
            self.happened("swapped out")

    def swap_in(self, at: int) -> None:
        """Bring a unit back, if there is room."""
        unit = self.swapped[at]
        if self.manager.has_free(self.manager.needed_to_swap_in(unit)):
            hosts = sum(len({h for r in unit for h in r.cache.host_block_ids[g]}) for g in range(len(self.memory)))
            moves = self.manager.swap_in(unit)
            for move in moves:
                self.memory[move.group][move.dst] = list(self.host[move.group][move.src])
            del self.swapped[at]
            self.running += unit
            self.happened("swapped in")
            self.happened("found again", hosts - len(moves))
            for request in unit:
                self.check(request)

    def drop(self, at: int) -> None:
        """End a swapped unit."""
        for request in self.swapped.pop(at):
            self.manager.release(request)
            request.group.members.remove(request)

    # ----------------------------------------------------------------------------------------------- checks

    def check(self, request: Request) -> None:
        """The request reads its own tokens, as far back as its next row sees."""
        computed = request.cache.num_computed
        for g, (group, table) in enumerate(zip(self.manager.groups, request.cache.block_ids, strict=True)):
            memory, span = self.memory[g], self.manager.spans[g]
            if isinstance(group, StateGroup):
                end = computed // span * span
                if end and memory[table[end // span - 1]] != request.tokens[:end].tolist():
                    raise AssertionError(f"{request.id} reads a wrong state at {end} in group {g}")
                continue
            first = computed // span * span if isinstance(group, RowGroup) else 0
            if group.window is not None:
                first = max(0, computed - group.window + 1)
            for at in range(first, group.stored(computed, request.cache.num_cached)):
                if memory[table[at // span]][at % span] != request.tokens[at]:
                    raise AssertionError(f"{request.id} reads a wrong token at {at} in group {g}")

    def audit(self) -> None:
        audit(self.manager, self.requests)
        for request in self.running:
            self.check(request)

    def step(self, rng: random.Random) -> None:
        """One random operation."""
        self.manager.begin_step(self.manager.now + 1)
        if self.disk is not None:
            self.disk.step(rng)
        kind, running = rng.random(), self.running
        if not running or kind < 0.12:
            kept = (0, 0, 30, 300)[self.count % 4]
            self.add(rng.randrange(6), rng.randint(1, 30), rng.choice(("", "", "", "other")), kept)
            self.happened("kept", sum(map(len, self.manager.retained)))
        elif kind < 0.70:
            request = running[int(rng.random() * len(running))]
            if request.num_missing == 0:
                request.tokens.append(int(rng.random() * 4))
            if rng.random() < 0.1:
                self.guess(request, 1 + int(rng.random() * 4))
            self.compute(request, 1 + int(rng.random() * 8))
        elif kind < 0.78:
            self.fork(rng.choice(running))
        elif kind < 0.90:
            self.release(rng.choice(running))
        elif kind < 0.95 and not self.swapped:
            self.swap_out(rng.choice(running))
        elif self.swapped:
            (self.swap_in if rng.random() < 0.8 else self.drop)(rng.randrange(len(self.swapped)))
        elif kind > 0.9995:
            self.manager.reset_prefix_cache()
            self.happened("reset")

    def end(self) -> None:
        """Give everything back: the pools are as full as they were."""
        while self.swapped:
            self.drop(0)
        while self.running:
            self.release(self.running[-1])
        self.audit()
        for pool in (*self.manager.pools, *self.manager.host_pools):
            assert pool.num_free == pool.num_blocks


def machine(seed: int) -> Machine:
    """A machine with random sizes; its pool is short of blocks most of the time."""
    rng = random.Random(seed)
    groups = GROUPS[seed % len(GROUPS)]
    has_states = any(isinstance(group, StateGroup) for group in groups)
    num_blocks, block_size = rng.choice([5, 12, 30, 60]), rng.choice([1, 2, 4] if has_states else [1, 2, 4, 5])
    pools = StatePools(rng.choice([3, 6, 20]), rng.choice([2, 5, 12]), rng.choice([2, 6]))
    return Machine(groups, num_blocks, block_size, rng.choice([3, 10, 60]), rng.random() < 0.8, pools)


class Disk:
    """A disk beside a machine's memory: what its threads do happens in between, also in the middle of an operation.

    Its files are damaged now and then, and opened anew as after a restart.
    """

    WIDTH = 4 * 96  # bytes of a block: its tokens, then EMPTY

    def __init__(self, state: Machine, directory: Path, rng: random.Random) -> None:
        self.state, self.directory, self.rng = state, directory, rng
        self.slots = [rng.choice([1, 4, 15, 80]) for _ in state.manager.groups]
        self.is_inside = False
        state.disk = self
        self.open()

    def open(self) -> None:
        memory = ScoredMemory(self, [self.WIDTH] * len(self.slots), self.state.manager.scores)
        self.prefetch = Prefetch(self.state.manager, Arrivals(), 1.0)
        store = DiskStore(self.directory, b"secret", memory.widths(), self.slots)
        self.tier = DiskTier(store, memory, self.prefetch.arrivals)
        self.prefetch.sources.append(self.tier.reader)
        self.state.manager.disk, self.state.manager.memory = self.tier, memory
        self.state.happened("found on the disk", len(self.tier.store))

    def read_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        """A copy that is not made at once: what happens meanwhile must not be in it."""
        numbers = out.view(np.int32)
        numbers[:] = EMPTY
        tokens = list(self.state.memory[group][block])
        numbers[: len(tokens) // 2] = tokens[: len(tokens) // 2]
        if self.rng.random() < 0.5:
            self.is_inside = True
            for _ in range(self.rng.randrange(12)):
                self.state.step(self.rng)
            self.is_inside = False
        tokens = list(self.state.memory[group][block])
        numbers[len(tokens) // 2 : len(tokens)] = tokens[len(tokens) // 2 :]

    def write_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        tokens = [token for token in data.view(np.int32).tolist() if token != EMPTY]
        self.state.memory[group][block][:] = tokens

    def fetch(self, request: Request) -> None:
        """Bring what the request needs from the disk, or half of it."""
        self.prefetch.begin_step()
        before = self.tier.reader.counts.blocks
        while self.prefetch.awaits(request, [pool.num_free for pool in self.state.manager.pools]):
            self.tier.reader.read_next()
            if self.rng.random() < 0.5:
                self.prefetch.begin_step()
            if self.rng.random() < 0.02:
                self.state.happened("not waited for")
                break
        self.state.happened("read", self.tier.reader.counts.blocks - before)

    def step(self, rng: random.Random) -> None:
        """What threads, faults and restarts do between two operations."""
        if self.is_inside:
            return
        kind = rng.random()
        if kind < 0.3:
            written, lost = self.tier.counts.blocks, self.tier.counts.unwritten["evicted"]
            self.tier.write_next()
            self.state.happened("written", self.tier.counts.blocks - written)
            self.state.happened("given away before", self.tier.counts.unwritten["evicted"] - lost)
        elif kind < 0.32:
            self.damage(rng)
        elif kind < 0.321:
            self.state.happened("damage seen", self.tier.reader.counts.misses["checksum"])
            self.tier.close()
            if rng.random() < 0.5:
                self.damage(rng)
            self.open()

    def damage(self, rng: random.Random) -> None:
        """Flip a bit of a file, cut its end off, or overwrite a part with another."""
        path = rng.choice(sorted(path for path in self.directory.iterdir() if path.stat().st_size))
        size = path.stat().st_size
        with path.open("r+b") as file:
            at = rng.randrange(size)
            file.seek(at)
            kind = rng.random()
            if kind < 0.5:
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << rng.randrange(8)]))
            elif kind < 0.7:
                file.truncate(at)
            else:
                file.seek(rng.randrange(size))
                part = file.read(rng.randrange(1, 400))
                file.seek(at)
                file.write(part)


def operate(seed: int, steps: int, audit_every: int, directory: Path | None = None) -> Machine:
    """That many random operations, with an audit now and then and at the end. directory: with a disk there."""
    state, rng = machine(seed), random.Random(seed)
    if directory is not None:
        Disk(state, directory, rng)
    for i in range(steps):
        state.step(rng)
        if i % audit_every == 0:
            state.audit()
            if state.disk is not None:
                state.disk.tier.store.audit()
    state.end()
    return state


if __name__ == "__main__":  # python -m tests.cache.machine FIRST_SEED SEEDS STEPS
    import sys
    import time

    first, seeds, steps = map(int, sys.argv[1:])
    started = time.perf_counter()
    totals: dict[str, int] = {}
    for seed in range(first, first + seeds):
        for what, times in operate(seed, steps, 5_000).seen.items():
            totals[what] = totals.get(what, 0) + times
    print(f"{seeds * steps:,} operations, 0 violations, {time.perf_counter() - started:.0f} s: {totals}")
