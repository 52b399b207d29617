"""Groups of states and of rows: what is stored, kept for others, shared, copied and explained."""

from array import array

import pytest

from quire.cache.audit import audit
from quire.cache.events import BlockRemoved, BlockStored, CacheEvent
from quire.cache.groups import CacheGroup, RowGroup, StateGroup, StatePools
from quire.cache.lookup import Match
from quire.cache.manager import BlockManager, Move
from quire.cache.pool import NONE
from quire.cache.sizing import BlockBytes, choose_host_pools, choose_pools
from quire.cache.usage import cache_usage, state_usage
from quire.config import CacheConfig
from quire.errors import BadValue, ConfigError, RequestError
from quire.request import Miss, Request, SampleGroup, SamplingParams

PIECE = 8
GROUPS = (CacheGroup((0,)), StateGroup((1,), piece=PIECE), RowGroup((1,), piece=PIECE))


def manager_of(states: int = 20, rows: int = 8, interval: int = 64, **options: object) -> BlockManager:
    pools = StatePools(states, rows, 4)
    return BlockManager(
        GROUPS, 200, 4, 99, num_host_blocks=50, state_pools=pools, state_snapshot_interval=interval, **options
    )


def started(manager: BlockManager, tokens: list[int], name: str = "r", salt: str = "") -> Request:
    request = Request(name, array("i", tokens), len(tokens), SamplingParams(), cache_salt=salt)
    manager.admit(request, manager.lookup.match(request))
    return request


def compute(manager: BlockManager, request: Request, end: int | None = None) -> list[Move]:
    """Up to that token, in one step."""
    copies: list[Move] = []
    start, end = request.cache.num_computed, len(request.tokens) if end is None else end
    assert manager.grow(request, end, copies)
    manager.keep_states(request, start, end)
    manager.advance(request, end - start)
    return copies


def computed(manager: BlockManager, tokens: list[int], name: str = "r", salt: str = "") -> Request:
    request = started(manager, tokens, name, salt)
    compute(manager, request)
    return request


def kept(manager: BlockManager) -> int:
    return len(manager.indexes[1].by_block)


