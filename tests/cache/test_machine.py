"""The block manager under random operations: every request always reads its own tokens, and every audit holds."""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quire.cache.groups import StateGroup, StatePools
from tests.cache.machine import GROUPS, Machine, operate
from tests.marks import quick

pytestmark = pytest.mark.slow

SEEDS, STEPS, LONG_STEPS = 40, 5_000, 25_000  # the long ones make a million operations

DISK_SEEDS, DISK_STEPS = 24, 2_500

PICK = st.integers(0, 10_000)


class ManagerMachine(RuleBasedStateMachine):
    """The same operations, chosen and shrunk by hypothesis, with an audit after each."""

    @initialize(
        groups=st.sampled_from(GROUPS),
        num_blocks=st.integers(1, 24),
        block_size=st.integers(1, 5),
        num_host_blocks=st.integers(0, 12),
        caching=st.booleans(),
        pools=st.builds(StatePools, st.integers(0, 9), st.integers(0, 6), st.integers(0, 4)),
    )
    def start(self, groups, num_blocks: int, block_size: int, num_host_blocks: int, caching: bool, pools) -> None:
        if any(isinstance(group, StateGroup) for group in groups):
            block_size = {3: 1, 5: 4}.get(block_size, block_size)  # pieces of 4 and 8 tokens are whole blocks
        self.state = Machine(groups, num_blocks, block_size, num_host_blocks, caching, pools)

    @rule(
        family=st.integers(0, 3),
        length=st.integers(1, 20),
        salt=st.sampled_from(["", "other"]),
        kept=st.sampled_from([0, 1, 5]),
    )
    def add(self, family: int, length: int, salt: str, kept: int) -> None:
        self.state.add(family, length, salt, kept)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.state.manager.begin_step(self.state.manager.now + seconds)

    @precondition(lambda self: self.state.running)
    @rule(pick=PICK, token=st.integers(0, 3))
    def append(self, pick: int, token: int) -> None:
        self.state.append(self.state.running[pick % len(self.state.running)], token)

    @precondition(lambda self: self.state.running)
    @rule(pick=PICK, most=st.integers(1, 8))
    def compute(self, pick: int, most: int) -> None:
        self.state.compute(self.state.running[pick % len(self.state.running)], most)

    @precondition(lambda self: self.state.running)
    @rule(pick=PICK, count=st.integers(1, 7))
    def guess(self, pick: int, count: int) -> None:
        self.state.guess(self.state.running[pick % len(self.state.running)], count)

    @precondition(lambda self: self.state.running)
    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        self.state.fork(self.state.running[pick % len(self.state.running)])

    @precondition(lambda self: self.state.running)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        self.state.release(self.state.running[pick % len(self.state.running)])

    @precondition(lambda self: self.state.running)
    @rule(pick=PICK)
    def swap_out(self, pick: int) -> None:
        self.state.swap_out(self.state.running[pick % len(self.state.running)])

    @precondition(lambda self: self.state.swapped)
    @rule(pick=PICK)
    def swap_in(self, pick: int) -> None:
        self.state.swap_in(pick % len(self.state.swapped))

    @precondition(lambda self: self.state.swapped)
    @rule(pick=PICK)
    def drop(self, pick: int) -> None:
        self.state.drop(pick % len(self.state.swapped))

    @rule()
    def reset(self) -> None:
        self.state.manager.reset_prefix_cache()

    @invariant()
    def audit(self) -> None:
        if hasattr(self, "state"):
            self.state.audit()

    def teardown(self) -> None:
        if hasattr(self, "state"):
            self.state.end()


def test_operations_that_hypothesis_draws(long: bool) -> None:
    count = 450 if long else 25
    run_state_machine_as_test(ManagerMachine, settings=settings(max_examples=count, stateful_step_count=50))


@pytest.mark.parametrize("shard", quick(range(5), 1, 1))
def test_random_operations(shard: int, long: bool) -> None:
    seen: dict[str, int] = {}
    for seed in range(shard * SEEDS // 5, (shard + 1) * SEEDS // 5):
        for what, times in operate(seed, LONG_STEPS if long else STEPS, audit_every=1_000).seen.items():
            seen[what] = seen.get(what, 0) + times
    for what in ("states hit", "parted", "guessed", "kept", "scores found"):
        assert seen[what] > 10, what
    assert seen["states kept"] > 0  # rare: they take only what no request needs
    for what in ("hit", "copied", "forked", "short", "swapped out", "host full", "swapped in", "found again", "reset"):
        assert seen[what] > 10, what


@pytest.mark.parametrize("shard", quick([1, 0, 2, 3], 1, 1))
def test_random_operations_beside_a_disk(shard: int, long: bool, tmp_path: Path) -> None:
    """What comes back from a disk is what was computed, whatever its threads, faults and restarts do meanwhile."""
    seen: dict[str, int] = {}
    for seed in range(shard, DISK_SEEDS, 4):
        (directory := tmp_path / str(seed)).mkdir()
        state = operate(seed, LONG_STEPS if long else DISK_STEPS, 500, directory)
        for what, times in state.seen.items():
            seen[what] = seen.get(what, 0) + times
    for what in ("written", "read", "given away before", "found on the disk", "damage seen"):
        assert seen[what] > 10, what
    assert seen["not waited for"] > 0
