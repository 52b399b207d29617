"""BlockManager: growth on demand, sharing, copies on write, swapping, usage and audit."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cache.audit import audit
from quire.cache.events import BlockRemoved, BlockStored, CacheEvent
from quire.cache.groups import CacheGroup
from quire.cache.manager import BlockManager, Move
from quire.cache.usage import cache_usage
from quire.errors import BadValue, OutOfBlocks
from quire.request import Request, SampleGroup, SamplingParams

GROUPS = {"one group": (CacheGroup((0, 1)),), "two groups": (CacheGroup((0,)), CacheGroup((1,), window=8))}
ONE = GROUPS["one group"]


def started(manager: BlockManager, tokens: list[int], name: str = "r") -> Request:
    """A request that has what the cache gave it, and nothing else yet."""
    request = Request(name, array("i", tokens), len(tokens), SamplingParams())
    request.group = SampleGroup([request])
    manager.admit(request, manager.lookup.match(request))
    return request


def computed(manager: BlockManager, tokens: list[int], name: str = "r", copies: list[Move] | None = None) -> Request:
    """A request all of whose tokens are computed."""
    request = started(manager, tokens, name)
    compute(manager, request, copies)
    return request


def compute(manager: BlockManager, request: Request, copies: list[Move] | None = None) -> None:
    assert manager.grow(request, len(request.tokens), [] if copies is None else copies)
    manager.advance(request, request.num_missing)


def forked(manager: BlockManager, parent: Request, token: int, name: str) -> Request:
    child = Request(name, parent.tokens + array("i", [token]), parent.num_prompt, SamplingParams(), group=parent.group)
    parent.group.members.append(child)
    manager.fork(parent, child)
    return child


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_request_owns_exactly_the_blocks_it_needs(groups: tuple[CacheGroup, ...], block_size: int) -> None:
    manager = BlockManager(groups, 40, block_size, 8)
    r = started(manager, [1] * 40)
    for num_tokens in range(1, 40):
        assert manager.grow(r, num_tokens, [])
        manager.advance(r, 1)
        assert [len(table) for table in r.cache.block_ids] == [-(-num_tokens // block_size)] * len(groups)
        usage = cache_usage(manager, [r])
        given_back = sum(r.cache.num_freed) * block_size
        assert usage.filled_slots == num_tokens * len(groups) - given_back
        assert 0 <= usage.wasted_slots < block_size * len(groups)  # at most one partly filled block a group
        audit(manager, [r])
    manager.release(r)
    assert cache_usage(manager, []).used_blocks == 0
    audit(manager, [r])


@pytest.mark.slow
@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_blocks_given_out_at_once_are_those_given_out_in_turns(takers: list[int]) -> None:
    """Also where the free blocks are some that must be evicted: nine of twelve hold what somebody computed before."""
    found = []
    for at_once in (False, True):
        manager = BlockManager((CacheGroup((0,)), CacheGroup((1,))), 18, 2, 8)
        removed: list[tuple[int, int]] = []
        manager.release(computed(manager, [7] * 18))
        requests = [started(manager, [i + 1] * 4, f"r{i}") for i in range(3)]
        for one in requests:
            one.group = None
            compute(manager, one)
        manager.listeners.append(
            lambda one, to=removed: to.extend((one.group, block) for block in one.blocks) if is_removal(one) else None
        )
        assert manager.evicts(4)
        assert not manager.evicts(3)
        if at_once:
            assert manager.grow_each([requests[i] for i in takers], [float(time) for time in range(len(takers))])
        else:
            for time, i in enumerate(takers):
                manager.now = float(time)
                assert manager.grow(requests[i], requests[i].cache.room + 1, [])
        audit_books(manager, requests)
        found.append(
            ([one.cache.block_ids for one in requests], [one.cache.room for one in requests], sorted(removed),
             [list(pool._free) for pool in manager.pools],
             [dict(index._evicted) for index in manager.indexes], manager.num_evicted)
        )  # fmt: skip
    assert found[0] == found[1]
    assert found[0][-1] == 2 * max(0, len(takers) - 3)


def test_blocks_stored_and_evicted_at_once_are_one_event() -> None:
    manager, heard = BlockManager(ONE, 4, 2, 8), list[CacheEvent]()
    manager.listeners.append(heard.append)
    one = computed(manager, [5, 6, 7, 8, 9])
    (stored,) = [event for event in heard if isinstance(event, BlockStored)]
    assert stored.blocks == list(one.cache.block_ids[0][:2])
    assert stored.block_hashes == one.cache.digests[1:3]
    assert (stored.parent_block_hash, stored.token_ids) == (None, [5, 6, 7, 8])
    one.tokens.extend([10, 11])
    compute(manager, one)
    later = heard[-1]
    assert isinstance(later, BlockStored)
    assert (later.blocks, later.parent_block_hash, later.token_ids) == (
        [one.cache.block_ids[0][2]], one.cache.digests[2], [9, 10],
    )  # fmt: skip
    manager.release(one)
    other = started(manager, [1] * 8, "other")
    assert manager.grow(other, 8, [])
    (removed,) = [event for event in heard if isinstance(event, BlockRemoved)]
    assert sorted(removed.blocks) == sorted(stored.blocks + later.blocks)
    assert {*removed.block_hashes} == {*one.cache.digests[1:4]}
    assert manager.num_evicted == 3


def is_removal(event: CacheEvent) -> bool:
    return isinstance(event, BlockRemoved)


def audit_books(manager: BlockManager, requests: list[Request]) -> None:
    """As `audit`, of requests that have more room than tokens."""
    for g, (pool, index) in enumerate(zip(manager.pools, manager.indexes, strict=True)):
        pool.audit([one.cache.block_ids[g] for one in requests], index.by_block)


def test_blocks_that_are_not_there_are_given_to_nobody() -> None:
    manager = BlockManager(ONE, 3, 2, 8)
    one, other = (started(manager, [i] * 2, f"r{i}") for i in range(2))
    for request in (one, other):
        compute(manager, request)
    assert not manager.grow_each([one, other])
    assert [one.cache.room, other.cache.room, manager.pools[0].num_free] == [2, 2, 1]
    assert manager.grow_each([other])


def test_the_seeds_block_counts() -> None:
    """150, 500 and 2,000 tokens in blocks of 16."""
    manager = BlockManager(ONE, 1, 16, 8)
    assert [manager.groups[0].count(n, 16) for n in (0, 1, 15, 16, 17, 150, 500, 2000)] == [0, 1, 1, 1, 2, 10, 32, 125]


class TestForks:
    def test_the_seeds_three_beams_take_6_blocks_and_not_12(self) -> None:
        manager = BlockManager(ONE, 12, 4, 99)
        copies: list[Move] = []
        beams = [computed(manager, list(range(12)), "beam 1")]
        beams += [forked(manager, beams[0], token, f"beam {token}") for token in (2, 3)]
        beams[0].tokens.append(1)
        usage = cache_usage(manager, beams)
        assert (usage.used_blocks, usage.logical_blocks) == (3, 9)
        for beam in beams:
            compute(manager, beam, copies)
        usage = cache_usage(manager, beams)
        assert (usage.used_blocks, usage.logical_blocks) == (6, 12)
        assert usage.shared_slots == 6 * 4
        assert usage.wasted_slots == 3 * 3
        assert copies == []  # the shared blocks are full: nobody writes into them
        assert [manager.pools[0].ref_counts[b] for b in beams[0].cache.block_ids[0]] == [3, 3, 3, 1]
        audit(manager, beams)

    def test_a_partly_filled_last_block_is_copied_for_each_beam_but_the_last(self) -> None:
        manager = BlockManager(ONE, 12, 4, 99)
        copies: list[Move] = []
        beams = [computed(manager, list(range(10)), "beam 1")]
        beams += [forked(manager, beams[0], token, f"beam {token}") for token in (2, 3)]
        beams[0].tokens.append(1)
        open_block = beams[0].cache.block_ids[0][2]
        for beam in beams:
            compute(manager, beam, copies)
        assert copies == [
            Move(0, open_block, beams[0].cache.block_ids[0][2]),
            Move(0, open_block, beams[1].cache.block_ids[0][2]),
        ]
        assert beams[2].cache.block_ids[0][2] == open_block  # nobody else has it any more
        assert cache_usage(manager, beams).used_blocks == 2 + 3
        compute_again = len(copies)
        for beam in beams:
            beam.tokens.append(7)
            compute(manager, beam, copies)
        assert len(copies) == compute_again
        audit(manager, beams)

    def test_a_copy_needs_a_free_block(self) -> None:
        manager = BlockManager(ONE, 3, 4, 99)
        copies: list[Move] = []
        parent = computed(manager, list(range(10)), "parent")
        child = forked(manager, parent, 5, "child")
        assert not manager.grow(child, 11, copies)
        assert copies == []
        manager.release(parent)
        assert manager.grow(child, 11, copies)
        assert copies == []

    def test_a_child_that_begins_with_the_prompt_computes_its_last_row_and_writes_nothing(self) -> None:
        manager = BlockManager(GROUPS["two groups"], 12, 4, 99)
        parent = started(manager, list(range(10)), "parent")
        assert manager.grow(parent, 10, [])
        child = Request("child", array("i", range(10)), 10, SamplingParams(), group=parent.group)
        manager.fork(parent, child)
        manager.advance(parent, 10)
        assert (child.cache.num_computed, child.cache.num_cached) == (9, 10)
        copies: list[Move] = []
        assert manager.grow(child, 10, copies)
        assert copies == []
        manager.advance(child, 1)
        audit(manager, [parent, child])


class TestSwapping:
    def test_siblings_share_on_the_host_what_they_share_on_the_device(self) -> None:
        manager = BlockManager(ONE, 12, 4, 99, num_host_blocks=5)
        beams = [computed(manager, list(range(10)), "beam 1")]
        beams.append(forked(manager, beams[0], 2, "beam 2"))
        compute(manager, beams[1])
        moves = manager.swap_out(beams)
        assert moves is not None
        assert len(moves) == 4
        assert manager.pools[0].num_free == 12
        assert manager.host_pools[0].num_free == 1
        assert cache_usage(manager, beams).host_blocks == 4
        audit(manager, beams)
        [other] = [started(manager, list(range(100, 148)), "other")]  # takes all blocks, so that nothing stays cached
        assert manager.grow(other, 48, [])
        manager.release(other)
        moves = manager.swap_in(beams)
        assert len(moves) == 4
        assert cache_usage(manager, beams).used_blocks == 4
        assert manager.host_pools[0].num_free == 5
        audit(manager, beams)

    def test_what_still_stands_in_the_cache_is_shared_and_not_moved(self) -> None:
        manager = BlockManager(ONE, 12, 4, 99, num_host_blocks=5)
        r = computed(manager, list(range(10)))
        assert manager.swap_out([r]) is not None
        before = manager.needed_to_swap_in([r])
        other = computed(manager, list(range(9)), "other")
        assert manager.needed_to_swap_in([r]) == [before[0] - 2]  # the other holds them
        assert [(move.src, move.dst) for move in manager.swap_in([r])] == [(2, r.cache.block_ids[0][2])]
        assert r.cache.block_ids[0][:2] == other.cache.block_ids[0][:2]
        audit(manager, [r, other])

    def test_a_full_host_does_nothing(self) -> None:
        manager = BlockManager(ONE, 12, 4, 99, num_host_blocks=2)
        r = computed(manager, list(range(10)))
        assert manager.swap_out([r]) is None
        assert manager.host_pools[0].num_free == 2
        audit(manager, [r])


@pytest.mark.parametrize("which", ["pools", "host_pools"])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_allocation_that_fails_has_taken_nothing(which: str, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either of two groups, while growing, swapping out and swapping in."""
    manager = BlockManager(GROUPS["two groups"], 12, 4, 99, num_host_blocks=9)
    r = computed(manager, list(range(10)))

    def broken(count: int) -> array:  # type: ignore[type-arg]
        raise OutOfBlocks("injected")

    r.tokens.extend(range(20))
    monkeypatch.setattr(getattr(manager, which)[failing], "allocate", broken)
    if which == "host_pools":
        with pytest.raises(OutOfBlocks, match="injected"):
            manager.swap_out([r])
    else:
        with pytest.raises(OutOfBlocks, match="injected"):
            manager.grow(r, 30, [])
        audit(manager, [r])
        assert manager.swap_out([r]) is not None
        with pytest.raises(OutOfBlocks, match="injected"):
            manager.swap_in([r])
    audit(manager, [r])
    monkeypatch.undo()
    if r.cache.host_block_ids:
        manager.swap_in([r])
    assert manager.grow(r, 30, [])
    audit(manager, [r])


