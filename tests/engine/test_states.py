"""Layers that keep a state in the engine: what hits save, beams, guesses, failures, refusals."""

from __future__ import annotations

import random

import pytest
import torch

from quire.cache.groups import AnyGroup, CacheGroup, RowGroup, StateGroup, StatePools
from quire.cache.manager import BlockManager
from quire.engine.beam import BeamSearchParams
from quire.engine.beam_driver import BeamDriver
from quire.engine.engine import Engine
from quire.engine.speculation import PromptLookup, Speculation
from quire.errors import ConfigError
from quire.ops import native
from quire.request import Miss
from tests.engine.fakes import VOCAB, circling, continuation, fake_engine, request, run, siblings
from tests.engine.runs import drain
from tests.engine.stateful import stateful_engine
from tests.marks import spread

NATIVE = pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")  # rows keep their bits
ATTENTION = (CacheGroup((0,)),)
HYBRID = (*ATTENTION, StateGroup((1,), 32), RowGroup((1,), 32))
SMALL = (*ATTENTION, StateGroup((1,), piece=4), RowGroup((1,), piece=4))


def long_engine(groups: tuple[AnyGroup, ...], **options: object) -> Engine:
    sizes = {"num_blocks": 4_000, "block_size": 16, "max_model_len": 1_200, "max_num_seqs": 32}
    pools = StatePools(200, 64)
    return fake_engine(
        groups=groups,
        state_pools=pools,
        state_snapshot_interval=512,
        **(sizes | {"max_num_batched_tokens": 2_048} | options),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("common", "together"), spread(2, [1_024, 1_000, 700], [True, False]))
def test_common_prefixes_are_found_as_with_attention_alone(common: int, together: bool) -> None:
    """At least 95 % of the tokens, whether the prompts come at once or one after the other."""
    stem = [random.Random(1).randrange(VOCAB) for _ in range(common)]
    cached = []
    for groups in (ATTENTION, HYBRID):
        engine = long_engine(groups)
        for i in range(32):
            engine.add(request(f"r{i}", [*stem, i, *[i + 1] * 60], max_tokens=2))
            if not together:
                run(engine)
        results = run(engine)
        if together:
            assert results["r9"][0] == continuation([*stem, 9, *[10] * 60], 2)
        cached.append(engine.scheduler.manager.hits.cached_tokens)
    assert cached[1] >= 0.95 * cached[0]


@pytest.mark.slow
def test_a_conversation_goes_on_where_it_ended() -> None:
    engine = long_engine(HYBRID)
    tokens = [random.Random(2).randrange(VOCAB) for _ in range(100)]
    for turn in range(5):
        r = request(f"turn {turn}", tokens, max_tokens=50)
        engine.add(r)
        run(engine)
        report = r.cache.prefix_report
        assert report.num_cached == (len(tokens) - 20 - 1) // 32 * 32 if turn else report.num_cached == 0
        tokens = [*r.tokens.tolist(), *[turn] * 20]


def test_what_is_missing_is_told() -> None:
    engine = long_engine(HYBRID)
    stem = [random.Random(3).randrange(VOCAB) for _ in range(1_100)]
    engine.add(request("a", stem, max_tokens=2))
    run(engine)
    b = request("b", [*stem[:900], 1, 2, 3], max_tokens=2)
    engine.add(b)
    run(engine)
    assert (b.cache.prefix_report.num_cached, b.cache.prefix_report.miss) == (512, Miss.STATE)
    assert "the state at token 896 was not kept" in str(b.cache.prefix_report)


@pytest.mark.parametrize("length", [3, 4, 7, 8, 9])
def test_samples_of_a_prompt(length: int) -> None:
    engine = fake_engine(groups=SMALL, state_pools=StatePools(30, 16))
    prompt = list(range(length))
    for r in siblings("s", prompt, 4, max_tokens=11):
        engine.add(r)
    assert {tuple(tokens) for tokens, _ in run(engine).values()} == {tuple(continuation(prompt, 11))}


