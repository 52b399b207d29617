"""Kinds of steps of an engine, each timed several times."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from quire.engine.cost import CostModel, StepWork
from quire.engine.plan import Plan
from quire.errors import QuireError
from quire.frontend.llm import LLM
from quire.request import Request
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY, greedy

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (16, 64, 128, 256, 1024)
BETWEEN = (3, 6, 10, 12, 13, 14, 17, 20, 24, 28, 48, 96)  # further sequences, of the shortest context
PROMPTS = (  # most are no multiples of 4, 12 or 16
    4, 16, 32, 45, 61, 74, 87, 99, 112, 125, 138, 160, 187, 213, 240, 265, 310, 350, 390, 450, 512, 640, 768, 1024, 2048
)  # fmt: skip
SEVERAL = (  # prompts in one step, with as many rows as one of PROMPTS: they separate attention from linears
    (2, 80), (5, 53), (3, 130), (3, 150), (8, 64), (5, 128), (2, 384), (4, 256)
)  # fmt: skip
MIXED_CONTEXT = 128
MIXED = (  # sequences that decode, and a prompt: with more than 60 rows, as many as one of PROMPTS
    (2, 32), (3, 51), (8, 66), (6, 93), (4, 134), (16, 122), (12, 175), (8, 257), (16, 374), (32, 233), (32, 480)
)  # fmt: skip
CACHED = ((256, 61), (256, 187), (512, 138), (1024, 61), (1024, 265))  # tokens of a prompt in the cache, and after them
STEPS = 8  # of each kind that decodes, in each round
WARM = 4  # steps before them
AGAIN = 3  # times that a prompt is computed, in each round
LONG = 512  # tokens of prompts that are computed once a round
MARGIN = 64  # tokens that a sequence may have decoded until all others have their first one
LONGEST_CASE = 1.0  # seconds of computing prompts for a kind of steps: longer ones are left out


class Case(NamedTuple):
    """A kind of step."""

    sequences: int = 0  # that decode
    context: int = 0  # tokens that these have in the middle: half of it to half more
    prompt: int = 0  # tokens of each prompt that is computed
    prompts: int = 1


class Timed(NamedTuple):
    """A step."""

    kind: str
    work: StepWork
    seconds: float


def one_round(llm: LLM, cost: CostModel, seed: int) -> Iterator[Timed]:
    """Each kind of step, in another order for another seed."""
    longest, rng = llm.decoder.max_model_len, random.Random(seed)
    room, budget = llm.config.max_num_seqs, llm.engine.scheduler.max_num_batched_tokens
    cases = [Case(s, c) for s in SEQUENCES for c in CONTEXTS if s <= room and 2 * c + MARGIN <= longest]
    cases += [Case(s, CONTEXTS[0]) for s in BETWEEN if s <= room and 2 * CONTEXTS[0] + MARGIN <= longest]
    cases += [Case(prompt=n) for n in PROMPTS if n < longest]
    cases += [Case(prompt=n, prompts=m) for m, n in SEVERAL if m <= room and n < longest and m * n <= budget]
    cases += [Case(s, MIXED_CONTEXT, n) for s, n in MIXED if s < room and max(n, 2 * MIXED_CONTEXT + MARGIN) < longest]
    rng.shuffle(cases)
    a_token = 1e-4
    for case in cases:
        tokens = case.sequences * case.context
        blocks = case.sequences * -(-(case.context + MARGIN) // cost_block(llm))
        blocks += case.prompts * -(-(case.prompt + 2) // cost_block(llm))
        if tokens * a_token > LONGEST_CASE or blocks > llm.engine.scheduler.manager.num_blocks:
            continue
        begin = time.perf_counter()
        yield from _steps(llm, cost, case._replace(prompt=min(case.prompt, budget - case.sequences)), rng)
        if tokens > 1000:
            a_token = (time.perf_counter() - begin) / tokens
    for cached, new in CACHED:
        if cached + new < longest:
            yield from _cached_case(llm, cost, cached, new, rng)


def cost_block(llm: LLM) -> int:
    """Tokens of a block."""
    return llm.config.cache.block_size


def _steps(llm: LLM, cost: CostModel, case: Case, rng: random.Random) -> Iterator[Timed]:
    """Steps of one kind."""
    sequences, context, prompt, prompts = case
    between = context / max(1, sequences)
    with decoding(llm, [int((context + between) / 2 + i * between) for i in range(sequences)], rng):
        for _ in range(WARM if sequences else 0):
            checked(llm.engine.step())
        for _ in range(0 if prompt else STEPS):
            yield timed(llm, cost, f"decode {sequences} x {context}")
        name = f"prompt {prompt}" if prompts == 1 else f"{prompts} prompts {prompt}"
        for _ in range(0 if not prompt else 1 if prompt * prompts >= LONG else AGAIN):
            for i in range(prompts):
                llm.engine.add(new_request(f"new-{i}", prompt, 1, rng))
            yield timed(llm, cost, name if not sequences else f"decode {sequences} and {name}")


def _cached_case(llm: LLM, cost: CostModel, cached: int, new: int, rng: random.Random) -> Iterator[Timed]:
    """Steps that compute a prompt the beginning of which is in the cache."""
    first = new_request("first", cached, 1, rng)
    llm.engine.add(first)
    while llm.engine.has_work:
        checked(llm.engine.step())
    for i in range(AGAIN):
        tokens = first.tokens[:cached] + new_request("more", new, 1, rng).tokens
        llm.engine.add(Request(f"next-{i}", tokens, len(tokens), greedy(1)))
        yield timed(llm, cost, f"prompt {new} after {cached}")
        while llm.engine.has_work:
            checked(llm.engine.step())


@contextmanager
def decoding(llm: LLM, contexts: Sequence[int], rng: random.Random) -> Iterator[None]:
    """Sequences of so many tokens decode. At the end nothing runs."""
    engine = llm.engine
    llm.reset_prefix_cache()
    requests = [new_request(f"old-{i}", context, 2**20, rng) for i, context in enumerate(contexts)]
    try:
        for one in requests:
            engine.add(one)
        while any(not one.num_generated for one in requests):
            checked(engine.step())
        yield
    finally:
        for name in list(engine.scheduler.requests):
            engine.abort(name)
        while engine.has_work:
            engine.step()


def new_request(name: str, length: int, new: int, rng: random.Random) -> Request:
    """With a prompt that no other one has."""
    tokens = array("i", (rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length)))
    return Request(name, tokens, length, greedy(new))


def timed(llm: LLM, cost: CostModel, kind: str) -> Timed:
    """The next step."""
    scheduler, found = llm.engine.scheduler, []
    real = scheduler.plan

    def noted() -> Plan:
        plan = real()
        found.append(cost.work_of(plan, sum(item.samples for item in plan.items)))
        return plan

    scheduler.plan = noted  # type: ignore[method-assign]
    try:
        start = time.perf_counter()
        checked(llm.engine.step())
        seconds = time.perf_counter() - start
    finally:
        del scheduler.plan
    return Timed(kind, found[0], seconds)


def checked(events: Sequence[Any]) -> None:
    """Raise QuireError where a request has failed."""
    if failed := [event.error for event in events if event.error is not None]:
        raise QuireError(f"a request of the calibration failed: {failed[0]}")


def medians(steps: Sequence[Timed]) -> list[Timed]:
    """Return the median of each kind, with the work of the step in the middle of its round."""
    kinds: dict[str, list[Timed]] = {}
    for one in steps:
        kinds.setdefault(one.kind, []).append(one)
    return [
        Timed(kind, sorted(those, key=lambda one: one.work.cache_bytes)[len(those) // 2].work,
              statistics.median(one.seconds for one in those))
        for kind, those in kinds.items()
    ]  # fmt: skip
