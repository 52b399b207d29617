"""Calibration: what steps, requests and tokens of a model take on this machine, as a file for `quire simulate`.

Steps are timed in the engine, in rounds in which every kind of step comes once, so that a machine whose speed drifts
spreads its drift over all of them. What a server adds is timed over HTTP, against what the fit says of the steps.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.engine.cost import CostModel, Device, StepWork, cost_of
from quire.engine.plan import Plan
from quire.errors import QuireError
from quire.llm import LLM
from quire.request import Request
from quire.simulate.device import DeviceFile, ReplicaCost, ServerFit, model_digest
from quire.simulate.fitting import fit_steps, nonnegative_least_squares, predicted, residuals
from quire_bench.fleet.running import fleet
from quire_bench.kernels.attention import product_rate, read_rate
from quire_bench.proc import num_cores, processor
from quire_bench.server.client import Run, Server, send
from quire_bench.server.process import server
from quire_bench.server.prompts import random_prompts, request_body
from quire_bench.server.report import latencies
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY, greedy

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (16, 128, 512, 2048)
BETWEEN = (3, 6, 10, 12, 13, 14, 20, 24, 28, 48, 96)  # further sequences, of the shortest context
PROMPTS = (4, 16, 32, 64, 128, 256, 512, 1024, 2048)
MIXED = ((2, 32), (4, 128), (8, 64), (8, 256), (16, 128), (32, 256), (32, 512))  # sequences that decode, and a prompt
STEPS = 10  # of each kind that decodes, in each round
WARM = 4  # steps before them
AGAIN = 3  # times that a prompt is computed, in each round
ROUNDS = 3
MARGIN = 64  # tokens that a sequence may have decoded until all others have their first one
LONGEST_CASE = 2.0  # seconds of computing prompts for a kind of steps: longer ones are left out
STREAMS = (1, 2, 4, 8, 16, 32)  # over HTTP
AGAIN_STREAMS = 3  # times that each of these numbers is measured
TOKENS = 48  # of each of these
SHARED = (2, 8, 16)  # streams at each of two replicas behind a gateway, and at one of them alone
SHARED_PROMPTS = (128, 512)  # tokens of prompts that both of them compute, and one of them alone
AGAIN_SHARED = 2  # times that each of the streams is measured; of the prompts, three times as often
SHORTEST = 1e-6  # seconds: tokens that a busy client reads together have none between them
FIRST_GAPS = 4  # of a stream, in which prompts of others are computed
ASKED = (8, 128, 512)  # tokens of prompts that are asked one by one over HTTP
TIMES = 12
# A chunk for each token, also where a text is held back until its last character is whole.
OPTIONS = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


class Timed(NamedTuple):
    """A step."""

    kind: str
    work: StepWork
    seconds: float


def calibrate(llm: LLM, options: Sequence[str], kind: str, advance: Callable[[], None] = lambda: None) -> DeviceFile:
    """Measure everything. Several minutes.

    llm: without guesses. options: of `quire serve` for the same model. advance: is called for each
    of `PARTS`. Raises QuireError where a request fails, or another process does not get ready.
    """
    threads = torch.get_num_threads()
    model, block_size = cost_of(llm.decoder), llm.config.cache.block_size
    _touch(llm)
    rates = [_rates(threads)]
    advance()
    steps: list[Timed] = []
    for seed in range(ROUNDS):
        steps += _round(llm, CostModel(model, Device("any", 1.0, 1.0, 1.0), block_size), seed)
        advance()
    kinds = _medians(steps)
    fit = fit_steps([one.work for one in kinds], [one.seconds for one in kinds])
    rates.append(_rates(threads))
    read, multiplied = (statistics.fmean(one) for one in zip(*rates, strict=True))
    server = _server(options, ReplicaCost(model, fit, block_size), advance)
    gateway, per_neighbour, reading = _behind_gateway(options, ReplicaCost(model, fit, block_size, server))
    server = replace(server, gateway=gateway)
    advance()
    cases = [
        {"kind": one.kind, "seconds": one.seconds, "predicted": predicted(fit, one.work)} for one in kinds
    ]  # for people
    return DeviceFile(
        kind=kind,
        model=model_digest(model),
        model_name=str(llm.files.path.name),
        block_size=block_size,
        bytes_per_second=read,
        host_bytes_per_second=2 * read / reading,
        per_neighbour=per_neighbour,
        step=fit,
        server=server,
        machine={
            "processor": processor(),
            "cores": num_cores(),
            "threads": threads,
            "backend": llm.backend.name,
            "torch": str(torch.__version__),
            "date": datetime.now(timezone.utc).date().isoformat(),
            "read_bytes_per_second": [one[0] for one in rates],
            "product_flops_per_second": [one[1] for one in rates],
            "mean_product": multiplied,
        },
        residuals=residuals(fit, [one.work for one in kinds], [one.seconds for one in kinds]) | {"cases": cases},
    )


PARTS = 2 + ROUNDS + AGAIN_STREAMS * len(STREAMS) + len(ASKED)


def _touch(llm: LLM) -> None:
    """Let the cache have all of its memory: where a step is the first to use some, the system makes it wait."""
    cache = llm.engine.runner.cache  # type: ignore[attr-defined]
    for group in range(len(llm.decoder.config.groups)):
        for layer in cache.layers(group):
            for tensor in layer.tensors().values():
                tensor.zero_()


def _rates(threads: int) -> tuple[float, float]:
    """Bytes and operations a second that so many threads reach."""
    reads, multiplies = read_rate(threads), product_rate("bfloat16", threads)
    reads(), multiplies()
    return 1e9 * statistics.median(reads() for _ in range(5)), 1e9 * statistics.median(multiplies() for _ in range(5))


# --------------------------------------------------------------------------------------------------- in the engine


def _round(llm: LLM, cost: CostModel, seed: int) -> Iterator[Timed]:
    """Each kind of step, in another order for another seed."""
    longest, rng = llm.decoder.max_model_len, random.Random(seed)
    room = llm.config.max_num_seqs
    cases: list[tuple[int, int, int]] = []  # sequences that decode, their context, tokens of a prompt next to them
    cases += [(s, c, 0) for s in SEQUENCES for c in CONTEXTS if s <= room and c + MARGIN <= longest]
    cases += [(s, CONTEXTS[0], 0) for s in BETWEEN if s <= room and CONTEXTS[0] + MARGIN <= longest]
    cases += [(0, 0, n) for n in PROMPTS if n < longest]
    cases += [(s, 64, n) for s, n in MIXED if s < room and n < longest]
    rng.shuffle(cases)
    a_token = 1e-4
    budget = llm.engine.scheduler.max_num_batched_tokens
    for sequences, context, prompt in cases:
        blocks = sequences * -(-(context + MARGIN) // cost_block(llm)) + -(-(prompt + 2) // cost_block(llm))
        if sequences * context * a_token > LONGEST_CASE or blocks > llm.engine.scheduler.manager.num_blocks:
            continue
        begin = time.perf_counter()
        yield from _case(llm, cost, sequences, context, min(prompt, budget - sequences), rng)
        if sequences * context > 1000:
            a_token = (time.perf_counter() - begin) / (sequences * context)


def cost_block(llm: LLM) -> int:
    """Tokens of a block."""
    return llm.config.cache.block_size


def _case(llm: LLM, cost: CostModel, sequences: int, context: int, prompt: int, rng: random.Random) -> Iterator[Timed]:
    """Steps of one kind."""
    engine = llm.engine
    llm.reset_prefix_cache()
    requests = [_request(f"old-{i}", context, 2**20, rng) for i in range(sequences)]
    try:
        for one in requests:
            engine.add(one)
        while any(not one.num_generated for one in requests):
            _checked(engine.step())
        for _ in range(WARM if sequences else 0):
            _checked(engine.step())
        for _ in range(0 if prompt else STEPS):
            yield _timed(llm, cost, f"decode {sequences} x {context}")
        name = f"prompt {prompt}" if not sequences else f"decode {sequences} and prompt {prompt}"
        for i in range(AGAIN if prompt else 0):
            requests.append(_request(f"new-{i}", prompt, 1, rng))
            engine.add(requests[-1])
            yield _timed(llm, cost, name)
    finally:
        for one in requests:
            engine.abort(one.id)
        while engine.has_work:
            engine.step()


def _request(name: str, length: int, new: int, rng: random.Random) -> Request:
    tokens = array("i", (rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length)))
    return Request(name, tokens, length, greedy(new))


def _timed(llm: LLM, cost: CostModel, kind: str) -> Timed:
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
        _checked(llm.engine.step())
        seconds = time.perf_counter() - start
    finally:
        del scheduler.plan
    return Timed(kind, found[0], seconds)


def _checked(events: Sequence[Any]) -> None:
    if failed := [event.error for event in events if event.error is not None]:
        raise QuireError(f"a request of the calibration failed: {failed[0]}")


def _medians(steps: Sequence[Timed]) -> list[Timed]:
    """Of each kind the median, and the work of the step in the middle of its round."""
    kinds: dict[str, list[Timed]] = {}
    for one in steps:
        kinds.setdefault(one.kind, []).append(one)
    return [
        Timed(kind, sorted(those, key=lambda one: one.work.cache_bytes)[len(those) // 2].work,
              statistics.median(one.seconds for one in those))
        for kind, those in kinds.items()
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------- over HTTP


def _server(options: Sequence[str], cost: ReplicaCost, advance: Callable[[], None]) -> ServerFit:
    """What a server adds to steps and requests."""
    with server(*options) as process:
        target = Server(process.url)
        _asked(target, 4, 32, 8, 4)
        gaps, longest = [], []
        found: dict[int, list[float]] = {}
        for streams in STREAMS * AGAIN_STREAMS:
            found.setdefault(streams, []).append(_gap(target, streams))
            advance()
        for streams, those in found.items():
            took, context = statistics.median(those), 64 + TOKENS // 2
            step = cost.decode_seconds(streams, streams * context) if _plain(cost) else 0.0
            gaps.append((streams, took - step, took))
        for length in ASKED:
            if length + 4 > cost.model.max_model_len:
                advance()
                continue
            run = _asked(target, TIMES, length, 1, 1)
            first = [found.ttft for found in map(latencies, run.records) if found is not None]
            took = statistics.median(first)
            longest.append((length, took - _prompt_seconds(cost, length), took))
            advance()
    step, drawn = _line(gaps)
    request, prompt_token = _line(longest)
    request = max(0.0, request - step - drawn)
    return ServerFit(step=step, drawn=drawn, request=request, prompt_token=prompt_token)


def _gap(server: Server, streams: int) -> float:
    """Mean seconds between tokens of streams that all decode, the longest gaps left out."""
    run = _asked(server, streams, 64, TOKENS, streams)
    each = [gap for found in map(latencies, run.records) if found is not None for gap in found.gaps[FIRST_GAPS:]]
    return statistics.fmean(sorted(each)[: len(each) * 98 // 100])


def _behind_gateway(options: Sequence[str], cost: ReplicaCost) -> tuple[float, float, float]:
    """Seconds that a gateway adds to a request, to the first token; and what two replicas behind it cost one another.

    The latter is how much longer steps take while both compute, as a share, and how many times as long reading takes
    besides. A gateway and clients are on the machine, too, and all of them share its cores. Everything is asked both
    ways in turns, so that a machine whose speed drifts does not count.
    """
    fit, points = cost.fit, []  # share of reading in a step, and how many times as long it took
    with fleet(2, *options, threads=torch.get_num_threads()) as running:
        gateway, alone = Server(running.url), Server(running.replicas[0].url)
        for target in (gateway, alone, Server(running.replicas[1].url)):
            _asked(target, 4, 32, 8, 4)
        through, direct = partial(_ttft, gateway, ASKED[0], 1), partial(_ttft, alone, ASKED[0], 1)
        added = _more(through, direct, TIMES)[0]
        for streams in SHARED if _plain(cost) else ():
            both, one = partial(_gap, gateway, 2 * streams), partial(_gap, alone, streams)
            ratio = _more(both, one, AGAIN_SHARED)[1]
            keys = streams * (64 + TOKENS // 2)
            read = fit.weight_byte * cost.model.weight_bytes(streams) + fit.cache_byte * keys * cost.kv_bytes
            points.append((read / cost.decode_seconds(streams, keys), ratio))
        for length in SHARED_PROMPTS:
            if length + 4 <= cost.model.max_model_len:
                ratio = _more(partial(_ttft, gateway, length, 2), partial(_ttft, gateway, length, 1), 3 * AGAIN_SHARED)[
                    1
                ]
                points.append((0.0, ratio))  # reading overlaps with multiplying
    a = np.array([[1.0, share] for share, _ in points])
    per_neighbour, longer = nonnegative_least_squares(a, np.array([ratio - 1 for _, ratio in points]))
    return max(0.0, added), float(per_neighbour), 1.0 + float(longer)


def _more(one: Callable[[], float], other: Callable[[], float], times: int) -> tuple[float, float]:
    """How much more the median of one is than that of the other, and how many times as much; in turns."""
    found = [(one(), other()) for _ in range(times)]
    more, less = (statistics.median(those) for those in zip(*found, strict=True))
    return more - less, more / max(less, SHORTEST)


def _ttft(server: Server, length: int, at_a_time: int) -> float:
    """Mean seconds to the first token of so many prompts at once."""
    run = _asked(server, at_a_time, length, 1, at_a_time)
    return statistics.fmean(one.ttft for one in map(latencies, run.records) if one is not None)


def _plain(cost: ReplicaCost) -> bool:
    return all(getattr(group, "window", 1) is None for group in cost.model.groups)


def _prompt_seconds(cost: ReplicaCost, length: int) -> float:
    """Of the step that computes a prompt."""
    from quire.engine.plan import PlanItem
    from quire.request import SamplingParams

    request = Request("prompt", array("i", bytes(4 * length)), length, SamplingParams())
    return cost.seconds(Plan([PlanItem(request, 0, length)], num_tokens=length), 1)


def _line(points: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """The line through them, neither part of which is negative. points: x, y, and how far off y may be."""
    weights = [1.0 / max(off, SHORTEST) for _, _, off in points]
    a = np.array([[weight, x * weight] for (x, _, _), weight in zip(points, weights, strict=True)])
    found = nonnegative_least_squares(a, np.array([y * w for (_, y, _), w in zip(points, weights, strict=True)]))
    return float(found[0]), float(found[1])


def _asked(server: Server, count: int, length: int, new: int, at_a_time: int) -> Run:
    """Send that many requests. Raises QuireError where one fails."""
    seed = random.randrange(2**30)
    bodies = [request_body(one, "completions", "", OPTIONS) for one in random_prompts(count, length, new, seed)]
    run = send(server, bodies, [0.0] * count, at_a_time)
    for record in run.records:
        if not record.completed:
            raise QuireError(f"a request of the calibration failed: {record.error}")
    return run