def test_guesses_are_what_would_have_come() -> None:
    drafts = Speculation([PromptLookup()], 5)
    engine = fake_engine(groups=SMALL, state_pools=StatePools(30, 16), speculation=drafts, model=circling)
    prompt = [i % 6 for i in range(13)]
    for i in range(2):
        engine.add(request(f"r{i}", prompt[i:], max_tokens=60))
    results = run(engine)
    assert [results[f"r{i}"][0] for i in range(2)] == [continuation(prompt[i:], 60, model=circling) for i in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_too_few_states_for_all_preempt_and_nothing_is_lost(num_host_blocks: int) -> None:
    pools = StatePools(6, 4, 4 if num_host_blocks else 0)
    engine = fake_engine(groups=SMALL, state_pools=pools, num_host_blocks=num_host_blocks, num_blocks=200)
    prompts = {f"r{i}": [i] * (5 + i) for i in range(8)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=30))
    results = run(engine)
    assert {name: tokens for name, (tokens, _) in results.items()} == {
        name: continuation(prompt, 30) for name, prompt in prompts.items()
    }
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.slow
@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beams_score_the_same_with_and_without_room(dtype: torch.dtype) -> None:
    found = []
    for options in ({"num_blocks": 400}, {"num_blocks": 19, "max_num_batched_tokens": 16}):
        engine = stateful_engine(dtype, block_size=8, max_num_seqs=6, max_model_len=80, **options)
        driver = BeamDriver(engine, "beams", list(range(5, 40)), BeamSearchParams(beam_width=3, max_tokens=9))
        elders = [request(f"elder {i}", list(range(i, 30)), max_tokens=45) for i in range(2)]
        for elder in elders:  # they grow at the beams' cost, where there is no room
            engine.add(elder)
        driver.start()
        while engine.has_work:
            for event in engine.step():
                assert event.error is None, event.error
                if not event.request_id.startswith("elder"):
                    driver.take(event)
            engine.scheduler.audit()
        assert driver.error is None
        assert (engine.scheduler.num_preemptions > 0) == (len(found) > 0)
        found.append(driver.results())
    assert found[0] == found[1]


@NATIVE
@pytest.mark.parametrize("at", [20, 40, 64])
def test_no_state_after_what_is_not_finite_is_left_to_others(at: int) -> None:
    engine = stateful_engine(torch.float32)
    model = engine.runner.model
    model.embedding[7] = float("nan")
    prompt = [1 + i % 5 for i in range(70)]
    prompt[at] = 7
    engine.add(request("broken", prompt, max_tokens=3))
    events = [event for _ in range(5) if engine.has_work for event in engine.step()]
    assert "no finite logit" in events[-1].error
    engine.scheduler.audit()
    assert [len(index) for index in engine.scheduler.manager.indexes[2:]] == [0, 0]
    model.embedding[7] = 0.5
    r = request("again", prompt, max_tokens=3)
    engine.add(r)
    assert drain(engine) == drain(engine_with("again", prompt))
    assert r.cache.prefix_report.num_cached <= at


@pytest.mark.slow
@NATIVE
@pytest.mark.parametrize("options", [{}, {"num_blocks": 19, "max_num_seqs": 6, "max_model_len": 96}])
def test_after_any_delivered_token_the_rest_is_the_same(options: dict[str, object]) -> None:
    """All cuts at once: some fall into a piece of 32 tokens, and one on its edge."""
    sampling = {"max_tokens": 40, "temperature": 0.9, "seed": 5, "logprobs": 2}
    prompt = [3 + i * i % 400 for i in range(45)]
    engine = stateful_engine(torch.bfloat16, block_size=8)
    engine.add(request("whole", prompt, **sampling))
    whole = [(event.token, event.logprobs) for event in drain(engine)["whole"]]
    engine = stateful_engine(torch.bfloat16, block_size=8, **options)
    cuts = range(1, len(whole), 3)
    for cut in cuts:
        resumed = request(str(cut), prompt, **sampling)
        resumed.resume([token for token, _ in whole[:cut]], num_checked=cut % 5)
        engine.add(resumed)
    found: dict[str, list[object]] = {}
    for event in (event for events in drain(engine).values() for event in events):
        assert event.error is None, event.error
        if event.drawn is None:  # else it was drawn to be compared
            found.setdefault(event.request_id, []).append((event.token, event.logprobs))
    assert found == {str(cut): whole[cut:] for cut in cuts}
    assert (engine.scheduler.num_preemptions > 0) == bool(options)


def engine_with(name: str, prompt: list[int]) -> Engine:
    engine = stateful_engine(torch.float32)
    engine.runner.model.embedding[7] = 0.5
    engine.add(request(name, prompt, max_tokens=3))
    return engine


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 5}, "block_size is 5; .* pieces of 32 tokens, so it must be one of 1, 2, 4, 8, 16, 32"),
        ({"state_snapshot_interval": 500}, "state_snapshot_interval is 500; .* such as 480"),
        ({"num_blocks": None, "kv_cache_memory": "64KiB"}, "one sequence of max_model_len=2,048 .* its states take"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stateful_engine(torch.float32, **options)


def test_the_books_without_a_model() -> None:
    """A pool of attention that is not there: the manager serves layers that all keep a state."""
    manager = BlockManager(HYBRID[1:], 0, 16, 99, state_pools=StatePools(9, 9))
    r = request("r", list(range(70)))
    manager.admit(r, manager.lookup.match(r))
    assert manager.grow(r, 70, [])
    manager.advance(r, 70)
    manager.release(r)
    assert [len(index) for index in manager.indexes] == [1, 0]
