"""The prefix cache: what is found, what is evicted first, why there was a miss, and that digests are not believed."""

import random
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cache import lookup as lookup_module
from quire.cache.audit import audit
from quire.cache.groups import CacheGroup
from quire.cache.manager import BlockManager
from quire.cache.prefix import MAX_CHILDREN, PrefixIndex, block_digest, root_digest
from quire.errors import BadValue
from quire.request import ImageRows, Miss, Request, Retention, SamplingParams, TokenLogprobs
from tests.cache.test_manager import ONE, compute, computed, started

PROMPT = list(range(100, 111))  # two full blocks of 4, and three tokens


def manager_of(num_blocks: int = 20, groups: tuple[CacheGroup, ...] = ONE, **options: object) -> BlockManager:
    return BlockManager(groups, num_blocks, 4, 99, **options)  # type: ignore[arg-type]


def report_of(manager: BlockManager, tokens: list[int], **sampling: object):
    request = Request("asking", array("i", tokens), len(tokens), SamplingParams(**sampling))  # type: ignore[arg-type]
    manager.admit(request, manager.lookup.match(request))
    manager.release(request)
    return request.cache.prefix_report


class TestWhatIsFound:
    def test_full_blocks_of_ended_and_of_running_requests(self) -> None:
        manager = manager_of()
        a = computed(manager, PROMPT, "a")
        b = started(manager, PROMPT, "b")
        assert b.cache.block_ids[0] == a.cache.block_ids[0][:2]
        assert (b.cache.num_computed, b.cache.num_cached) == (8, 8)
        audit(manager, [a, b])
        manager.release(a)
        manager.release(b)
        assert manager.pools[0].num_free == 20
        c = started(manager, PROMPT[:9], "c")
        assert c.cache.num_cached == 8

    def test_generated_tokens_are_reused_too(self) -> None:
        manager = manager_of()
        r = computed(manager, PROMPT)
        r.tokens.extend([1, 2])
        compute(manager, r)
        assert started(manager, [*PROMPT, 1, 9], "next").cache.num_cached == 12

    def test_a_full_hit_computes_its_last_token_and_does_not_write_it(self) -> None:
        manager = manager_of()
        a = computed(manager, PROMPT[:8], "a")
        b = started(manager, PROMPT[:8], "b")
        assert (b.cache.num_computed, b.cache.num_cached) == (7, 8)
        assert manager.grow(b, 8, copies := [])
        assert (b.cache.block_ids[0], copies) == (a.cache.block_ids[0], [])
        manager.advance(b, 1)
        b.tokens.append(5)
        compute(manager, b)
        assert b.cache.block_ids[0][:2] == a.cache.block_ids[0]
        audit(manager, [a, b])

    def test_a_partial_hit_ends_before_the_first_other_block(self) -> None:
        manager = manager_of()
        computed(manager, PROMPT, "a")
        assert started(manager, [*PROMPT[:6], 1, 1, 1], "b").cache.num_cached == 4

    def test_nothing_under_another_salt(self) -> None:
        manager = manager_of()
        a = computed(manager, PROMPT, "a")
        b = Request("b", array("i", PROMPT), len(PROMPT), SamplingParams(), cache_salt="tenant")
        assert manager.lookup.match(b).num_blocks == 0
        other_salt = BlockManager(ONE, 20, 4, 99, salt="fp8").lookup
        assert other_salt.digest(a, 0) is a.cache.digests[1]  # known already
        other = Request("c", array("i", PROMPT), len(PROMPT), SamplingParams())
        assert other_salt.digest(other, 0) != a.cache.digests[1]

    def test_nothing_where_it_is_off(self) -> None:
        manager = manager_of(enable_prefix_caching=False)
        r = Request("r", array("i", PROMPT), len(PROMPT), SamplingParams())
        manager.admit(r, manager.lookup.match(r))
        compute(manager, r)
        assert len(manager.indexes[0]) == 0
        again = Request("s", array("i", PROMPT), len(PROMPT), SamplingParams())
        assert manager.lookup.match(again).num_blocks == 0

    def test_after_a_reset_nothing_is_found_and_running_requests_go_on(self) -> None:
        manager = manager_of()
        a, b = computed(manager, PROMPT, "a"), computed(manager, PROMPT[::-1], "b")
        manager.release(b)
        manager.reset_prefix_cache()
        audit(manager, [a])
        assert started(manager, PROMPT, "c").cache.num_cached == 0
        a.tokens.extend([1, 2])
        compute(manager, a)
        audit(manager, [a])

    @pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9, 100])
    def test_a_window_needs_only_the_blocks_that_the_next_row_sees(self, window: int) -> None:
        groups = (CacheGroup((0,)), CacheGroup((1,), window))
        manager = manager_of(groups=groups)
        a = computed(manager, PROMPT, "a")
        manager.release(a)
        b = started(manager, PROMPT, "b")
        assert b.cache.num_cached == 8
        assert b.cache.num_freed == [0, max(0, 8 - window + 1) // 4]
        audit(manager, [b])
        compute(manager, b)
        audit(manager, [b])

    def test_a_hit_is_the_longest_prefix_that_stands_in_every_group(self) -> None:
        groups = (CacheGroup((0,)), CacheGroup((1,), window=5))
        manager = manager_of(groups=groups)
        tokens = list(range(24))
        manager.release(computed(manager, tokens, "a"))
        blocks = {cached.tokens: block for block, cached in manager.indexes[1].by_block.items()}
        for lost, found in ((5, 20), (4, 16), (3, 12), (2, 8), (1, 4), (0, 0)):
            block = blocks[array("i", tokens[4 * lost : 4 * lost + 4]).tobytes()]
            manager.indexes[1].evict([block], [0.0])
            manager.pools[1].drop([block])
            again = Request("b", array("i", [*tokens, 99]), 25, SamplingParams())
            assert manager.lookup.match(again).num_blocks * 4 == found

    def test_a_hit_does_not_end_within_an_image_that_one_step_computes(self) -> None:
        none = np.empty(0, np.int64)
        images = ImageRows(none, none.astype(np.int32), [(5, b"image")], None, runs=[(5, 14)])
        tokens = list(range(22))

        def asking(count: int) -> Request:
            return Request("a", array("i", tokens[:count]), count, SamplingParams(), images=images)

        manager = manager_of()
        first = asking(22)
        manager.admit(first, manager.lookup.match(first))
        compute(manager, first)
        manager.release(first)
        assert [manager.lookup.match(asking(count)).num_blocks for count in (22, 16, 14, 4)] == [5, 4, 1, 1]
        blocks = {cached.tokens: block for block, cached in manager.indexes[0].by_block.items()}
        for lost, found in ((4, 4), (3, 1), (2, 1), (1, 1), (0, 0)):
            block = blocks[array("i", tokens[4 * lost : 4 * lost + 4]).tobytes()]
            manager.indexes[0].evict([block], [0.0])
            manager.pools[0].drop([block])
            again = asking(22)
            manager.admit(again, manager.lookup.match(again))
            manager.release(again)
            report = again.cache.prefix_report
            assert report is not None
            assert (report.num_cached, report.miss) == (4 * found, Miss.EVICTED)
        short = Request("b", array("i", [1] * 14), 14, SamplingParams(), images=images._replace(runs=[(2, 13)]))
        manager.admit(short, manager.lookup.match(short))
        assert short.cache.prefix_report is not None
        assert short.cache.prefix_report.miss is Miss.SHORT

    @pytest.mark.parametrize(("group", "layers"), [(0, ""), (1, ", in the layers with a window of 5")])
    def test_a_miss_says_which_layers_were_short(self, group: int, layers: str) -> None:
        manager = manager_of(groups=(CacheGroup((0,)), CacheGroup((1,), window=5)))
        manager.release(computed(manager, list(range(24)), "a"))
        [lost] = [
            block
            for block, it in manager.indexes[group].by_block.items()
            if it.tokens == array("i", [20, 21, 22, 23]).tobytes()
        ]
        manager.indexes[group].evict([lost], [1.0])
        manager.pools[group].drop([lost])
        manager.now = 3.5
        report = started(manager, [*range(24), 99], "b").cache.prefix_report
        assert report.num_cached == 20
        assert str(report).endswith(f"the block that begins at token 20 was evicted 2.5 s before{layers}")

    @pytest.mark.parametrize("seed", range(20))
    def test_the_longest_prefix_is_found_whatever_is_lost(self, seed: int) -> None:
        """Against trying every length, with random gaps in two windowed groups and none in the full one."""
        rng = random.Random(seed)
        groups = (CacheGroup((0,)), CacheGroup((1,), rng.randint(1, 20)), CacheGroup((2,), rng.randint(1, 20)))
        manager = manager_of(groups=groups)
        tokens = [rng.randrange(3) for _ in range(40)]
        manager.release(computed(manager, tokens, "a"))
        for g in (1, 2):
            for block in rng.sample(list(manager.indexes[g].by_block), rng.randint(0, 4)):
                manager.indexes[g].evict([block], [0.0])
                manager.pools[g].drop([block])
        again = Request("b", array("i", tokens), 40, SamplingParams())
        match = manager.lookup.match(again)

        def stands(count: int) -> bool:
            row = min(4 * count, 39)
            needed = [range(max(0, row - (g.window or 99) + 1) // 4, count) for g in groups]
            return all(
                again.cache.digests[i + 1] in manager.indexes[g] for g, blocks in enumerate(needed) for i in blocks
            )

        assert match.num_blocks == max(count for count in range(11) if stands(count))


class TestEviction:
    def test_the_oldest_last_use_goes_first_and_tails_before_heads(self) -> None:
        manager = manager_of(num_blocks=6)
        old, young = computed(manager, [1] * 8, "old"), computed(manager, [2] * 8, "young")
        old_blocks, young_blocks = old.cache.block_ids[0].tolist(), young.cache.block_ids[0].tolist()
        manager.release(old)
        manager.release(young)
        manager.release(started(manager, [1] * 8, "again"))  # old is young now
        taken = started(manager, list(range(50, 74)), "taker")
        assert manager.grow(taken, 24, [])
        order = taken.cache.block_ids[0].tolist()
        assert order[2:] == [young_blocks[1], young_blocks[0], old_blocks[1], old_blocks[0]]

    def test_empty_blocks_are_used_before_anything_is_evicted(self) -> None:
        manager = manager_of(num_blocks=4)
        manager.release(computed(manager, [1] * 6, "a"))  # one full block, one open
        r = started(manager, list(range(12)), "b")
        assert manager.grow(r, 12, [])
        assert len(manager.indexes[0]) == 1
        assert manager.grow(r, 13, [])
        assert len(manager.indexes[0]) == 0

    def test_a_block_in_use_is_never_evicted(self) -> None:
        manager = manager_of(num_blocks=4)
        a = computed(manager, [1] * 8, "a")
        b = started(manager, [2] * 12, "b")
        assert not manager.grow(b, 12, [])
        assert manager.grow(b, 8, [])
        assert len(manager.indexes[0]) == 2
        audit(manager, [a, b])


class TestWhyNot:
    def test_hit(self) -> None:
        manager = manager_of()
        computed(manager, PROMPT)
        report = report_of(manager, PROMPT)
        assert (report.num_cached, report.miss) == (8, None)
        assert str(report) == "8 of 11 prompt tokens were cached: every full block"

    def test_shorter_than_a_block(self) -> None:
        report = report_of(manager_of(), [1, 2, 3])
        assert report.miss is Miss.SHORT
        assert "shorter than a block of 4 tokens" in str(report)

    def test_never_seen(self) -> None:
        manager = manager_of()
        computed(manager, PROMPT)
        assert report_of(manager, [7] * 9).miss is Miss.UNSEEN
        report = report_of(manager, [*PROMPT[:8], 1, 2, 3, 4])
        assert (report.num_cached, report.miss) == (8, Miss.UNSEEN)
        assert "no cached sequence continues after token 8" in str(report)

    @pytest.mark.parametrize(("at", "cached"), [(1, 0), (3, 0), (4, 4), (6, 4), (7, 4)])
    def test_first_differing_token(self, at: int, cached: int) -> None:
        manager = manager_of()
        computed(manager, PROMPT)
        tokens = list(PROMPT)
        tokens[at] = 0
        report = report_of(manager, tokens)
        assert (report.num_cached, report.miss, report.first_difference) == (cached, Miss.DIFFERS, at)
        assert f"differs from token {at} on" in str(report)

    def test_the_nearest_of_several_is_told(self) -> None:
        """However many there are, and whichever came first."""
        manager = manager_of(num_blocks=500)
        for i in range(99):
            computed(manager, [*PROMPT[: 3 if i == 7 else i % 3], 300 + i, 300, i, 0][:4], f"r{i}")
        assert report_of(manager, PROMPT).first_difference == 3

    def test_the_nearest_is_that_of_a_comparison_with_all(self) -> None:
        rng, index = random.Random(0), PrefixIndex(1000)
        for block in range(300):
            tokens = array("i", (rng.choice([0, 1, 300, 70_000]) for _ in range(6))).tobytes()
            index.publish(block, block_digest(b"p", tokens), b"p", tokens, first=True)
        index.audit()
        for _ in range(300):
            index.audit()
            wanted = [rng.choice([0, 1, 300, 70_000]) for _ in range(6)]
            cached = [array("i", one.tokens).tolist() for one in index.by_block.values()]
            common = [next((i for i in range(6) if one[i] != wanted[i]), 6) for one in cached]
            assert index.nearest(b"p", array("i", wanted).tobytes()) == max(common, default=None)
            if index.by_block:
                index.evict([rng.choice(list(index.by_block))], [0.0])
        assert index.nearest(b"p", b"1234" * 6) is None

    def test_evicted_and_when(self) -> None:
        manager = manager_of(num_blocks=4)
        manager.now = 10.0
        manager.release(computed(manager, [1] * 12, "a"))
        manager.now = 12.5
        manager.release(computed(manager, [2] * 12, "b"))
        manager.now = 20.0
        report = report_of(manager, [1] * 12)
        assert (report.num_cached, report.miss, report.seconds_ago) == (4, Miss.EVICTED, 7.5)
        assert "the block that begins at token 4 was evicted 7.5 s before" in str(report)

    def test_other_salt(self) -> None:
        manager = manager_of()
        r = Request("r", array("i", PROMPT), len(PROMPT), SamplingParams(), cache_salt="tenant")
        manager.admit(r, manager.lookup.match(r))
        compute(manager, r)
        assert report_of(manager, PROMPT).miss is Miss.SALT

    def test_prompt_logprobs(self) -> None:
        manager = manager_of()
        computed(manager, PROMPT)
        report = report_of(manager, PROMPT, prompt_logprobs=1)
        assert (report.num_cached, report.miss) == (0, Miss.PROMPT_LOGPROBS)

    def test_stored_logprobs_belong_to_the_tokens_the_salt_and_the_adapter(self) -> None:
        manager = manager_of()
        first = started(manager, PROMPT, "first")
        found = [TokenLogprobs(token, -0.5, 2, ((7, -0.25),)) for token in PROMPT[1:]]
        manager.record(first, found)
        compute(manager, first)
        manager.release(first)
        audit(manager, [])
        for salt, adapter, tokens, cached in (
            ("", "", PROMPT, 8),
            ("tenant", "", PROMPT, 0),
            ("", "adapter", PROMPT, 0),
            ("", "", [*PROMPT[:4], *PROMPT], 4),
        ):
            params = SamplingParams(prompt_logprobs=1)
            again = Request("again", array("i", tokens), len(tokens), params, cache_salt=salt, lora_digest=adapter)
            manager.admit(again, manager.lookup.match(again))
            assert again.cache.num_cached == cached
            assert again.cache.num_computed == max(0, cached - 1)  # for the logprob of the next token
            assert again.cache.found == tuple(found[: max(0, cached - 1)])
            manager.release(again)
        whole = computed(manager, list(range(200, 280)))  # needs all blocks
        audit(manager, [whole])
        assert len(manager.scores) == 0

    def test_off(self) -> None:
        manager = manager_of(enable_prefix_caching=False)
        assert report_of(manager, PROMPT).miss is Miss.DISABLED

    def test_hits_partial_hits_and_misses_are_counted_once_a_request(self) -> None:
        manager = manager_of()
        r = computed(manager, PROMPT)
        manager.release(r)
        manager.admit(r, manager.lookup.match(r))  # resumed
        report_of(manager, PROMPT)
        report_of(manager, [*PROMPT[:4], 0, 0, 0, 0])
        counts = manager.hits
        assert (counts.hits, counts.partial_hits, counts.misses) == (1, 1, 1)
        assert (counts.prompt_tokens, counts.cached_tokens) == (11 + 11 + 8, 8 + 4)
        assert counts.rate == 12 / 30


class TestRetention:
    """Blocks of a key are evicted last, until their time is over or the key's budget is used up."""

    @staticmethod
    def run(manager: BlockManager, first: int, *, key: str = "", seconds: float = 60.0, salt: str = "") -> Request:
        """Compute and end a prompt of three blocks that begins with a token of its own."""
        prompt = array("i", [first] * 12)
        request = Request(f"r{first}", prompt, 12, SamplingParams(), cache_salt=salt)
        request.retention = Retention(key, seconds) if key else None
        manager.admit(request, manager.lookup.match(request))
        compute(manager, request)
        manager.release(request)
        audit(manager, [])
        return request

    def test_until_its_time_a_key_outlives_all_that_came_later(self) -> None:
        manager = manager_of(num_blocks=9)
        self.run(manager, 1, key="session")
        for first in range(2, 40):
            self.run(manager, first)
        assert report_of(manager, [1] * 12).num_cached == 12
        manager.begin_step(59.0)
        self.run(manager, 1, key="session")  # a use begins the time again
        manager.begin_step(100.0)
        self.run(manager, 50)
        assert report_of(manager, [1] * 12).num_cached == 12
        manager.begin_step(119.0)
        audit(manager, [])
        for first in range(60, 63):  # it is now an ordinary cached prompt, the least recently used one but one
            self.run(manager, first)
        manager.begin_step(130.0)
        report = report_of(manager, [1] * 12)
        assert (report.num_cached, report.miss, report.seconds_ago) == (0, Miss.EXPIRED, 11.0)
        assert "token 0 was kept until its time, and was evicted 11.0 s before" in str(report)
        self.run(manager, 1)  # cached again, without a key
        for first in range(70, 73):
            self.run(manager, first)
        assert report_of(manager, [1] * 12).miss is Miss.EVICTED

    def test_a_budget_keeps_the_heads_of_the_latest_prompts(self) -> None:
        manager = manager_of(num_blocks=20, retained_share=0.25)  # 5 blocks of each key
        self.run(manager, 1, key="a")
        self.run(manager, 2, key="a")
        self.run(manager, 3, key="a", salt="tenant")  # another key
        for first in range(4, 9):
            self.run(manager, first)
        found = {first: report_of(manager, [first] * 12) for first in (1, 2)}
        assert (found[2].num_cached, found[1].num_cached, found[1].miss) == (12, 8, Miss.BUDGET)
        assert "token 8 exceeded the budget of its key, and was evicted" in str(found[1])
        kept = [(owner, count) for owner, count, _ in manager.retained[0].owners()]
        assert kept == [(("", "a"), 5), (("tenant", "a"), 3)]
        off = manager_of(num_blocks=10, retained_share=0.0)
        self.run(off, 1, key="a")
        assert len(off.retained[0]) == 0

    def test_kept_blocks_never_starve_a_request(self) -> None:
        manager = manager_of(num_blocks=9)
        for first, key in enumerate("abc"):
            self.run(manager, first, key=key)
        assert len(manager.retained[0]) == 9
        whole = computed(manager, [7] * 36)
        audit(manager, [whole])
        assert len(manager.retained[0]) == 0
        manager.release(whole)
        assert report_of(manager, [0] * 12).miss is Miss.EVICTED

    def test_a_shared_block_belongs_to_the_key_that_keeps_it_longest(self) -> None:
        manager = manager_of(num_blocks=8, retained_share=1.0)
        self.run(manager, 1, key="a", seconds=10.0)
        self.run(manager, 1, key="b", seconds=90.0)
        self.run(manager, 1, key="a", seconds=10.0)
        assert [(owner.key, count, until) for owner, count, until in manager.retained[0].owners()] == [("b", 3, 90.0)]
        manager.begin_step(50.0)
        assert len(manager.retained[0]) == 3
        manager.reset_prefix_cache()
        audit(manager, [])
        assert len(manager.retained[0]) == 0

    def test_audit_sees_blocks_that_are_not_where_they_belong(self) -> None:
        manager = manager_of()
        self.run(manager, 1, key="a")
        manager.pools[0].unretain([*manager.pools[0].retained][:1])
        with pytest.raises(BadValue, match="retained blocks of cache group 0"):
            audit(manager, [])


class TestDigestsAreNotBelieved:
    def test_equal_digests_of_different_tokens_share_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a digest of two values nearly all blocks collide; each request still has its own tokens or nothing."""
        monkeypatch.setattr(lookup_module, "block_digest", lambda parent, tokens: bytes([sum(tokens) % 2]))
        manager = manager_of(num_blocks=500)
        rng = random.Random(0)
        requests = [computed(manager, [rng.randrange(50) for _ in range(12)], f"r{i}") for i in range(40)]
        audit(manager, requests)  # compares the tokens of every reusable block with those of all its owners
        assert len({request.cache.block_ids[0][1] for request in requests}) == 40
        assert len(manager.indexes[0]) == 2

    def test_a_digest_depends_on_all_tokens_before_and_on_the_salt(self) -> None:
        root, block = root_digest(""), array("i", [1, 2]).tobytes()
        names = {
            block_digest(root, block),
            block_digest(block_digest(root, block), block),
            block_digest(root_digest("a"), block),
            block_digest(root, array("i", [2, 1]).tobytes()),
        }
        assert len(names) == 4
        assert block_digest(root, block) == block_digest(root_digest(""), block)


class TestIndex:
    def test_a_block_is_published_once(self) -> None:
        index = PrefixIndex(4)
        assert index.publish(0, b"d", b"p", b"aaaa", first=True)
        assert not index.publish(1, b"d", b"p", b"aaaa", first=True)
        with pytest.raises(BadValue, match="block 0 is published twice"):
            index.publish(0, b"e", b"p", b"bbbb", first=True)

    def test_it_remembers_as_many_losses_as_it_has_blocks(self) -> None:
        index = PrefixIndex(2)
        for i in range(3):
            index.publish(i, bytes([i]), b"p", bytes(4), first=False)
            index.evict([i], [float(i)])
        assert [index.evicted_at(bytes([i])) for i in range(3)] == [None, 1.0, 2.0]
        index.audit()

    def test_a_digest_is_not_believed_without_its_parent(self) -> None:
        index = PrefixIndex(4)
        index.publish(0, b"d", b"p", b"aaaa", first=True)
        assert index.find(b"d", b"p", b"aaaa") == 0
        assert index.find(b"d", b"q", b"aaaa") is None
        assert index.find(b"d", b"p", b"aaab") is None

    def test_nothing_of_an_evicted_block_stays_but_when(self) -> None:
        index = PrefixIndex(4)
        index.publish(0, b"d", b"p", b"aaaa", first=True)
        index.evict([0], [3.0])
        for table in (index.by_block, index._by_digest, index._children, index._roots):
            assert not table
        assert index.evicted_at(b"d") == 3.0
        index.publish(1, b"d", b"p", b"aaaa", first=True)
        assert index.evicted_at(b"d") is None

    def test_a_parent_of_very_many_compares_some(self) -> None:
        index = PrefixIndex(MAX_CHILDREN + 50)
        names = [i.to_bytes(4, "big") for i in range(MAX_CHILDREN + 50)]
        for block, tokens in enumerate(names):
            index.publish(block, b"d" + tokens, b"p", tokens, first=True)
        assert len(index._children[b"p"]) == MAX_CHILDREN
        index.audit()
        for block in range(MAX_CHILDREN + 40):
            index.evict([block], [0.0])
            assert index.find(b"d" + names[-1], b"p", names[-1]) == MAX_CHILDREN + 49
        index.audit()
        assert index.nearest(b"p", names[-1]) is None  # those that are left had found no room

    def test_audit_sees_tables_that_disagree(self) -> None:
        index = PrefixIndex(4)
        index.publish(0, b"d", b"p", b"aaaa", first=True)
        index.audit()
        index._children.clear()
        with pytest.raises(BadValue, match="has different blocks by parent than by id"):
            index.audit()


class TestRuns:
    @pytest.mark.slow
    @given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 6), st.booleans(), st.booleans())
    def test_a_run_is_published_as_its_blocks_are(self, tokens: list[int], known: int, gone: bool, first: bool) -> None:
        """If it has a block that is known, nothing is changed."""
        contents = [array("i", [token] * 4).tobytes() for token in tokens]
        digests = [root_digest("")]
        for content in contents:
            digests.append(block_digest(digests[-1], content))
        one, other = PrefixIndex(32), PrefixIndex(32)
        known = min(known, len(tokens))
        for index in (one, other):
            for i in range(known):
                index.publish(20 + i, digests[i + 1], digests[i], contents[i], first=first and i == 0)
            for i in range(known if gone else 0):
                index.evict([20 + i], [0.0])
        blocks = array("i", range(len(tokens)))
        if one.publish_new(blocks, digests, contents, first=first):
            assert gone or not known
            for i, block in enumerate(blocks):
                assert other.publish(block, digests[i + 1], digests[i], contents[i], first=first and i == 0)
        else:
            assert known
            assert not gone
        assert vars(one) == vars(other)
        one.audit()

    def test_equal_digests_in_a_run_are_no_run(self) -> None:
        index = PrefixIndex(4)
        assert not index.publish_new([0, 1], [b"root", b"same", b"same"], [b"aaaa", b"bbbb"], first=True)
        assert not index.by_block
