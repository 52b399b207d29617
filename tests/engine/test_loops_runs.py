"""The overlapped loop in random runs with aborts at any time, and with real models: the same bits as one by one."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.engine import Engine
from quire.engine.flatten import Buffers
from quire.engine.graphs import GraphRunner
from quire.engine.loops import OverlappedLoop
from quire.engine.plan import Plan
from quire.engine.runner import Runner
from quire.models.batch import Batch
from quire.ops import native
from quire.request import Event, Request, SamplingParams
from tests.engine.fakes import LaterRunner
from tests.engine.runs import whole
from tests.engine.test_graphs import Twin, asked
from tests.engine.test_random_runs import MAX_MODEL_LEN, RARE, RandomRun
from tests.marks import quick, spread
from tests.models.checkpoints import engine, save

pytestmark = pytest.mark.slow

SEEDS, LONG_SEEDS, SHARDS = 200, 2_000, 4
SEEN = """
preempted, swapped out, swapped in, copied, found a prefix, refused, failed, embedded, scored
aborted waiting, aborted running, aborted swapped, aborted under way, planned ahead, forked
""".replace("\n", ", ").strip(", ").split(", ")  # fmt: skip


class OverlappedRun(RandomRun):
    """A random run whose steps overlap, on a device that computes as late as can be."""

    may_have_disk = False  # that is for CPUs, where steps do not overlap

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        super().__init__(seed, seen, checked=True)
        scheduler, manager = self.scheduler, self.scheduler.manager
        self.runner: LaterRunner = LaterRunner(
            manager.num_blocks,
            manager.block_size,
            self.groups,
            manager.host_pools[0].num_blocks,
            state_pools=manager.state_pools,
        )
        limits = (scheduler.max_num_batched_tokens, scheduler.max_num_seqs, -(-MAX_MODEL_LEN // manager.block_size))
        self.buffers, self.twin = (Buffers(self.groups, manager.block_size, *limits) for _ in range(2))
        self.loop = OverlappedLoop()
        self.under_way: Plan | None = None
        self.fault_rate, self.failure_rate = self.failure_rate, 0.0  # a step fails in the runner
        plan, plan_ahead = scheduler.plan, scheduler.plan_ahead

        def planned() -> Plan:
            self.count(found := plan())
            return found

        def planned_ahead(before: Plan) -> Plan | None:
            if (found := plan_ahead(before)) is not None:
                self.count(found)
                seen["planned ahead"] += 1
            return found

        scheduler.plan, scheduler.plan_ahead = planned, planned_ahead  # type: ignore[method-assign]

    def flatten(self, plan: Plan) -> Batch:
        return self.laid_out(plan)

    def step(self) -> list[Event]:
        under_way = self.under_way
        if under_way is not None and self.rng.random() < self.abort_rate:
            self.abort(self.rng.choice(under_way.items).request, "under way")
        if self.rng.random() < self.fault_rate:
            self.runner.fail_next = True
            self.seen["failed"] += 1
        events = self.loop.step(self)
        self.num_steps += 1
        return events


@pytest.mark.parametrize("shard", quick(range(SHARDS), 1, 1))
def test_random_runs(shard: int, long: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(shard, LONG_SEEDS if long else SEEDS, SHARDS):
        one = OverlappedRun(seed, seen)
        one.scheduler.manager.listeners.append(lambda event: seen.update(forked=type(event).__name__ == "BlocksForked"))
        try:
            one.go()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert not [what for what in SEEN if not seen[what] and (long or what not in RARE)]


# ------------------------------------------------------------------------------------------------- real models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    changes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 300}
    save(directory, "Llama", torch.bfloat16, **changes)
    return directory


def requests(count: int) -> list[Request]:
    """All kinds of sampling that need no token on the host; some end at a token, which is seen a step late."""
    rng = random.Random(count)
    made = asked(rng, count)
    for i, request in enumerate(made):
        request.sampling = replace(
            request.sampling,
            repetition_penalty=1.0,
            frequency_penalty=0.0,
            stop_token_ids=rng.sample(range(300), 20) if i % 3 == 0 else None,
        )
    return made


@pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")
@pytest.mark.parametrize(
    ("options", "graphs"),
    spread(
        2,
        [
            {"num_blocks": 200},
            {"num_blocks": 14, "block_size": 8, "max_num_seqs": 11},
            {"num_blocks": 14, "block_size": 8, "preemption": "swap", "swap_space": "8MiB"},
            {"num_blocks": 200, "max_num_batched_tokens": 5, "max_num_seqs": 5},
        ],
        [False, True],
    ),
)
def test_the_same_bits(model: Path, options: dict[str, Any], graphs: bool) -> None:
    """Tokens that were drawn are put into the next step's inputs where the model reads them."""
    served, filled = engine(model, **options), 0
    eager = served.runner
    assert isinstance(eager, Runner)
    if graphs:
        served.runner = GraphRunner(eager, eager.plans[0].max_seqs, eager.plans[0].max_blocks, Twin())
    served.loop = OverlappedLoop()
    fill_in = eager.fill_in

    def watched(batch: Batch, token_ids: torch.Tensor) -> None:
        nonlocal filled
        filled += len(batch.drawn.request_ids)
        token_ids[batch.drawn.rows] = -(2**40)  # reading what the host has there fails
        fill_in(batch, token_ids)

    eager.fill_in = watched  # type: ignore[method-assign]

    def told(served: Engine) -> dict[str, tuple[list[Any], list[Any]]]:
        """What each request is told. How its prompt is cut among steps depends on the others."""
        return {
            name: (
                [(event.token, event.logprobs, event.finish_reason) for event in events if event.token is not None],
                [one for event in events for one in event.prompt_logprobs],
            )
            for name, events in whole(served, requests(24)).items()
        }

    assert told(served) == told(engine(model, **options))
    assert filled > 20


def test_a_token_that_was_not_drawn_is_computed_as_another_one(model: Path) -> None:
    """Its request ends; but no embedding has a row of that number."""
    served = engine(model)
    runner = served.runner
    assert isinstance(runner, Runner)
    served.loop = OverlappedLoop()
    logits, steps = runner.model.logits, iter(range(100))

    def overflowing(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        if next(steps) == 2:
            found[0] = torch.nan
        return found

    runner.model.logits = overflowing  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    made = [Request(name, array("i", [1, 2, i]), 3, params) for i, name in enumerate("ab")]
    for request in made:
        served.add(request)
    errors = [event.error for _ in range(12) for event in served.step() if event.finish_reason is not None]
    assert errors == ["the model gave no finite logit at position 5", None]
    assert [request.num_generated for request in made] == [2, 9]
