"""BlockPool: reference counts and the free order."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.cache.pool import BlockPool
from quire.errors import BadValue, OutOfBlocks


def test_blocks_worth_keeping_are_reused_last_and_in_the_order_in_which_they_were_freed() -> None:
    pool = BlockPool(6)
    assert pool.allocate(5).tolist() == [0, 1, 2, 3, 4]
    pool.release([2, 3], keep={2})
    pool.release([0, 1], keep={0, 1})
    assert pool.allocate(5).tolist() == [3, 5, 2, 0, 1]


def test_what_nobody_will_reuse_goes_first() -> None:
    pool = BlockPool(3)
    pool.release(pool.allocate(3), keep={0, 1, 2})
    pool.drop([1])
    assert pool.allocate(3).tolist() == [1, 0, 2]


def test_audit_sees_an_empty_block_after_one_worth_keeping() -> None:
    pool = BlockPool(2)
    pool.audit([], keep={1})
    with pytest.raises(BadValue, match="can be reused comes before an empty one"):
        pool.audit([], keep={0})


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert (pool.num_free, pool.num_used) == (2, 0)


def test_sharing_a_free_block_takes_it_out_of_the_free_order() -> None:
    pool = BlockPool(3)
    pool.share([1])
    assert pool.allocate(2).tolist() == [0, 2]


def test_too_few_blocks_take_none() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks, match=r"2 KV blocks .* 1 of 3 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


@pytest.mark.parametrize("block", [-1, 3, 1])
def test_releasing_what_nobody_owns_is_an_error(block: int) -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(BadValue, match=str(block)):
        pool.release([block])


def test_audit_finds_every_kind_of_wrong_book() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.audit([table])
    with pytest.raises(BadValue, match="block 1 has a reference count of 1, but is in 0 tables"):
        pool.audit([table[:1]])
    with pytest.raises(BadValue, match="block 0 has a reference count of 1, but is in 2 tables"):
        pool.audit([table, table[:1]])
    pool._free[0] = None
    with pytest.raises(BadValue, match="block 0 has 1 owners and is in the free order"):
        pool.audit([table])
    del pool._free[0]
    del pool._free[2]
    with pytest.raises(BadValue, match="block 2 has 0 owners and is not in the free order"):
        pool.audit([table])


def test_reserved_blocks_are_given_out_last_the_latest_first() -> None:
    pool = BlockPool(5)
    taken = pool.allocate(1)
    pool.reserve([0, 2, 1, 4])  # 0 has an owner
    pool.unreserve([4])
    assert list(pool.next_free(5)) == [3, 4, 1, 2]
    assert (pool.num_free, pool.num_unreserved, pool.num_used) == (4, 2, 1)
    pool.audit([taken], keep={1, 2})
    with pytest.raises(BadValue, match="can be reused comes before an empty one"):
        pool.audit([taken], keep={4})
    pool.share([2])
    pool.release([2], keep={2})
    assert [pool.in_order(i) for i in (1, 2, 3, 4)] == [3, 4, 2, 1]
    assert pool.allocate(3).tolist() == [3, 4, 2]
    pool.drop([1])
    assert (pool.num_unreserved, pool.allocate(1).tolist()) == (1, [1])


class PoolMachine(RuleBasedStateMachine):
    """Random allocations, shares and releases against a plain list as the model. The odd blocks are worth keeping."""

    KEEP = frozenset({1, 3, 5})

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.free = list(range(7))
        self.owned: list[int] = []  # an entry for each owner

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        assert self.pool.allocate(count).tolist() == self.free[:count]
        self.owned += self.free[:count]
        del self.free[:count]

    @rule(block=st.integers(0, 6))
    def share(self, block: int) -> None:
        self.pool.share([block])
        self.owned.append(block)
        if block in self.free:
            self.free.remove(block)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.release([block], self.KEEP)
        if block not in self.owned:
            self.free.insert(len(self.free) if block in self.KEEP else 0, block)

    @invariant()
    def agrees(self) -> None:
        self.pool.audit([self.owned])
        assert list(self.pool._free) == self.free
        assert Counter(self.owned) == Counter({b: c for b, c in enumerate(self.pool.ref_counts) if c})


PoolMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestPoolMachine = pytest.mark.slow(PoolMachine.TestCase)