def test_audit_sees_a_request_with_too_few_blocks() -> None:
    manager = BlockManager(ONE, 4, 2, 8)
    r = computed(manager, [1, 2])
    r.cache.num_computed = 3
    with pytest.raises(
        BadValue, match="request r has computed 3 tokens, but has not all blocks of 2 tokens for them in cache group 0"
    ):
        audit(manager, [r])


def test_audit_sees_a_reusable_block_with_other_tokens() -> None:
    manager = BlockManager(ONE, 4, 2, 8)
    r = computed(manager, [1, 2])
    r.tokens[0] = 5
    with pytest.raises(BadValue, match="block 0 is reusable for other tokens than those of its owner, request r"):
        audit(manager, [r])


def test_audit_sees_an_open_block_that_strangers_share() -> None:
    manager = BlockManager(ONE, 4, 4, 8)
    a = computed(manager, [1, 2], "a")
    b = forked(manager, a, 3, "b")
    a.group = None
    with pytest.raises(BadValue, match="block 0 of request a is shared, but neither full nor a sibling's"):
        audit(manager, [a, b])


def test_a_fork_that_needs_what_the_parent_gave_back_is_refused() -> None:
    manager = BlockManager((CacheGroup((0,), window=4),), 20, 4, 99)
    parent = computed(manager, list(range(11)))
    assert parent.cache.num_freed == [2]  # the row after these tokens sees the keys from 8 on
    child = Request("child", array("i", range(11)), 11, SamplingParams(), group=parent.group)
    with pytest.raises(BadValue, match="child needs blocks of r that it freed; give it one more token"):
        manager.fork(parent, child)
    assert not child.cache.block_ids
    child.tokens.append(5)
    manager.fork(parent, child)
    parent.group.members.append(child)
    audit(manager, [parent, child])


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 3, 8, 16])
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 40])
def test_a_windowed_group_gives_back_what_no_later_row_sees(block_size: int, window: int) -> None:
    groups = (CacheGroup((0,)), CacheGroup((1,), window))
    manager = BlockManager(groups, 100, block_size, max_growth=5)
    r = started(manager, [1] * 100)
    while r.cache.num_computed < 90:
        step = 1 + r.cache.num_computed % 5
        assert manager.grow(r, r.cache.num_computed + step, [])
        assert len(manager.owned(r, 1)) <= manager.most_blocks(90 + 5, 5, 1)
        manager.advance(r, step)
        audit(manager, [r])
        first_key = max(0, r.cache.num_computed - window + 1)  # that the next row sees
        assert r.cache.num_freed == [0, first_key // block_size]
        assert len(manager.owned(r, 0)) == -(-r.cache.num_computed // block_size)
        table = r.cache.block_ids[1]
        assert manager.owned(r, 1).tolist() == table[first_key // block_size :].tolist()
    usage = cache_usage(manager, [r])
    assert usage.filled_slots == 2 * r.cache.num_computed - r.cache.num_freed[1] * block_size
    assert 0 <= usage.wasted_slots < 2 * block_size
    manager.release(r)
    assert cache_usage(manager, []).used_blocks == 0


def test_audit_sees_blocks_given_back_too_early() -> None:
    manager = BlockManager((CacheGroup((0,), window=4),), 9, 2, 8)
    r = computed(manager, list(range(8)))
    assert r.cache.num_freed == [2]
    audit(manager, [r])
    manager.pools[0].release(r.cache.block_ids[0][2:3], manager.indexes[0].by_block)
    r.cache.num_freed = [3]
    with pytest.raises(BadValue, match=r"freed 3 blocks of 2 in .* next row needs those from 2 on"):
        audit(manager, [r])
