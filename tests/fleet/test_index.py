"""The fleet's index: against plain sets, and against the caches whose events it takes in."""

from __future__ import annotations

import random
from collections import Counter
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.cache import events
from quire.cache.events import CacheEvent
from quire.errors import BadValue
from quire.fleet.index import MAX_SLOTS, Expectation, FleetIndex
from tests.cache.machine import GROUPS, Machine

SLOTS = st.sampled_from([0, 1, 2, 63, 64, 255])
DIGESTS = st.lists(st.integers(0, 11), max_size=8)


def leading(digests: list[int], held: set[int]) -> int:
    return next((i for i, digest in enumerate(digests) if digest not in held), len(digests))


class IndexMachine(RuleBasedStateMachine):
    """An index, and for each slot a set of held blocks and a list of open expectations."""

    def __init__(self) -> None:
        super().__init__()
        self.index = FleetIndex()
        self.held: dict[int, set[int]] = {}
        self.open: list[Expectation] = []

    @rule(slot=SLOTS, digests=DIGESTS)
    def store(self, slot: int, digests: list[int]) -> None:
        self.index.store(slot, digests)
        self.held.setdefault(slot, set()).update(digests)

    @rule(slot=SLOTS, digests=DIGESTS)
    def remove(self, slot: int, digests: list[int]) -> None:
        self.index.remove(slot, digests)
        self.held.setdefault(slot, set()).difference_update(digests)

    @rule(slot=SLOTS)
    def clear(self, slot: int) -> None:
        self.index.clear(slot)
        self.held.pop(slot, None)

    @rule(slot=SLOTS, digests=DIGESTS)
    def replace(self, slot: int, digests: list[int]) -> None:
        self.index.replace(slot, digests)
        self.held[slot] = set(digests)

    @rule(slot=SLOTS, digests=DIGESTS)
    def expect(self, slot: int, digests: list[int]) -> None:
        self.open.append(self.index.expect(slot, digests))

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 1_000))
    def settle(self, pick: int) -> None:
        self.index.settle(self.open.pop(pick % len(self.open)))

    @rule(digests=DIGESTS)
    def read(self, digests: list[int]) -> None:
        seen = {slot: set(held) for slot, held in self.held.items()}
        for one in self.open:
            seen.setdefault(one.slot, set()).update(one.digests)
        runs = {slot: count for slot, held in seen.items() if (count := leading(digests, held))}
        assert self.index.runs(digests) == runs
        held = {slot: count for slot, held in self.held.items() if (count := leading(digests, held))}
        assert self.index.held_runs(digests, FleetIndex()) == held

    @invariant()
    def same(self) -> None:
        self.index.audit()
        assert len(self.index) == len(set().union(*self.held.values()))
        for slot in (0, 1, 2, 63, 64, 255):
            assert self.index.num_held(slot) == len(self.held.get(slot, ()))

    def teardown(self) -> None:
        for slot in list(self.held):
            self.index.clear(slot)
        for one in self.open:
            self.index.settle(one)
        assert vars(self.index) == vars(FleetIndex())  # nothing is left in memory


IndexMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestIndexMachine = pytest.mark.slow(IndexMachine.TestCase)


def test_a_run_ends_at_the_first_block_that_a_replica_lacks() -> None:
    index = FleetIndex()
    index.store(0, [1, 2, 3, 4])
    index.store(7, [1, 2, 4])
    index.store(255, [2, 3, 4])
    assert index.runs([1, 2, 3, 4, 5]) == {0: 4, 7: 2}
    assert index.runs([1]) == {0: 1, 7: 1}
    assert index.runs([]) == {}
    assert index.runs([9, 1]) == {}


def test_what_is_expected_and_what_is_held_do_not_remove_each_other() -> None:
    index = FleetIndex()
    one, two = index.expect(3, [1, 2]), index.expect(3, [1, 2, 3])
    index.store(3, [1])
    index.remove(3, [1])
    assert index.runs([1, 2, 3]) == {3: 3}
    index.settle(two)
    assert index.runs([1, 2, 3]) == {3: 2}
    index.store(3, [1])
    index.settle(one)
    assert index.runs([1, 2, 3]) == {3: 1}
    assert index.num_held(3) == len(index) == 1


def test_what_is_expected_of_a_replica_outlives_its_cache() -> None:
    index = FleetIndex()
    index.store(3, [1, 2])
    coming = index.expect(3, [1])
    index.clear(3)
    assert index.runs([1, 2]) == {3: 1}
    index.settle(coming)
    assert index.runs([1, 2]) == {}


def test_an_expectation_is_settled_once_and_where_it_was_made() -> None:
    index, other = FleetIndex(), FleetIndex()
    made = index.expect(5, [1, 2])
    with pytest.raises(BadValue, match="2 blocks in slot 5 is not open"):
        other.settle(made)
    index.settle(made)
    with pytest.raises(BadValue, match="settle each one once"):
        index.settle(made)


@pytest.mark.parametrize("slot", [-1, MAX_SLOTS, 10**6])
def test_a_slot_that_cannot_be_is_refused(slot: int) -> None:
    index = FleetIndex()
    for change in (index.store, index.replace, index.expect):
        with pytest.raises(BadValue, match=rf"slot is {slot}; it must be in 0\.\.255"):
            change(slot, [1])
    index.audit()


