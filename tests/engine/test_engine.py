"""Scheduler and engine with a fake model: whatever happens around a request, it gets its own tokens."""

import random

import pytest

from quire.cache.groups import CacheGroup
from quire.engine.engine import Engine
from quire.engine.plan import Plan
from quire.errors import QuireError, RequestError
from quire.request import FinishReason
from tests.engine.fakes import VOCAB, continuation, fake_engine, request, run
from tests.marks import quick

GROUPS = {
    "one group": (CacheGroup((0,)),),
    "two groups": (CacheGroup((0,)), CacheGroup((1,), window=8)),
    "a window only": (CacheGroup((0,), window=5),),
}


def prompts(rng: random.Random, count: int, longest: int = 40) -> list[list[int]]:
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("seed", quick(range(30), 1, 2))
def test_aborts_and_failures_at_any_time_leak_nothing(seed: int) -> None:
    rng = random.Random(seed)
    engine = fake_engine(num_blocks=20, block_size=4, max_num_batched_tokens=rng.choice([4, 16]), max_num_seqs=5)
    expected, tokens, reasons = {}, {}, {}
    for step in range(300):
        if step < 200 and rng.random() < 0.4:
            name, prompt = f"r{step}", prompts(rng, 1, longest=50)[0]
            expected[name] = continuation(prompt, 20)
            engine.add(request(name, prompt, max_tokens=20))
        if expected and rng.random() < 0.1:
            engine.abort(rng.choice(sorted(expected)))
        engine.runner.fail_next = step % 23 == 0
        for event in engine.step():
            if event.token is not None:
                tokens.setdefault(event.request_id, []).append(event.token)
            if event.finish_reason is not None:
                assert event.request_id not in reasons
                reasons[event.request_id] = event.finish_reason
                assert (event.error is not None) == (event.finish_reason is FinishReason.ERROR)
        engine.scheduler.audit()
    engine.runner.fail_next = False
    for name, (_, reason) in run(engine).items():
        reasons[name] = FinishReason(reason)
    assert reasons.keys() == expected.keys()
    assert {FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR} == set(reasons.values())
    for name, got in tokens.items():
        assert got == expected[name][: len(got)]
    assert engine.scheduler.usage().used_blocks == 0


def test_chunked_prefill_and_decode_share_a_step() -> None:
    engine = fake_engine(max_num_batched_tokens=8)
    engine.add(request("short", [1, 2], max_tokens=10))
    engine.step()
    engine.add(request("long", list(range(20)), max_tokens=2))
    engine.step()
    batch = engine.runner.batches[-1]
    assert batch.query_starts.tolist() == [0, 1, 8]
    assert batch.context_lens.tolist() == [3, 7]
    assert batch.logit_ids == ["short"]


def test_a_lone_request_may_fill_the_whole_pool() -> None:
    """The last token is drawn, but takes no slot: 13 prompt tokens and 4 new ones need 16 slots."""
    engine = fake_engine(num_blocks=4, block_size=4)
    engine.add(request("r", list(range(13)), max_tokens=4))
    assert run(engine) == {"r": (continuation(list(range(13)), 4), "length")}


def test_with_a_window_a_request_may_outgrow_the_pool() -> None:
    """100 tokens through 4 blocks of 4: what lies below the window is freed as it goes."""
    engine = fake_engine(num_blocks=4, block_size=4, groups=GROUPS["a window only"], max_num_batched_tokens=8)
    prompt = list(range(50))
    engine.add(request("r", prompt, max_tokens=50))
    assert run(engine) == {"r": (continuation(prompt, 50, window=5), "length")}


def test_a_pool_of_one_block_serves_what_fits_it() -> None:
    engine = fake_engine(num_blocks=1, block_size=4)
    for i in range(5):
        engine.add(request(f"r{i}", [i, i], max_tokens=3))
    assert run(engine) == {f"r{i}": (continuation([i, i], 3), "length") for i in range(5)}


def preempted_ids(engine: Engine) -> list[str]:
    """A list that will hold the id of every request that the engine preempts."""
    ids: list[str] = []
    plan = engine.scheduler.plan

    def watched() -> Plan:
        planned = plan()
        ids.extend(r.id for r in planned.preempted)
        return planned

    engine.scheduler.plan = watched
    return ids


