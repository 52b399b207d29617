"""What requests share: a prompt that many bring at once, the samples of one prompt, what others left in the cache."""

import pytest

from quire.cache.events import BlocksForked, BlocksShared
from quire.cache.groups import CacheGroup
from quire.engine.engine import Engine
from quire.engine.policy import by_priority, shortest_prompt_first
from quire.request import FinishReason, Miss, Request
from tests.engine.fakes import VOCAB, continuation, fake_engine, request, run, siblings
from tests.marks import spread

ONE, TWO = (CacheGroup((0,)),), (CacheGroup((0,)), CacheGroup((1,), window=8))


def num_computed(engine: Engine) -> int:
    return sum(len(batch.token_ids) for batch in engine.runner.batches)


class TestSharingInFlight:
    def test_32_users_of_one_prompt_prefill_it_once(self) -> None:
        engine = fake_engine(num_blocks=400, block_size=16, max_model_len=1200, max_num_seqs=64,
                             max_num_batched_tokens=256)  # fmt: skip
        shared = [i % VOCAB for i in range(1024)]
        prompts = {f"r{i}": [*shared, i, i, i] for i in range(32)}
        for name, prompt in prompts.items():
            engine.add(request(name, prompt, max_tokens=4))
        results = run(engine)
        assert results == {name: (continuation(prompt, 4), "length") for name, prompt in prompts.items()}
        assert num_computed(engine) == 1024 + 32 * (3 + 3)  # the prompt once, then each one's own tokens

    def test_those_that_wait_own_nothing_and_others_pass_them(self) -> None:
        engine = fake_engine(num_blocks=100, max_num_batched_tokens=16)
        shared = list(range(12))
        first, second, third = requests = [
            request(name, prompt) for name, prompt in (("a", shared), ("b", [*shared, 1]), ("c", [9, 9]))
        ]
        for r in requests:
            engine.add(r)
        engine.step()
        assert (first.num_generated, third.num_generated) == (1, 1)
        assert second.cache.block_ids == []
        run(engine)
        assert second.cache.prefix_report.num_cached == 12

    @pytest.mark.parametrize("how", ["abort", "fail"])
    @pytest.mark.parametrize("after", range(1, 6))
    def test_when_the_one_who_computes_is_gone_the_next_goes_on(self, how: str, after: int) -> None:
        engine = fake_engine(num_blocks=100, max_num_batched_tokens=8)
        shared = list(range(40))
        for i in range(4):
            engine.add(request(f"r{i}", [*shared, i], max_tokens=3))
        for step in range(after):
            engine.runner.fail_next = how == "fail" and step == after - 1
            engine.step()
        if how == "abort":
            engine.abort("r0")
        results = run(engine)
        for i in range(1, 4):
            assert results[f"r{i}"] == (continuation([*shared, i], 3), "length")
        # The first one's full blocks stay; nothing but its unfinished work is done again.
        assert num_computed(engine) <= 40 + 8 + 4 * (5 + 3)

    def test_when_the_one_who_computes_is_preempted_the_others_go_on(self) -> None:
        engine = fake_engine(num_blocks=14, max_num_batched_tokens=8, order=by_priority)
        long = request("long", list(range(44)), max_tokens=2)
        also = request("also", [*range(44), 1], max_tokens=2)
        first = request("first", [7] * 4, max_tokens=30)
        first.priority = -1
        for r in (first, long, also):
            engine.add(r)
        results = run(engine)
        assert engine.scheduler.num_preemptions > 0
        assert results["long"][0] == continuation(list(range(44)), 2)
        assert results["also"][0] == continuation([*range(44), 1], 2)
        assert results["first"][0] == continuation([7] * 4, 30)

    def test_other_salts_compute_for_themselves(self) -> None:
        engine = fake_engine(num_blocks=100, max_num_batched_tokens=64)
        for i in range(3):
            r = request(f"r{i}", list(range(40)), max_tokens=1)
            r.cache_salt = str(i)
            engine.add(r)
        run(engine)
        assert num_computed(engine) == 120

    @pytest.mark.parametrize(("wanted", "computed"), [((1, 0), 24), ((2, 2), 48), ((None, 1), 48), ((1, None), 24)])
    def test_prompt_logprobs_wait_for_blocks_that_will_have_them(
        self, wanted: tuple[int | None, int | None], computed: int
    ) -> None:
        engine = fake_engine(num_blocks=100, max_num_batched_tokens=64)
        for i, count in enumerate(wanted):
            engine.add(request(f"r{i}", list(range(24)), max_tokens=1, prompt_logprobs=count))
        engine.step()
        assert num_computed(engine) == computed


