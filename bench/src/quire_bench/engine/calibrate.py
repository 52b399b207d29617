"""Calibration: what steps, requests and tokens of a model take on this machine, as a file for `quire simulate`.

Steps are timed in the engine, in rounds in which every kind of step comes once, so that a machine whose speed drifts
spreads its drift over all of them. What a server adds to a step and to a request is timed over HTTP, in turns with the
same in the engine; what it adds for each token and for each request that comes, by its own steps under load.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.engine.cost import CostModel, Device, ModelCost, StepWork, cost_of, model_cost
from quire.engine.plan import Plan
from quire.engine.trace import TraceRow
from quire.errors import ConfigError, QuireError
from quire.llm import LLM
from quire.models import expected_weight_bytes, read_config
from quire.request import Request
from quire.simulate.device import DeviceFile, ReplicaCost, ServerFit, model_digest
from quire.simulate.fitting import fit_steps, nonnegative_least_squares, predicted, residuals
from quire.simulate.loads import drawn
from quire.simulate.spec import Lengths
from quire_bench.fleet.giving import GivenBlocks
from quire_bench.fleet.replaying import (
    BLOCK,
    OPTIONS,
    Serving,
    Sizes,
    alone,
    behind_gateway,
    seconds_of,
    sent,
    simulated,
)
from quire_bench.fleet.running import Replica
from quire_bench.fleet.speed import SHORTEST, Probes, at_speed, mean, probed, server_token
from quire_bench.fleet.steps_seen import step_seconds, steps_seen
from quire_bench.kernels.attention import product_rate, read_rate
from quire_bench.proc import num_cores, processor
from quire_bench.server.client import Record, Run, Server, send
from quire_bench.server.process import server
from quire_bench.server.prompts import random_prompts, request_body
from quire_bench.server.report import latencies
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY, greedy

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (16, 64, 128, 256, 1024)  # tokens that these have in the middle: half of it to half more
BETWEEN = (3, 6, 10, 12, 13, 14, 17, 20, 24, 28, 48, 96)  # further sequences, of the shortest context
PROMPTS = (4, 16, 32, 61, 74, 99, 138, 187, 265, 390, 512, 1024, 2048)  # most are no multiples of 4, 12 or 16
MIXED_CONTEXT = 128  # tokens, as CONTEXTS
MIXED = (  # sequences that decode, and a prompt
    (2, 32), (3, 51), (8, 70), (6, 93), (4, 121), (16, 120), (12, 185), (8, 250), (32, 256), (32, 512)
)  # fmt: skip
CACHED = ((256, 64), (256, 192), (512, 128), (1024, 64), (1024, 256))  # tokens of a prompt in the cache, and after them
STEPS = 10  # of each kind that decodes, in each round
WARM = 4  # steps before them
AGAIN = 3  # times that a prompt is computed, in each round
LONG = 512  # tokens of prompts that are computed once a round
ROUNDS = 3
MARGIN = 64  # tokens that a sequence may have decoded until all others have their first one
LONGEST_CASE = 2.0  # seconds of computing prompts for a kind of steps: longer ones are left out
AGAIN_STREAM = 5  # times that a stream is timed over HTTP
TOKENS = 36  # of its answer
LOADED = 64  # requests for each replica, to find how long steps take where others come and end
TOGETHER = 0.2  # of a stream's step, within which a client has all tokens of a step
OTHERS = 0.02  # of the steps, those that are farthest from what is found of all of them: they are of other programs
LEAST_SEEN = 8  # steps that compute a prompt next to others, of which it is found what that costs
HURRY = 0.8  # of the time that they take all at once, in which they come
FEWEST = 8  # of these, where LOADED would take longer than
LONGEST_LOAD = 20.0  # seconds
# Times that they are sent to one replica, to each of two others, as their memory lies elsewhere, and to these together.
AGAIN_ALONE, AGAIN_APART, AGAIN_LOADED = 1, 2, 3
AGAIN_GATEWAY = 3  # times that a gateway is measured
LOADED_PROMPT = Lengths(median=192, spread=0.7, least=16, most=448)
LOADED_ANSWER = Lengths(median=24, spread=0.7, least=4, most=96)
BUSY_STREAMS, BUSY_TOKENS, BUSY_TIMES = 4, 160, 40  # at each replica that is busy, and short prompts meanwhile
STEPS_TO_FIRST = 1.5  # that a short prompt takes: half of the one under way, and its own
LONGEST = 640  # tokens that a model must be able to have in a sequence for that
TURNS, SETTLED = 20, 1e-3  # in which what neighbours cost is found, and the share by which it may be wrong
FIRST_GAPS = 4  # of a stream, in which prompts of others are computed
ASKED = (8, 128, 512)  # tokens of prompts that are asked one by one over HTTP
TIMES = 12


class Timed(NamedTuple):
    """A step."""

    kind: str
    work: StepWork
    seconds: float


def calibrate(llm: LLM, options: Sequence[str], kind: str, advance: Callable[[], None] = lambda: None) -> DeviceFile:
    """Measure everything. Several minutes.

    llm: without guesses. options: of `quire serve` for the same model. advance: is called for each of `PARTS`.
    Raises ConfigError for a model that cannot be simulated as it is loaded, QuireError where a request fails, or
    another process does not get ready.
    """
    path, threads = llm.files.path, torch.get_num_threads()
    model, block_size = cost_of(llm.decoder), llm.config.cache.block_size
    simulated_as = model_cost(*read_config(path), expected_weight_bytes(path))
    if model_digest(model) != model_digest(simulated_as):
        raise ConfigError(f"{path} is loaded as {llm.decoder.dtype}; fleets are simulated with the dtype of its files")
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
    server = _server(options, llm, advance)
    cases = [
        {"kind": one.kind, "seconds": one.seconds, "predicted": predicted(fit, one.work)} for one in kinds
    ]  # for people
    device = DeviceFile(
        kind=kind,
        model=model_digest(model),
        model_name=path.name,
        block_size=block_size,
        bytes_per_second=read,
        host_bytes_per_second=2 * read,
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
    if llm.decoder.max_model_len >= LONGEST:
        device = _under_load(device, options, llm)
    advance()
    return device


PARTS = 3 + ROUNDS + len(ASKED)


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
    cases += [(s, c, 0) for s in SEQUENCES for c in CONTEXTS if s <= room and 2 * c + MARGIN <= longest]
    cases += [(s, CONTEXTS[0], 0) for s in BETWEEN if s <= room and 2 * CONTEXTS[0] + MARGIN <= longest]
    cases += [(0, 0, n) for n in PROMPTS if n < longest]
    cases += [(s, MIXED_CONTEXT, n) for s, n in MIXED if s < room and max(n, 2 * MIXED_CONTEXT + MARGIN) < longest]
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
    for cached, new in CACHED:
        if cached + new < longest:
            yield from _cached_case(llm, cost, cached, new, rng)


def cost_block(llm: LLM) -> int:
    """Tokens of a block."""
    return llm.config.cache.block_size


def _case(llm: LLM, cost: CostModel, sequences: int, context: int, prompt: int, rng: random.Random) -> Iterator[Timed]:
    """Steps of one kind."""
    between = context / max(1, sequences)
    with _decoding(llm, [int((context + between) / 2 + i * between) for i in range(sequences)], rng):
        for _ in range(WARM if sequences else 0):
            _checked(llm.engine.step())
        for _ in range(0 if prompt else STEPS):
            yield _timed(llm, cost, f"decode {sequences} x {context}")
        name = f"prompt {prompt}" if not sequences else f"decode {sequences} and prompt {prompt}"
        for i in range(0 if not prompt else 1 if prompt >= LONG else AGAIN):
            llm.engine.add(_request(f"new-{i}", prompt, 1, rng))
            yield _timed(llm, cost, name)


def _cached_case(llm: LLM, cost: CostModel, cached: int, new: int, rng: random.Random) -> Iterator[Timed]:
    """Steps that compute a prompt the beginning of which is in the cache."""
    first = _request("first", cached, 1, rng)
    llm.engine.add(first)
    while llm.engine.has_work:
        _checked(llm.engine.step())
    for i in range(AGAIN):
        tokens = first.tokens[:cached] + _request("more", new, 1, rng).tokens
        llm.engine.add(Request(f"next-{i}", tokens, len(tokens), greedy(1)))
        yield _timed(llm, cost, f"prompt {new} after {cached}")
        while llm.engine.has_work:
            _checked(llm.engine.step())


@contextmanager
def _decoding(llm: LLM, contexts: Sequence[int], rng: random.Random) -> Iterator[None]:
    """Sequences of so many tokens decode. At the end nothing runs."""
    engine = llm.engine
    llm.reset_prefix_cache()
    requests = [_request(f"old-{i}", context, 2**20, rng) for i, context in enumerate(contexts)]
    try:
        for one in requests:
            engine.add(one)
        while any(not one.num_generated for one in requests):
            _checked(engine.step())
        yield
    finally:
        for name in list(engine.scheduler.requests):
            engine.abort(name)
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


def _server(options: Sequence[str], llm: LLM, advance: Callable[[], None]) -> ServerFit:
    """What a server adds to steps and requests.

    The same is timed over HTTP and in the engine, in turns: within a minute a machine's speed drifts by more than what
    is looked for.
    """
    later: dict[int, list[tuple[float, float]]] = {}  # by tokens: by how many seconds, and of how many
    with server(*options) as process:
        target = Server(process.url)
        _asked(target, 4, 32, 8, 4)
        step = max(0.0, statistics.median(_gap(target) - _own_gap(llm) for _ in range(AGAIN_STREAM)))
        advance()
        for length in ASKED:
            for _ in range(TIMES if length + 4 <= llm.decoder.max_model_len else 0):
                took = _ttft(target, length)
                later.setdefault(length, []).append((took - _own_prompt(llm, length), took))
            advance()
    request, prompt_token = _line(later)
    return ServerFit(step=step, request=max(0.0, request - step), prompt_token=prompt_token)


def _own_gap(llm: LLM) -> float:
    """What `_gap` measures, without a server."""
    took = []
    with _decoding(llm, [64], random.Random()):
        for _ in range(TOKENS - 1):
            start = time.perf_counter()
            _checked(llm.engine.step())
            took.append(time.perf_counter() - start)
    return _mean_gap(took[FIRST_GAPS:])


def _own_prompt(llm: LLM, length: int) -> float:
    """Seconds of the step that computes a prompt."""
    llm.engine.add(_request("prompt", length, 1, random.Random()))
    start = time.perf_counter()
    while llm.engine.has_work:
        _checked(llm.engine.step())
    return time.perf_counter() - start


def _gap(server: Server) -> float:
    """Mean seconds between tokens of a stream, the longest gaps left out."""
    each = [gap for found in map(latencies, _asked(server, 1, 64, TOKENS, 1).records) if found for gap in found.gaps]
    return _mean_gap(each[FIRST_GAPS:])


def _mean_gap(gaps: Sequence[float]) -> float:
    """The mean, the longest ones left out: they are of other programs."""
    return statistics.fmean(sorted(gaps)[: len(gaps) * 98 // 100])


# Under load steps wait for event loops, which read requests and write tokens, and for clients and gateways, which have
# cores as well. That is less than what processes with the same model differ by: their memory lies elsewhere. So it is
# found from the steps of a server next to what probes of the same server say of them.


class _Loaded(NamedTuple):
    """One run of requests."""

    seconds: float
    probes: Probes  # around it
    records: Sequence[Record]


class _Load(NamedTuple):
    """Requests, at so many replicas, behind a gateway where there are several."""

    replicas: int
    sizes: Sizes
    rows: Sequence[TraceRow]
    model: ModelCost
    path: str  # of the model

    def seconds(self, device: DeviceFile) -> float:
        """What they are simulated to take, all together."""
        gateways = 0 if self.replicas == 1 else 1
        return simulated(self.replicas, gateways, self.sizes, self.rows, device, self.path).seconds

    def compared(self, device: DeviceFile, runs: Sequence[_Loaded]) -> float:
        """How many times as long they took as simulated at the speed that was measured around each: the median."""
        says = [self.seconds(at_speed(device, self.model, self.replicas, one.probes)) for one in runs]
        return statistics.median(one.seconds / seconds for one, seconds in zip(runs, says, strict=True))

    def under_load(self, device: DeviceFile, runs: Sequence[_Loaded]) -> DeviceFile:
        """The device, with what one replica adds to a step for each token, for each request that comes, and to all.

        The latter two are 0 where fewer than LEAST_SEEN steps were seen that compute a prompt next to others.
        """
        token = statistics.median(server_token(device, self.model, run.probes) for run in runs)
        # What is added to a step was timed with a stream, which has a token in each.
        server = replace(device.server, drawn=token, step=max(0.0, device.server.step - token))
        found: list[tuple[float, ...]] = []
        device = replace(device, server=server)
        for run in runs:
            at = at_speed(device, self.model, self.replicas, run.probes)
            cost = ReplicaCost(self.model, at.step, at.block_size, at.server)
            for step in steps_seen(run.records, TOGETHER * run.probes.stream):
                says = step_seconds(cost, step.keys, step.prompts)
                several = float(len(step.keys) + len(step.prompts) > 1)
                found.append((step.seconds / says - 1, several, step.came / says, len(step.prompts) / says))
        seen = sum(one[-1] > 0 for one in found)
        device = replace(device, machine={**device.machine, "prompts_seen": seen})
        if seen < LEAST_SEEN:
            return device
        loaded, came, begun = _without_others(np.array(found))
        server = replace(server, arrival=max(0.0, came + begun), loaded=max(0.0, loaded))
        return replace(device, server=server)

    def next_to_another(self, device: DeviceFile, runs: Sequence[_Loaded], apart: float) -> DeviceFile:
        """The device, with what replicas that compute cost one another.

        apart: how many times as long as simulated each of them took for a load by itself, which is no neighbour's.
        A larger share lets less of what streams at all of them took be for reading. So it is found in turns.
        """
        for _ in range(TURNS):
            before = device.per_neighbour
            ratio = self.compared(device, runs) / apart
            device = replace(device, per_neighbour=max(0.0, (1 + before) * ratio - 1))
            if abs(device.per_neighbour - before) < SETTLED:
                break
        together = at_speed(device, self.model, self.replicas, mean([one.probes for one in runs]))
        return replace(device, host_bytes_per_second=together.host_bytes_per_second)


def _without_others(found: NDArray[np.float64]) -> tuple[float, ...]:
    """What the first column is made of, by the others: least squares, without the rows that fit least."""
    parts = np.linalg.lstsq(found[:, 1:], found[:, 0], rcond=None)[0]
    off = np.abs(found[:, 0] - found[:, 1:] @ parts)
    kept = found[off <= np.quantile(off, 1 - OTHERS)]
    return tuple(map(float, np.linalg.lstsq(kept[:, 1:], kept[:, 0], rcond=None)[0]))


def _load(replicas: int, device: DeviceFile, llm: LLM) -> _Load:
    """LOADED requests for each replica, or as many of them as take no longer than LONGEST_LOAD."""
    rng, count = random.Random(replicas), LOADED
    rows = [TraceRow(0.0, drawn(rng, LOADED_PROMPT), drawn(rng, LOADED_ANSWER)) for _ in range(replicas * LOADED)]
    model, path = cost_of(llm.decoder), str(llm.files.path.absolute())
    load = _Load(replicas, _sizes(llm, rows), rows, model, path)
    while (seconds := load.seconds(device)) > LONGEST_LOAD and count > FEWEST:
        count //= 2
        load = _Load(replicas, _sizes(llm, rows[: replicas * count]), rows[: replicas * count], model, path)
    between = HURRY * seconds / len(load.rows)
    return load._replace(rows=[replace(row, arrival=between * number) for number, row in enumerate(load.rows)])


def _sizes(llm: LLM, rows: Sequence[TraceRow]) -> Sizes:
    """Room for all of them at one replica, or as much as the engine has; and seats for the streams of probes."""
    blocks = sum(-(-(row.prompt_tokens + row.new_tokens) // BLOCK) for row in rows)
    most = llm.engine.scheduler.manager.num_blocks * cost_block(llm) // BLOCK
    return Sizes(blocks=min(Sizes.blocks, blocks, most))


def _under_load(device: DeviceFile, options: Sequence[str], llm: LLM) -> DeviceFile:
    """The device, with how much longer steps take where requests come, and where another replica computes."""
    one, two, threads = _load(1, device, llm), _load(2, device, llm), torch.get_num_threads()
    with alone(threads, one.sizes, options) as running:
        runs = _runs(one, running.url, running.replicas, range(AGAIN_ALONE))
    one = one._replace(sizes=two.sizes)
    with behind_gateway(2, threads, two.sizes, options) as running:
        turns = range(AGAIN_APART)
        apart = [run for replica in running.replicas for run in _runs(one, replica.url, [replica], turns)]
        together = _runs(two, running.url, running.replicas, range(AGAIN_APART, AGAIN_APART + AGAIN_LOADED))
        gateway = statistics.median(_gateway(running) for _ in range(AGAIN_GATEWAY))
        peer_byte = _peer_byte(running, llm)
    device = one.under_load(device, runs + apart)
    device = replace(device, server=replace(device.server, gateway=max(0.0, gateway), peer_byte=peer_byte))
    return two.next_to_another(device, together, one.compared(device, apart))


def _runs(load: _Load, url: str, replicas: Sequence[Replica], turns: Iterable[int]) -> list[_Loaded]:
    """The load, sent in each of these turns with other tokens, and the speed of the replicas before and after each."""
    found, before = [], probed(replicas)
    for turn in turns:
        run = sent(url, load.rows, 0, turn)
        after = probed(replicas)
        found.append(_Loaded(seconds_of(run), mean([before, after]), run.records))
        before = after
    return found


def _gateway(running: Serving) -> float:
    """Seconds that a gateway adds to a request.

    It has cores of the same machine, on which replicas compute. So it is measured while both do, against a replica
    that computes alone. What their steps take longer is not the gateway's.
    """
    through, longer = _while_busy(Server(running.url), len(running.replicas) * BUSY_STREAMS)
    direct, gap = _while_busy(Server(running.replicas[0].url), BUSY_STREAMS)
    return through - direct - STEPS_TO_FIRST * (longer - gap)


def _while_busy(server: Server, streams: int) -> tuple[float, float]:
    """Mean seconds to the first token of short prompts next to streams, and between the tokens of these."""
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(_asked, server, streams, 64, BUSY_TOKENS, streams)
        firsts = [_ttft(server, ASKED[0]) for _ in range(BUSY_TIMES)][FIRST_GAPS:]
        run = sending.result()
    gaps = [gap for found in map(latencies, run.records) if found is not None for gap in found.gaps]
    return statistics.fmean(firsts), _mean_gap(gaps)


def _peer_byte(running: Serving, llm: LLM) -> float:
    """Seconds that a byte of a replica's blocks takes to another one while both compute; 0: they send none."""
    streams, (one, *_) = len(running.replicas) * BUSY_STREAMS, running.replicas
    blocks = GivenBlocks(one, running.secret, llm)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(_asked, Server(running.url), streams, 64, BUSY_TOKENS, streams)
        took = [seconds for _ in range(FIRST_GAPS + TIMES) if (seconds := blocks.read())][FIRST_GAPS:]
        sending.result()
    return statistics.median(took) if took else 0.0


def _ttft(server: Server, length: int) -> float:
    """Seconds to the first token of a prompt."""
    run = _asked(server, 1, length, 1, 1)
    return statistics.fmean(one.ttft for one in map(latencies, run.records) if one is not None)


def _line(points: Mapping[int, Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """The line through the medians, neither part of which is negative. points: by x, y and how far off it may be."""
    at = [(x, *map(statistics.median, zip(*those, strict=True))) for x, those in points.items()]
    weights = [1.0 / max(off, SHORTEST) for _, _, off in at]
    a = np.array([[weight, x * weight] for (x, _, _), weight in zip(at, weights, strict=True)])
    found = nonnegative_least_squares(a, np.array([y * w for (_, y, _), w in zip(at, weights, strict=True)]))
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