def test_the_youngest_is_preempted_and_the_oldest_goes_on() -> None:
    engine = fake_engine(num_blocks=4, block_size=4)
    for name in ("old", "young"):
        engine.add(request(name, [5, 6, 7, 8], max_tokens=9))
    preempted = preempted_ids(engine)
    expected = continuation([5, 6, 7, 8], 9)
    assert list(run(engine).items()) == [("old", (expected, "length")), ("young", (expected, "length"))]
    assert preempted == ["young"]


def test_a_request_comes_in_only_with_blocks_for_all_of_its_tokens() -> None:
    """With blocks for its first chunk alone it would be preempted again and again, its work lost each time."""
    engine = fake_engine(num_blocks=20, block_size=4, max_num_batched_tokens=16, enable_prefix_caching=False)
    for name, count in (("a", 48), ("b", 40)):
        engine.add(request(name, list(range(30)), max_tokens=count))
    preempted = preempted_ids(engine)
    run(engine)
    assert preempted == ["b"]
    computed = sum(len(batch.token_ids) for batch in engine.runner.batches)
    assert computed < 2 * (30 + 48 + 30 + 40)


def test_requests_are_served_in_the_order_of_arrival() -> None:
    engine = fake_engine(max_num_seqs=1)
    for i in range(4):
        engine.add(request(f"r{i}", [i], max_tokens=2))
    assert list(run(engine)) == ["r0", "r1", "r2", "r3"]


def test_a_request_is_checked_once_unless_it_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, checked = fake_engine(num_blocks=20, block_size=4), []
    check = engine.scheduler.check
    monkeypatch.setattr(engine.scheduler, "check", lambda one: (checked.append(one.id), check(one)))
    plain, resumed = request("a", [1, 2, 3], max_tokens=4), request("b", [4, 5], max_tokens=4)
    for one in (plain, plain, resumed):
        engine.check(one)
    resumed.resume(continuation([4, 5], 1), 0)
    for one in (plain, resumed):
        engine.add(one)
    assert checked == ["a", "b", "b"]
    assert run(engine)["a"] == (continuation([1, 2, 3], 4), "length")
    wrong = request("c", [1], max_tokens=4)
    engine.check(wrong)
    wrong.resume([VOCAB], 0)
    with pytest.raises(RequestError, match="request c: delivered"):
        engine.add(wrong)


class TestRefusedOnArrival:
    def refused(self, match: str, prompt: list[int], **sampling: object) -> None:
        engine = fake_engine(num_blocks=10, block_size=4, max_model_len=100)
        with pytest.raises(RequestError, match=match) as caught:
            engine.add(request("r", prompt, **sampling))
        assert isinstance(caught.value, (QuireError, ValueError))
        assert not engine.has_work

    def test_can_never_fit(self) -> None:
        self.refused(r"30 prompt tokens and up to 12 new ones need 11 KV blocks of 4 tokens, and the cache has 10",
                     [1] * 30, max_tokens=12)  # fmt: skip

    def test_prompt_longer_than_the_model_serves(self) -> None:
        self.refused("prompt of 100 tokens; with max_model_len=100 a prompt may have at most 99", [1] * 100)

    def test_empty_prompt(self) -> None:
        self.refused("empty prompt", [])

    @pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
    def test_token_outside_the_vocabulary(self, token: int) -> None:
        self.refused(rf"prompt\[1\] is {token}; token ids of this model lie in 0\.\.{VOCAB - 1}", [1, token])

    def test_stop_token_outside_the_vocabulary(self) -> None:
        self.refused(rf"stop_token_ids\[0\] is {VOCAB}", [1], stop_token_ids=[VOCAB])

    def test_more_logprobs_than_tokens(self) -> None:
        self.refused(f"logprobs is {VOCAB + 1}; the vocabulary has {VOCAB}", [1], logprobs=VOCAB + 1)

    def test_id_that_is_taken(self) -> None:
        engine = fake_engine()
        engine.add(request("r", [1]))
        with pytest.raises(RequestError, match="'r' is taken"):
            engine.add(request("r", [2]))
        assert len(run(engine)) == 1
        engine.add(request("r", [2]))  # free again


