"""The figures that decide what is on by default on a GPU. Each function of ROWS measures one and returns it.

`quire bench gpu --only short.NAME` runs them, see `quire_bench.gpu.short`. They import Triton.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from quire import LLM, SamplingParams
from quire.ops.collectives import DeviceCommunicator
from quire.ops.triton import linear, quantised, tiles
from quire.ops.triton.linear import LinearTile
from quire.ops.triton.tiles import Tile
from quire.ops.weights.linear import Linear
from quire.ops.weights.quantised import quantised as rounded
from quire_bench.gpu.attention import DECODE, NARROW, PREFILL, paged, sized
from quire_bench.gpu.common import Bench, Call, Contestant, race
from quire_bench.kernels.attention import Shape

Figures = dict[str, Any]

ROOT = Path(__file__).parents[4]
LIMIT = 40.0  # s that ranks wait for each other
CACHED = 2**28  # bytes: more than a GPU caches
# Tiles of reproducible heads of 128 that may cost less in decoding; rows that alternate between two must not.
EXACT = (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 4), Tile(64, 128, 4, 2), Tile(64, 128, 8, 2))
FEW = (LinearTile(64, 64, 128, 4, 5), LinearTile(64, 32, 128, 4, 5), LinearTile(64, 32, 64, 4, 8))


def bits(_: Bench) -> Figures:
    """Return the cases of the promise of reproducible plans that pass and fail. Raises RuntimeError if none ran."""
    names = ["tests/ops/triton_backend/test_bits.py", "-k", "a_row_has_the_same_bits"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "--long", *names]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = {kind: re.findall(rf"(?m)^{kind} \S+\[(.*)\]", shown) for kind in ("PASSED", "FAILED", "ERROR")}
    if not found["PASSED"] or found["ERROR"]:
        raise RuntimeError(shown[-600:])
    return found


def reproducible(bench: Bench) -> Figures:
    """Decode and prefill of reproducible plans over those of usual ones, for each tile that may serve them."""
    found: Figures = {}
    for name, whole in {"decode": DECODE["64 x 4096"], "prefill": PREFILL["8 x 4096 D128"]}.items():
        shape = sized(bench, whole)
        contestants = {"usual": Contestant(partial(_usual, bench, shape))}
        for tile in EXACT:
            contestants[str(tile)] = Contestant(partial(_with, bench, shape, tile))
        seconds = race(bench, f"reproducible {name}", contestants, rounds=2)
        found[name] = {one: seconds[one] / seconds["usual"] for one in seconds}
        bench.forget()
    return found


def _usual(bench: Bench, shape: Shape) -> Call:
    return paged(bench, shape).call()


def _with(bench: Bench, shape: Shape, tile: Tile) -> Call:
    """A reproducible call with that tile."""
    table = tiles.HALVES[tiles.chip_of(bench.device)]
    usual = table["exact"]
    table["exact"] = (tile,) * len(usual)
    try:
        return paged(bench, shape, reproducible=True).call()
    finally:
        table["exact"] = usual


def narrow_caches(bench: Bench) -> Figures:
    """Decode over caches of 8 bits, widened one by one and in pairs, over bf16; and the largest difference of both."""
    shape = sized(bench, DECODE["64 x 4096"])
    contestants, outs = {"bf16": Contestant(lambda: paged(bench, shape).call())}, {}
    for name, dtype in NARROW.items():
        for pairs in (False, True):

            def make(dtype: torch.dtype = dtype, pairs: bool = pairs, name: str = name) -> Call:
                torch.manual_seed(0)
                made = paged(bench, shape, kv_dtype=dtype)
                call = made.call()

                def run() -> None:
                    with _set(tiles, "IN_PAIRS", pairs):
                        call()

                run()
                outs[name, pairs] = made.out.clone()
                return run

            contestants[f"{name}, {'pairs' if pairs else 'one by one'}"] = Contestant(make)
    seconds = race(bench, "8-bit caches", contestants, rounds=2)
    away = {name: float((outs[name, True] - outs[name, False]).abs().max()) for name in NARROW if (name, True) in outs}
    return {name: seconds[name] / seconds["bf16"] for name in seconds} | {"largest difference": away}


def few_outputs(bench: Bench) -> Figures:
    """Products of few rows and outputs, whole and in sections that programs divide; reproducible ones for each tile."""
    return _products(bench, (14336, 4096), (32, 1), FEW)


def sections(bench: Bench) -> Figures:
    """The same with many outputs or rows, whose sections no programs divide: what sections cost."""
    return _products(bench, (4096, 28672), (2048, 32, 1), ())


def _products(
    bench: Bench, shape: tuple[int, int], counts: tuple[int, ...], reproducible: tuple[LinearTile, ...]
) -> Figures:
    """Products over torch's in bf16, whole and in sections, and whether a row has the bits of the largest count."""
    size, outputs = (1024, 48) if bench.settings.tiny else shape
    copies = 1 if bench.settings.tiny else -(-CACHED // (size * outputs // 2))
    weight = torch.randn(outputs, size, device=bench.device).bfloat16()
    turns = [weight.clone() for _ in range(-(-copies // 4))]
    made: dict[str, list[Linear]] = {}
    for kind, in_sections in (("whole", False), ("in sections", True)):
        with _set(quantised, "DIVIDES", in_sections), _set(linear, "DIVIDES", in_sections):
            own = linear.TiledLinears()
            for name, bits_, group in (("int8", 8, size), ("int4", 4, 128)):
                packed = rounded(weight, bits_, group, torch.bfloat16)
                made[f"{name}, {kind}"] = [own.linear(packed) for _ in range(copies)]
            made[f"reproducible, {kind}"] = [own.linear(w) for w in turns]
    found: Figures = {}
    x = torch.randn(counts[0], size, device=bench.device).bfloat16()
    together = {name: linears[0](x) for name, linears in made.items()}
    for rows in counts:
        some = x[:rows]
        calls: dict[str, list[Call]] = {"bf16": [partial(torch.nn.functional.linear, some, w) for w in turns]}
        for name, linears in made.items():
            calls[name] = [partial(one, some) for one in linears]
            found[f"{name}, {rows} rows, same bits"] = torch.equal(linears[0](some), together[name][:rows])
        for tile in reproducible:
            calls[f"reproducible, {tile}"] = [partial(linear.TiledLinear(w, None, tile), some) for w in turns]
        contestants = {name: Contestant(_turns(some_calls)) for name, some_calls in calls.items()}
        seconds = race(bench, f"{rows} x {size} x {outputs}", contestants, rounds=2)
        found |= {f"{name}, {rows} rows": seconds[name] / seconds["bf16"] for name in seconds}
    bench.forget()
    return found


def captured_exchange(bench: Bench) -> Figures:
    """Return whether a graph repeats NCCL's exchange: a group of this process alone."""
    with tempfile.TemporaryDirectory() as directory:
        store = FileStore(f"{directory}/store", 1)
        store.set_timeout(timedelta(seconds=LIMIT))
        exchange = DeviceCommunicator(store, 0, 1, 1, torch.device(torch.cuda.current_device()))
        x = torch.zeros(4, 4096, dtype=torch.bfloat16, device=bench.device)
        exchange.gather(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            found = exchange.gather(x)
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        same = torch.equal(found[0], x)
        exchange.leave()
    return {"a replay sees new numbers": same}


def ranks(_: Bench) -> Figures:
    """Return whether two processes that share this GPU compute the tokens and log-probabilities of one."""
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=1)
    found = []
    for size in (1, 2):
        with LLM(device="cuda:0", reproducible=True, num_blocks=64, tensor_parallel_size=size) as llm:
            [output] = llm.generate([[7 * i % 97 for i in range(40)]], params, use_tqdm=False)
            found.append((list(output.outputs[0].token_ids), output.outputs[0].cumulative_logprob))
    return {"same tokens": found[0][0] == found[1][0], "same bits": found[0] == found[1]}


@contextmanager
def _set(module: Any, name: str, value: object) -> Iterator[None]:
    """A module's constant for a while."""
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, usual)


def _turns(calls: Sequence[Call]) -> Callable[[], Call]:
    """Calls that take turns."""
    turn = cycle(calls)

    def call() -> object:
        return next(turn)()

    return lambda: call


ROWS: dict[str, Callable[[Bench], Figures]] = {
    one.__name__: one for one in (bits, reproducible, narrow_caches, few_outputs, sections, captured_exchange, ranks)
}