class TestPrefixCacheAcrossRequests:
    def test_a_conversation_finds_its_own_turns(self) -> None:
        engine = fake_engine(num_blocks=100)
        history = [1, 2, 3, 4, 5]
        for turn in range(4):
            r = request(f"turn{turn}", history, max_tokens=7)
            engine.add(r)
            history = [*history, *run(engine)[f"turn{turn}"][0], 9]
            assert r.cache.prefix_report.num_cached == (0 if turn == 0 else (len(r.tokens) - 7 - 2) // 4 * 4)

    def test_the_report_is_of_the_first_time_a_request_ran(self) -> None:
        engine = fake_engine(num_blocks=4, block_size=4)
        requests = [request(name, [5, 6, 7, 8], max_tokens=9) for name in ("old", "young")]
        for r in requests:
            engine.add(r)
        run(engine)
        assert engine.scheduler.num_preemptions > 0
        assert [r.cache.prefix_report.miss for r in requests] == [Miss.UNSEEN, None]


class TestSiblings:
    @pytest.mark.parametrize(
        ("groups", "caching", "count", "length"),
        spread(
            6,
            [ONE, TWO, (CacheGroup((0,), window=5),)],
            [True, False],
            [2, 5, 12],
            [1, 3, 4, 5, 16, 17],
        ),
    )
    def test_samples_of_one_prompt_compute_it_once(
        self, length: int, count: int, caching: bool, groups: tuple[CacheGroup, ...]
    ) -> None:
        engine = fake_engine(num_blocks=120, groups=groups, max_num_seqs=8, enable_prefix_caching=caching)
        prompt = list(range(length))
        for r in siblings("s", prompt, count, max_tokens=6):
            engine.add(r)
        expected = continuation(prompt, 6, groups[0].window or 0)
        assert run(engine) == {f"s-{i}": (expected, "length") for i in range(count)}
        forked = min(count, 8) - 1  # as many as there are seats beside the first
        late = count - 1 - forked  # they find the prompt's full blocks in the cache
        own = max(1, length - length // 4 * 4)
        again = own + late - 1 if late else 0  # they are forked from the first of them
        assert num_computed(engine) == length + forked + again + count * 5

    def test_a_partly_filled_block_is_copied_for_all_but_one(self) -> None:
        engine = fake_engine(num_blocks=120)
        copied: list[int] = []
        engine.listen(lambda event: copied.append(event.dst) if type(event).__name__ == "BlockCopied" else None)
        for r in siblings("s", list(range(6)), 5, max_tokens=6):
            engine.add(r)
        run(engine)
        assert len(copied) == 4

    @pytest.mark.parametrize("how", ["abort", "fail"])
    @pytest.mark.parametrize("after", range(1, 5))
    def test_siblings_go_on_without_the_first(self, how: str, after: int) -> None:
        engine = fake_engine(num_blocks=50, max_num_batched_tokens=5)
        prompt = list(range(13))
        group = siblings("s", prompt, 3, max_tokens=5)
        for r in group:
            engine.add(r)
        for step in range(after):
            engine.runner.fail_next = how == "fail" and step == after - 1
            engine.step()
        if how == "abort":
            engine.abort("s-0")
        run(engine)
        survivors = {r.id for r in group if r.finish_reason is FinishReason.LENGTH}
        assert survivors == ({"s-1", "s-2"} if how == "abort" or after <= 3 else set())
        for r in group:
            assert r.tokens.tolist() == [*prompt, *continuation(prompt, 5)][: len(r.tokens)]
            assert r.num_generated == 5 or r.id not in survivors

    def test_a_sibling_can_be_taken_back_before_it_was_forked(self) -> None:
        engine = fake_engine(num_blocks=50, max_num_batched_tokens=5)
        for r in siblings("s", list(range(13)), 3, max_tokens=5):
            engine.add(r)
        engine.step()
        engine.abort("s-1")
        events = engine.step()
        assert [(e.request_id, e.finish_reason) for e in events] == [("s-1", FinishReason.ABORT)]
        results = run(engine)
        assert set(results) == {"s-0", "s-2"}

    def test_more_siblings_than_the_pool_holds_together_all_end(self) -> None:
        """Each alone fits; together they do not, so they give way to one another one at a time."""
        for host in (0, 3, 20):
            engine = fake_engine(num_blocks=6, block_size=4, num_host_blocks=host)
            for r in siblings("s", list(range(9)), 6, max_tokens=10):
                engine.add(r)
            expected = continuation(list(range(9)), 10)
            assert run(engine) == {f"s-{i}": (expected, "length") for i in range(6)}
            assert engine.scheduler.num_preemptions > 0


class TestSeats:
    def test_many_samples_take_the_seats_one_after_the_other(self) -> None:
        engine = fake_engine(num_blocks=60, max_num_seqs=4)
        members = siblings("s", [1, 2, 3, 4, 5], 50, max_tokens=3)
        for member in members:
            engine.add(member)
        results = run(engine)
        assert all(results[m.id] == (continuation([1, 2, 3, 4, 5], 3), "length") for m in members)
        assert engine.scheduler.manager.hits.prompt_tokens < 50 * 5  # forked, not let in one by one

    def test_one_that_is_preempted_before_its_first_token_is_counted_once(self) -> None:
        """And is let in again before what is new."""
        engine = fake_engine(num_blocks=14, block_size=4, num_host_blocks=20)
        engine.add(request("old", [3] * 9, max_tokens=30))
        for member in siblings("s", [4] * 10, 3, max_tokens=12):
            engine.add(member)
        engine.add(request("new", [5] * 9, max_tokens=4))
        run(engine)
        hits = engine.scheduler.manager.hits
        assert engine.scheduler.num_preemptions > 0
        assert hits.hits + hits.partial_hits + hits.misses == 3  # old, the first sibling, new


class TestWhoComesBack:
    def test_what_is_swapped_out_returns_before_anything_new(self) -> None:
        engine = fake_engine(num_blocks=6, block_size=4, num_host_blocks=8)
        engine.add(request("a", [1] * 8, max_tokens=12))
        b = request("b", [2] * 8, max_tokens=12)
        engine.add(b)
        while not engine.scheduler.swapped:
            engine.step()
        new = request("new", [3], max_tokens=1)  # there is a block for it
        engine.add(new)
        while engine.scheduler.swapped:
            assert new in engine.scheduler.waiting
            assert engine.scheduler.manager.pools[0].num_free >= 1 or len(engine.scheduler.running) == 1
            engine.step()
        run(engine)
        assert b.tokens.tolist()[8:] == continuation([2] * 8, 12)
        assert new.tokens.tolist()[1:] == continuation([3], 1)

    def test_without_a_prefix_cache_strangers_share_nothing(self) -> None:
        engine, events = fake_engine(enable_prefix_caching=False), []
        engine.listen(events.append)
        for name in ("s", "t"):
            for member in siblings(name, list(range(30)), 2, max_tokens=3):
                engine.add(member)
        run(engine)
        assert not [event for event in events if isinstance(event, BlocksShared)]
        assert {event.parent_id for event in events if isinstance(event, BlocksForked)} == {"s-0", "t-0"}


class TestOrder:
    def served(self, engine: Engine, requests: list[Request]) -> list[str]:
        for r in requests:
            engine.add(r)
        return list(run(engine))

    def test_priority(self) -> None:
        engine = fake_engine(max_num_seqs=1, order=by_priority)
        requests = [request(f"r{i}", [i], max_tokens=2) for i in range(5)]
        for r, priority in zip(requests, (0, 5, -1, 5, 2), strict=True):
            r.priority = priority
        assert self.served(engine, requests) == ["r2", "r0", "r4", "r1", "r3"]

    def test_shortest_prompt_first(self) -> None:
        engine = fake_engine(max_num_seqs=1, order=shortest_prompt_first)
        requests = [request(f"r{i}", [i] * n, max_tokens=2) for i, n in enumerate((90, 40, 8, 60))]
        assert self.served(engine, requests) == ["r2", "r1", "r3", "r0"]

    @pytest.mark.slow
    @pytest.mark.parametrize("order", [by_priority, shortest_prompt_first])
    def test_nobody_waits_for_ever(self, order, monkeypatch) -> None:
        """While better placed requests keep arriving, the worst placed one is served after a bounded number of them."""
        monkeypatch.setattr("quire.engine.policy.ARRIVALS_PER_PRIORITY", 1_000)
        engine = fake_engine(num_blocks=8, max_num_seqs=1, order=order, max_model_len=4000)
        last = request("last", [1] * 20, max_tokens=1)
        last.priority = int(order is by_priority)
        engine.add(last)
        bound = int(last.schedule.sort_key[0]) + 3
        for i in range(bound):
            engine.add(request(f"r{i}", [2], max_tokens=1))
            ended = {event.request_id for event in engine.step() if event.finish_reason is not None}
            if "last" in ended:
                break
        assert "last" in ended

    def test_the_lowest_priority_then_the_youngest_gives_way(self) -> None:
        engine = fake_engine(num_blocks=9, block_size=4, order=by_priority)
        gone: list[str] = []
        plan = engine.scheduler.plan

        def watched():
            planned = plan()
            gone.extend(r.id for r in planned.preempted)
            return planned

        engine.scheduler.plan = watched
        prompts = {"low": [1] * 8, "a": [2] * 8, "b": [3] * 8}
        for name, priority in (("low", 2), ("a", 0), ("b", 0)):
            r = request(name, prompts[name], max_tokens=12)
            r.priority = priority
            engine.add(r)
        results = run(engine)
        assert gone[0] == "low"
        assert "b" in gone[1:]
        assert "a" not in gone
        assert all(tokens == continuation(prompts[name], 12) for name, (tokens, _) in results.items())

    def test_siblings_give_way_together(self) -> None:
        engine = fake_engine(num_blocks=13, block_size=4, num_host_blocks=12)
        units: list[list[str]] = []
        plan = engine.scheduler.plan

        def watched():
            planned = plan()
            if planned.preempted:
                units.append([r.id for r in planned.preempted])
            return planned

        engine.scheduler.plan = watched
        engine.add(request("old", [3] * 14, max_tokens=27))
        group = siblings("s", [4] * 9, 3, max_tokens=9)
        for r in group:
            engine.add(r)
        results = run(engine)
        assert units[0] == ["s-0", "s-1", "s-2"]
        assert results["old"][0] == continuation([3] * 14, 27)
        assert all(results[r.id][0] == continuation([4] * 9, 9) for r in group)


class TestBudget:
    def test_a_long_prompt_does_not_hold_up_those_that_decode(self) -> None:
        """Under a prompt of 32k tokens every other request gets a token in every step, whoever came first."""
        engine = fake_engine(num_blocks=2300, block_size=16, max_model_len=40_000, max_num_batched_tokens=512)
        for i in range(4):
            engine.add(request(f"before{i}", [i], max_tokens=80))
        engine.step()
        engine.add(request("long", [i % VOCAB for i in range(32_000)], max_tokens=1))
        engine.step()
        engine.scheduler.max_num_seqs = 99
        steps = 2
        while "long" in engine.scheduler.requests and steps < 60:
            shown = {event.request_id for event in engine.step() if event.token is not None}
            steps += 1
            assert {f"before{i}" for i in range(4)} <= shown
            assert len(engine.runner.batches[-1].token_ids) == 512  # and the long one all the rest
        assert steps == 60

    def test_those_that_decode_come_before_a_long_prompt_of_a_better_place(self) -> None:
        engine = fake_engine(num_blocks=600, max_model_len=2000, max_num_batched_tokens=64, order=by_priority)
        decoding, urgent = request("decoding", [2], max_tokens=40), request("urgent", [1] * 1500, max_tokens=2)
        decoding.priority = 1
        engine.add(decoding)
        engine.step()
        engine.add(urgent)
        steps = 0
        while urgent.num_generated == 0:
            assert "decoding" in {event.request_id for event in engine.step() if event.token is not None}
            steps += 1
        assert steps == -(-1500 // 63)