@pytest.mark.parametrize("step", [1, 3, 7, 8, 9, 30])
def test_a_request_owns_the_state_before_its_piece_and_the_rows_of_an_open_one(step: int) -> None:
    manager = manager_of()
    r = started(manager, list(range(100)))
    for start in range(0, 100, step):
        compute(manager, r, end := min(100, start + step))
        audit(manager, [r])
        assert [len(manager.owned(r, g)) for g in (1, 2)] == [end >= PIECE, end % PIECE > 0]
        assert r.cache.num_freed[1:] == [max(0, end // PIECE - 1), end // PIECE]
    states, rows = state_usage(manager, [r])
    assert (states.used_blocks, states.wasted_slots, rows.used_blocks, rows.wasted_slots) == (1, 0, 1, PIECE - 4)
    assert cache_usage(manager, [r]).used_blocks == 25
    manager.release(r)
    assert all(pool.num_used == 0 for pool in manager.pools)


def test_a_step_stores_the_last_state_and_those_that_others_may_begin_at() -> None:
    manager = manager_of(interval=16)
    r = started(manager, list(range(60)))
    assert manager.grow(r, 50, [])
    assert r.cache.block_ids[1].tolist().count(NONE) == 5
    manager.keep_states(r, 0, 50)
    there = [(i + 1) * PIECE for i, block in enumerate(r.cache.block_ids[1]) if block != NONE]
    assert there == [16, 32, 48]
    manager.advance(r, 50)
    assert len(manager.owned(r, 1)) == 1
    assert kept(manager) == 3
    compute(manager, r, 59)
    assert kept(manager) == 4  # at 56, the last whole piece before the prompt's end
    r.tokens.extend(range(60, 70))
    compute(manager, r)
    assert kept(manager) == 5  # at 64
    r.tokens.extend(range(70, 100))
    compute(manager, r, 75)
    assert kept(manager) == 6  # at 72, where it is
    compute(manager, r, 80)
    assert kept(manager) == 6  # 80 in place of 72, at which no other is likely to begin
    manager.release(r)
    assert kept(manager) == 6  # its last state stays


def test_states_that_are_kept_yield_to_those_that_are_needed() -> None:
    manager = manager_of(states=3, interval=8)
    r = started(manager, list(range(60)))
    compute(manager, r, 50)
    assert kept(manager) == 3  # of six
    a, b = started(manager, [7] * 9, "a"), started(manager, [8] * 9, "b")
    compute(manager, a)
    compute(manager, b)
    audit(manager, [r, a, b])
    assert not manager.grow(r, 56, [])
    assert manager.pools[1].num_free == 0
    manager.release(a)
    assert manager.grow(r, 56, [])


def test_a_hit_ends_at_the_deepest_state() -> None:
    manager = manager_of(interval=16)
    manager.release(computed(manager, list(range(60)), "a"))
    for length, cached in ((100, 56), (60, 56), (57, 56), (56, 48), (50, 48), (48, 32), (33, 32), (16, 0), (17, 16)):
        request = Request("b", array("i", range(length)), length, SamplingParams())
        match = manager.lookup.match(request)
        assert match.num_blocks * 4 == cached, length
        assert [len(blocks) for blocks in match.blocks] == [cached // 4, cached > 0, 0]
    b = started(manager, list(range(100)), "b")
    assert b.cache.num_computed == b.cache.num_cached == 56
    audit(manager, [b])
    compute(manager, b)


def test_where_prefixes_part_a_state_stays() -> None:
    manager = manager_of(interval=64)
    stem = list(range(45))
    manager.release(computed(manager, [*stem, *[90] * 30], "a"))
    b = started(manager, [*stem, *[91] * 30], "b")
    assert (b.cache.num_cached, manager.parted_at(b)) == (0, 40)
    assert (b.cache.prefix_report.miss, b.cache.prefix_report.reach) == (Miss.STATE, 44)
    assert "0 of 75 prompt tokens were cached, of 72 in full blocks: the state at token 40 was not kept" in str(
        b.cache.prefix_report
    )
    compute(manager, b)
    c = started(manager, [*stem, *[92] * 30], "c")
    assert (c.cache.num_cached, manager.parted_at(c)) == (40, 40)
    assert (c.cache.prefix_report.miss, c.cache.prefix_report.first_difference) == (Miss.DIFFERS, 45)


def test_a_miss_says_that_a_state_was_evicted() -> None:
    manager = manager_of(states=3, interval=64)
    manager.release(computed(manager, list(range(40)), "a"))
    manager.now = 2.0
    for i in range(3):
        manager.release(computed(manager, [50 + i] * 12, f"b{i}"))
    manager.now = 5.5
    report = started(manager, list(range(60)), "c").cache.prefix_report
    assert (report.num_cached, report.miss) == (0, Miss.STATE)
    assert "the state at token 40 was evicted 3.5 s before" in str(report)


def test_nothing_is_found_under_another_salt_or_without_a_prefix_cache() -> None:
    manager = manager_of(interval=16)
    manager.release(computed(manager, list(range(60)), "a", "tenant"))
    assert started(manager, list(range(60)), "b").cache.num_cached == 0
    off = manager_of(interval=16, enable_prefix_caching=False)
    computed(off, list(range(60)), "a")
    assert kept(off) == 0
    assert started(off, list(range(60)), "b").cache.num_cached == 0


@pytest.mark.parametrize("length", [5, 8, 9, 15, 16, 17, 24])
def test_siblings_begin_before_the_prompts_last_token(length: int) -> None:
    """Each of them computes it again: from the state and the rows before it, of which the rows are copied."""
    manager = manager_of()
    group = SampleGroup()
    group.members = [
        Request(name, array("i", range(length)), length, SamplingParams(), group=group) for name in ("a", "b", "c")
    ]
    a, b, c = group.members
    manager.admit(a, manager.lookup.match(a))
    assert manager.grow(a, length, [])
    for child in (b, c):
        manager.fork(a, child)
        assert child.cache.num_computed == length - 1
        assert [len(manager.owned(child, g)) for g in (1, 2)] == [length - 1 >= PIECE, (length - 1) % PIECE > 0]
    manager.advance(a, length)
    copies: list[Move] = []
    for request in (b, c):
        assert manager.grow(request, length, copies)
        manager.advance(request, 1)
    for request in (a, b, c):
        request.tokens.append(1)
        assert manager.grow(request, length + 1, copies)
        manager.advance(request, 1)
    audit(manager, [a, b, c])
    rows = [move for move in copies if move.group == 2]
    # The last who has them keeps them: the parent, unless it has filled the piece.
    assert len(rows) == {0: 1, 1: 0}.get(length % PIECE, 2)
    owned = [manager.owned(request, 2).tolist() for request in (a, b, c)]
    assert (length + 1) % PIECE == 0 or len({tuple(rows) for rows in owned}) == 3
    for request in (a, b, c):
        manager.release(request)
    assert all(pool.num_used == 0 for pool in manager.pools)


def test_a_fork_from_a_state_that_was_passed_is_refused() -> None:
    manager = manager_of()
    parent = started(manager, list(range(20)))
    compute(manager, parent)
    child = Request("child", array("i", range(16)), 16, SamplingParams())
    with pytest.raises(BadValue, match="child needs blocks of r that it freed"):
        manager.fork(parent, child)


def test_guesses_past_the_end_of_a_piece_leave_the_state_before_it() -> None:
    manager = manager_of()
    r = started(manager, list(range(15)))
    compute(manager, r)
    assert manager.grow(r, 20, [])  # drafts at tokens 15..19
    audit(manager, [r])
    r.tokens.append(15)
    manager.advance(r, 0)
    assert len(manager.owned(r, 1)) == 2  # at 8 and, to be written again, at 16
    compute(manager, r)
    assert len(manager.owned(r, 1)) == 1
    audit(manager, [r])


def test_swapped_states_come_back_or_are_found_again() -> None:
    manager = manager_of(interval=64)
    r = computed(manager, list(range(60)))
    moves = manager.swap_out([r])
    assert moves is not None
    assert [move.group for move in moves] == [0] * 15 + [1, 2]
    audit(manager, [r])
    back = manager.swap_in([r])
    assert [move.group for move in back] == [2]  # rows cannot be found, all others still stand in the cache
    audit(manager, [r])
    r.tokens.append(1)
    compute(manager, r)


def test_events_name_a_state_by_the_tokens_before_it() -> None:
    manager, heard = manager_of(interval=16), list[CacheEvent]()
    manager.listeners.append(heard.append)
    r = computed(manager, list(range(33)))
    stored = {event.block_hashes[0]: event for event in heard if isinstance(event, BlockStored) and event.group == 1}
    assert list(stored) == [r.cache.digests[4], r.cache.digests[8]]
    r.tokens.extend(range(33, 50))
    compute(manager, r, 41)
    compute(manager, r, 50)
    removed = [event for event in heard if isinstance(event, BlockRemoved)]
    assert [event.block_hashes for event in removed] == [[r.cache.digests[10]]]  # at 40, which was passed


@pytest.mark.parametrize(
    ("size", "interval", "message"),
    [
        (3, 64, "block_size is 3; .* pieces of 8 tokens, so it must be one of 1, 2, 4, 8"),
        (16, 64, "block_size is 16; .* must be one of 1, 2, 4, 8"),
        (4, 60, "state_snapshot_interval is 60; .* must be a multiple of that, such as 56"),
        (4, 3, "state_snapshot_interval is 3; .* such as 8"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(size: int, interval: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockManager(GROUPS, 20, size, 9, state_pools=StatePools(9, 9), state_snapshot_interval=interval)


def test_only_states_and_no_attention() -> None:
    pools = StatePools(20, 8)
    manager = BlockManager(GROUPS[1:], 0, 4, 99, state_pools=pools, state_snapshot_interval=16)
    r = computed(manager, list(range(60)))
    manager.release(r)
    again = Request("b", array("i", range(60)), 60, SamplingParams())
    found: Match = manager.lookup.match(again)
    assert (found.num_blocks * 4, found.reach * 4) == (56, 56)
    report = started(manager, [*range(40), *[99] * 20], "c").cache.prefix_report
    assert report.num_cached == 32


class TestSizes:
    SIZES = BlockBytes(attention=1_000, state=20_000, rows=10_000)

    def test_of_a_number_of_blocks(self) -> None:
        config = CacheConfig(num_blocks=640, state_snapshot_interval=512)
        assert choose_pools(config, self.SIZES, 2_000, 4, None, 125) == (640, StatePools(9 + 20, 8))
        config = CacheConfig(num_blocks=640, enable_prefix_caching=False)
        assert choose_pools(config, self.SIZES, 2_000, 4, None, 125) == (640, StatePools(9, 8))
        with pytest.raises(ConfigError, match="num_blocks=640, with the states of max_num_seqs=4, asks for"):
            choose_pools(config, self.SIZES, 2_000, 4, 10**5, 125)

    @pytest.mark.parametrize("budget", [205_000, 300_000, 10**6, 10**7, 10**9])
    @pytest.mark.parametrize("seqs", [1, 4, 256])
    def test_what_is_chosen_fits_and_holds_a_sequence(self, budget: int, seqs: int) -> None:
        config = CacheConfig(kv_cache_memory=f"{budget}B")
        blocks, pools = choose_pools(config, self.SIZES, 2_000, seqs, None, 125)
        taken = blocks * 1_000 + pools.states * 20_000 + pools.rows * 10_000
        assert taken <= budget
        assert 125 <= blocks <= 125 * seqs
        assert pools.states >= 3
        assert pools.rows >= 2
        assert blocks == 125 * seqs or taken > 0.8 * budget or budget < 400_000

    @pytest.mark.parametrize("interval", [32, 1_024, 2**16, 2**20, 2**40])
    @pytest.mark.parametrize("caching", [True, False])
    def test_no_interval_leaves_memory_unused(self, interval: int, caching: bool) -> None:
        """Also where the memory holds fewer tokens than there are from one state to the next."""
        config = CacheConfig(
            kv_cache_memory="10000000B", state_snapshot_interval=interval, enable_prefix_caching=caching
        )
        blocks, pools = choose_pools(config, self.SIZES, 2_000, 256, None, 125)
        taken = blocks * 1_000 + pools.states * 20_000 + pools.rows * 10_000
        assert 0.99 * 10**7 < taken <= 10**7

    def test_too_little_for_one_sequence(self) -> None:
        config = CacheConfig(kv_cache_memory="200000B")
        message = r"one sequence of max_model_len=2,000 tokens needs 0\.2 MiB, of which its states take 0\.1 MiB"
        with pytest.raises(ConfigError, match=message):
            choose_pools(config, self.SIZES, 2_000, 4, None, 125)

    def test_on_the_host(self) -> None:
        config = CacheConfig(preemption="swap", swap_space="1000000B")
        assert choose_host_pools(config, self.SIZES, 10_000, 4, None) == (880, 4)
        assert choose_host_pools(CacheConfig(), self.SIZES, 10_000, 4, None) == (0, 0)
        with pytest.raises(ConfigError, match="one block with the states of a sequence takes 31,000"):
            choose_host_pools(CacheConfig(preemption="swap", swap_space="20000B"), self.SIZES, 10, 4, None)


def test_a_request_that_the_states_never_hold_is_refused() -> None:
    from quire.engine.limits import check_size

    manager = manager_of(states=2)
    request = Request("r", array("i", range(60)), 60, SamplingParams(max_tokens=5))
    with pytest.raises(RequestError, match="need 3 states, and the cache has 2"):
        check_size(request, 65, manager, 100, 4, 100)