class TestEnding:
    def test_max_tokens(self) -> None:
        engine = fake_engine()
        engine.add(request("r", [1], max_tokens=3))
        assert run(engine) == {"r": (continuation([1], 3), "length")}

    @pytest.mark.parametrize("max_tokens", [None, 10_000])
    def test_the_longest_sequence_that_is_served(self, max_tokens: int | None) -> None:
        engine = fake_engine(max_model_len=30)
        engine.add(request("r", [1] * 25, max_tokens=max_tokens))
        assert run(engine) == {"r": (continuation([1] * 25, 5), "length")}

    def test_stop_token_is_kept_and_told(self) -> None:
        expected = continuation([1], 5)
        engine = fake_engine()
        engine.add(request("r", [1], max_tokens=9, stop_token_ids=[expected[3]]))
        events = [event for _ in range(5) if engine.has_work for event in engine.step()]
        assert [event.token for event in events] == expected[: expected.index(expected[3]) + 1]
        assert (events[-1].finish_reason, events[-1].stop_token) == (FinishReason.STOP, expected[3])

    def test_eos_ends_a_request_unless_ignored(self) -> None:
        expected = continuation([1], 9)
        for ignore_eos, count in ((False, expected.index(expected[4]) + 1), (True, 9)):
            engine = fake_engine(eos=frozenset({expected[4]}))
            engine.add(request("r", [1], max_tokens=9, ignore_eos=ignore_eos))
            assert run(engine) == {"r": (expected[:count], "length" if ignore_eos else "stop")}

    def test_abort_of_a_waiting_a_running_an_ended_and_an_unknown_request(self) -> None:
        engine = fake_engine(max_num_seqs=1)
        for name in ("running", "waiting"):
            engine.add(request(name, [1], max_tokens=5))
        engine.step()
        for name in ("running", "waiting", "unknown"):
            engine.abort(name)
        events = engine.step()
        assert {event.request_id: event.finish_reason for event in events} == {
            "running": FinishReason.ABORT,
            "waiting": FinishReason.ABORT,
        }
        assert not engine.has_work
        engine.abort("running")
        assert engine.step() == []
        engine.scheduler.audit()

    def test_a_failed_step_ends_its_own_requests_only(self) -> None:
        engine = fake_engine(max_num_seqs=2)
        for i in range(3):
            engine.add(request(f"r{i}", [i], max_tokens=2))
        engine.runner.fail_next = True
        events = engine.step()
        assert [(e.request_id, e.finish_reason, e.error) for e in events] == [
            (name, FinishReason.ERROR, "RuntimeError: injected") for name in ("r0", "r1")
        ]
        assert run(engine) == {"r2": (continuation([2], 2), "length")}

    def test_a_row_without_a_finite_logit_ends_its_request_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = fake_engine()
        for name in ("good", "bad"):
            engine.add(request(name, [1, 2], max_tokens=2))
        real = engine.runner.run

        def broken(batch):  # type: ignore[no-untyped-def]
            output = real(batch)
            output.tokens["bad"] = -1
            return output

        monkeypatch.setattr(engine.runner, "run", broken)
        events = engine.step()
        assert [(e.request_id, e.finish_reason) for e in events] == [("good", None), ("bad", FinishReason.ERROR)]
        assert "no finite logit at position 2" in events[1].error


def test_seeds_are_given_or_derived_from_the_order_of_arrival() -> None:
    def seeds(engine_seed: int) -> list[int]:
        engine = fake_engine()
        engine.seed = engine_seed
        requests = [request("a", [1]), request("b", [1], seed=5), request("c", [1])]
        for r in requests:
            engine.add(r)
        return [r.seed for r in requests]

    assert seeds(0) == seeds(0)
    assert seeds(0)[1] == seeds(1)[1] == 5
    assert len({*seeds(0), *seeds(1)}) == 5
    assert all(0 <= seed < 2**63 for seed in seeds(0))
