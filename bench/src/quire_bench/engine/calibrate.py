"""Calibration: what steps, requests and tokens of a model take on this machine, as a file for `quire simulate`.

Steps are timed in the engine, in rounds in which every kind of step comes once, so that a machine whose speed drifts
spreads its drift over all of them. What a server adds to a step and to a request is timed over HTTP, in turns with the
same in the engine. What it adds for tokens, for requests that come and for prompts next to others is found from its own
steps under load, and what replicas on one machine cost one another from those of two and from CPU time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone

import numpy as np
import torch

from quire.engine.cost import CostModel, Device, cost_of, model_cost
from quire.errors import ConfigError
from quire.frontend.llm import LLM
from quire.models import expected_weight_bytes, read_config
from quire.simulate.device import DeviceFile, ServerFit, model_digest
from quire.simulate.fitting import fit_steps, nonnegative_least_squares, predicted, residuals
from quire_bench.engine.step_kinds import Timed, checked, decoding, medians, new_request, one_round
from quire_bench.engine.under_load import FIRST_GAPS, LONGEST, asked, mean_gap, measured_under_load, ttft
from quire_bench.fleet.speed import SHORTEST
from quire_bench.kernels.attention import product_rate, read_rate
from quire_bench.proc import num_cores, processor
from quire_bench.server.client import Server
from quire_bench.server.process import server
from quire_bench.server.report import latencies

ROUNDS = 3  # of all kinds of steps
AGAIN_STREAM = 5  # times that a stream is timed over HTTP
TOKENS = 36  # of its answer
ASKED = (8, 128, 512)  # tokens of prompts that are asked one by one over HTTP
TIMES = 12  # each


def calibrate(llm: LLM, options: Sequence[str], kind: str, advance: Callable[[], None] = lambda: None) -> DeviceFile:
    """Measure everything. Several minutes.

    llm: without drafts. options: of `quire serve` for the same model. advance: is called for each of `PARTS`.
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
        steps += one_round(llm, CostModel(model, Device("any", 1.0, 1.0, 1.0), block_size), seed)
        advance()
    kinds = medians(steps)
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
        per_machine=max(1, num_cores() // threads),
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
        device = measured_under_load(device, options, llm)
    advance()
    return device


PARTS = 3 + ROUNDS + len(ASKED)


def _touch(llm: LLM) -> None:
    """Touch all memory of the cache: a step that is the first to use a page waits for the system."""
    cache = llm.engine.runner.cache
    for group in range(len(llm.decoder.config.groups)):
        for layer in cache.layers(group):
            for tensor in layer.tensors().values():
                tensor.zero_()


def _rates(threads: int) -> tuple[float, float]:
    """Bytes and operations a second that so many threads reach."""
    reads, multiplies = read_rate(threads), product_rate("bfloat16", threads)
    reads(), multiplies()
    return 1e9 * statistics.median(reads() for _ in range(5)), 1e9 * statistics.median(multiplies() for _ in range(5))


# -------------------------------------------------------------------------------------------------- over HTTP


def _server(options: Sequence[str], llm: LLM, advance: Callable[[], None]) -> ServerFit:
    """Return the time that a server adds to steps and requests.

    The same is timed over HTTP and in the engine, in turns: within a minute a machine's speed drifts by more than what
    is looked for.
    """
    later: dict[int, list[tuple[float, float]]] = {}  # by tokens: by how many seconds, and of how many
    with server(*options) as process:
        target = Server(process.url)
        asked(target, 4, 32, 8, 4)
        step = max(0.0, statistics.median(_gap(target) - _own_gap(llm) for _ in range(AGAIN_STREAM)))
        advance()
        for length in ASKED:
            for _ in range(TIMES if length + 4 <= llm.decoder.max_model_len else 0):
                took = ttft(target, length)
                later.setdefault(length, []).append((took - _own_prompt(llm, length), took))
            advance()
    request, prompt_token = _line(later)
    return ServerFit(step=step, request=max(0.0, request - step), prompt_token=prompt_token)


def _own_gap(llm: LLM) -> float:
    """Return the seconds that `_gap` measures, without a server."""
    took = []
    with decoding(llm, [64], random.Random()):
        for _ in range(TOKENS - 1):
            start = time.perf_counter()
            checked(llm.engine.step())
            took.append(time.perf_counter() - start)
    return mean_gap(took[FIRST_GAPS:])


def _own_prompt(llm: LLM, length: int) -> float:
    """Seconds of the step that computes a prompt."""
    llm.engine.add(new_request("prompt", length, 1, random.Random()))
    start = time.perf_counter()
    while llm.engine.has_work:
        checked(llm.engine.step())
    return time.perf_counter() - start


def _gap(server: Server) -> float:
    """Mean seconds between tokens of a stream, the longest gaps left out."""
    each = [gap for found in map(latencies, asked(server, 1, 64, TOKENS, 1).records) if found for gap in found.gaps]
    return mean_gap(each[FIRST_GAPS:])


def _line(points: Mapping[int, Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """The line through the medians, neither part of which is negative. points: by x, y and how far off it may be."""
    at = [(x, *map(statistics.median, zip(*those, strict=True))) for x, those in points.items()]
    weights = [1.0 / max(off, SHORTEST) for _, _, off in at]
    a = np.array([[weight, x * weight] for (x, _, _), weight in zip(at, weights, strict=True)])
    found = nonnegative_least_squares(a, np.array([y * w for (_, y, _), w in zip(at, weights, strict=True)]))
    return float(found[0]), float(found[1])
