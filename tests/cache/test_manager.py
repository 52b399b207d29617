"""BlockManager: growth on demand, several groups, usage and audit."""

from array import array

import pytest

from quire.cache.manager import BlockManager, CacheGroup
from quire.errors import BadValue
from quire.request import Request, SamplingParams

GROUPS = {"one group": (CacheGroup((0, 1)),), "two groups": (CacheGroup((0,)), CacheGroup((1,), window=8))}


def request(name: str = "r") -> Request:
    return Request(name, array("i", [1]), 1, SamplingParams())


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_request_owns_exactly_the_blocks_it_needs(groups: tuple[CacheGroup, ...], block_size: int) -> None:
    manager, r = BlockManager(groups, 40, block_size, 8), request()
    for num_tokens in range(1, 40):
        assert manager.grow(r, num_tokens)
        r.num_computed = num_tokens
        manager.trim(r)
        assert [len(table) for table in r.block_ids] == [-(-num_tokens // block_size)] * len(groups)
        usage = manager.usage([r])
        given_back = sum(r.num_given_back) * block_size
        assert usage.filled_slots == num_tokens * len(groups) - given_back
        assert 0 <= usage.wasted_slots < block_size * len(groups)  # at most one partly filled block a group
        manager.audit([r])
    manager.release(r)
    assert manager.usage([]).used_blocks == 0
    manager.audit([r])


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_growth_that_does_not_fit_takes_nothing(groups: tuple[CacheGroup, ...]) -> None:
    manager, a, b = BlockManager(groups, 4, 2, 8), request("a"), request("b")
    assert manager.grow(a, 5)
    assert not manager.grow(b, 3)
    assert b.block_ids == []
    assert manager.usage([a]).used_blocks == 3 * len(groups)
    assert manager.grow(b, 2)
    manager.audit([a, b])


def test_the_seeds_block_counts() -> None:
    """150, 500 and 2,000 tokens in blocks of 16."""
    manager = BlockManager(GROUPS["one group"], 1, 16, 8)
    assert [manager.blocks_for(n) for n in (0, 1, 15, 16, 17, 150, 500, 2000)] == [0, 1, 1, 1, 2, 10, 32, 125]


def test_audit_sees_a_request_with_too_few_blocks() -> None:
    manager, r = BlockManager(GROUPS["one group"], 4, 2, 8), request()
    manager.grow(r, 2)
    r.num_computed = 3
    with pytest.raises(BadValue, match="request r has computed 3 tokens, but owns 1 blocks of 2 in cache group 0"):
        manager.audit([r])


@pytest.mark.parametrize("block_size", [1, 3, 8, 16])
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 40])
def test_a_windowed_group_gives_back_what_no_later_row_sees(block_size: int, window: int) -> None:
    groups = (CacheGroup((0,)), CacheGroup((1,), window))
    manager, r = BlockManager(groups, 100, block_size, max_growth=5), request()
    while r.num_computed < 90:
        step = 1 + r.num_computed % 5
        assert manager.grow(r, r.num_computed + step)
        assert len(manager.owned(r, 1)) <= manager.most_blocks(90 + 5, 5, groups[1])
        r.num_computed += step
        manager.trim(r)
        manager.audit([r])
        first_key = max(0, r.num_computed - window + 1)  # that the next row sees
        assert r.num_given_back == [0, first_key // block_size]
        assert len(manager.owned(r, 0)) == -(-r.num_computed // block_size)
        table = r.block_ids[1]
        assert manager.owned(r, 1).tolist() == table[first_key // block_size :].tolist()
    usage = manager.usage([r])
    assert usage.filled_slots == 2 * r.num_computed - r.num_given_back[1] * block_size
    assert 0 <= usage.wasted_slots < 2 * block_size
    manager.release(r)
    assert manager.usage([]).used_blocks == 0


def test_audit_sees_blocks_given_back_too_early() -> None:
    manager, r = BlockManager((CacheGroup((0,), window=4),), 9, 2, 8), request()
    manager.grow(r, 10)
    r.num_computed = 8
    manager.trim(r)
    assert r.num_given_back == [2]
    manager.audit([r])
    manager.pools[0].release(r.block_ids[0][2:3])
    r.num_given_back = [3]
    with pytest.raises(BadValue, match=r"gave 3 blocks of 2 back .* sees the keys from 5 on"):
        manager.audit([r])