def test_audit_sees_tables_that_differ() -> None:
    index = FleetIndex()
    index.store(1, [5])
    index._held[1].clear()
    with pytest.raises(BadValue, match="other holders by digest than by slot"):
        index.audit()
    index = FleetIndex()
    index.expect(1, [5])
    index._expected.clear()
    with pytest.raises(BadValue, match="than its open expectations have"):
        index.audit()


# -------------------------------------------------------------------------------------- against real block managers


def short(digest: bytes) -> int:
    """As a digest goes over the wire."""
    return int.from_bytes(blake2b(digest, key=b"a cluster's secret", digest_size=8).digest(), "big")


class Wire:
    """A manager's events on their way to a fleet's index; some are lost, and then a snapshot follows."""

    def __init__(self, state: Machine, index: FleetIndex, slot: int) -> None:
        self.state, self.index, self.slot = state, index, slot
        self.is_cut = False
        self.seen: Counter[str] = Counter()
        state.manager.listeners.append(self.take)

    def take(self, event: CacheEvent) -> None:
        if self.is_cut:
            return
        match event:
            case events.BlockStored(group=0):
                self.index.store(self.slot, map(short, event.block_hashes))
            case events.BlockRemoved(group=0):
                self.index.remove(self.slot, map(short, event.block_hashes))
            case events.AllBlocksCleared(group=0):
                self.index.clear(self.slot)
            case _:
                return
        self.seen[type(event).__name__] += 1

    def mend(self) -> None:
        self.is_cut = False
        self.index.replace(self.slot, self.cached())
        self.seen["snapshot"] += 1

    def cached(self) -> set[int]:
        """What the manager's own index holds."""
        return {short(cached.digest) for cached in self.state.manager.indexes[0].by_block.values()}


def drive(seed: int, steps: int) -> Counter[str]:
    """Random requests on three managers, each with lost events now and then. Returns what happened how often."""
    rng, index = random.Random(seed), FleetIndex()
    wires = []
    for slot in (0, 5, 200):
        sizes = {"num_blocks": rng.choice([12, 30, 60]), "block_size": 4, "num_host_blocks": 10, "caching": True}
        wires.append(Wire(Machine(GROUPS[seed % len(GROUPS)], **sizes), index, slot))
    for _ in range(steps):
        wire = rng.choice(wires)
        wire.state.step(rng)
        if rng.random() < 0.005:
            wire.state.manager.reset_prefix_cache()
        if wire.is_cut and rng.random() < 0.2:
            wire.mend()
        elif rng.random() < 0.01:
            wire.is_cut = True
        for one in wires:
            if not one.is_cut:
                assert index.num_held(one.slot) == len(one.state.manager.indexes[0])
        if not wire.is_cut:
            assert index._held.get(wire.slot, set()) == wire.cached()
    index.audit()
    for wire in wires:
        wire.mend()
        for request in wire.state.requests:  # what the manager would find, with one group and no window
            manager = wire.state.manager
            digests = [short(manager.lookup.digest(request, i)) for i in range(manager.lookup.num_reusable(request))]
            found = index.runs(digests).get(wire.slot, 0)
            if manager.groups[0].window is None and len(manager.groups) == 1:
                assert found == manager.lookup.match(request).num_blocks
                wire.seen["matched"] += found > 0
    return sum((wire.seen for wire in wires), Counter())


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(3))
def test_events_and_snapshots_make_the_index_what_the_caches_are(shard: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(shard, 12, 3):
        seen += drive(seed, 1_500)
    for what in ("BlockStored", "BlockRemoved", "AllBlocksCleared", "snapshot"):
        assert seen[what] > 10, what
    if shard == 0:
        assert seen["matched"] > 0


@pytest.mark.slow
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50, unique=True), st.data())
def test_one_walk_serves_all_replicas(digests: list[int], data: st.DataObject) -> None:
    depths = data.draw(st.dictionaries(st.integers(0, MAX_SLOTS - 1), st.integers(1, len(digests)), max_size=20))
    index = FleetIndex()
    for slot, depth in depths.items():
        index.store(slot, digests[:depth])
    assert index.runs(digests) == depths


@pytest.mark.slow
@given(st.lists(st.tuples(SLOTS, DIGESTS), max_size=6), st.lists(st.tuples(SLOTS, DIGESTS), max_size=6), DIGESTS)
def test_a_run_goes_on_in_another_index(
    held: list[tuple[int, list[int]]], elsewhere: list[tuple[int, list[int]]], digests: list[int]
) -> None:
    indexes, both = (FleetIndex(), FleetIndex()), dict[int, set[int]]()
    for index, stored in zip(indexes, (held, elsewhere), strict=True):
        for slot, those in stored:
            index.store(slot, those)
            both.setdefault(slot, set()).update(those)
    wanted = {slot: leading(digests, those) for slot, those in both.items()}
    assert indexes[0].runs(digests, indexes[1]) == {slot: count for slot, count in wanted.items() if count}
    assert indexes[0].held_runs(digests, indexes[1]) == indexes[0].runs(digests, indexes[1])
