"""Measure the time that a shared prefix saves in decode: the speedup, and its share of the roof.

    python bench/studies/cascade.py --batch 64 --shared 8192 --own 256

Sequences with the same first blocks are compared with as many that have their own. The roof of the speedup is the
smaller of two ratios: the bytes of KV of both; and, since shared keys are read once but multiplied for all sequences,
the time to read everything over the time to multiply everything. All of it is measured between the runs, because a
shared machine's speed drifts.
"""

from __future__ import annotations

import statistics
from typing import Annotated

import torch
import typer

from quire import ops
from quire.cli.options import fail
from quire.errors import QuireError
from quire_bench.cli.options import Backend
from quire_bench.kernels.attention import product_rate, read_rate, seconds_of
from quire_bench.kernels.cascade import CascadeFigure, CascadeShape, call


def main(
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 64,
    shared: Annotated[int, typer.Option(min=1, help="Tokens that all of them begin with.")] = 8192,
    own: Annotated[int, typer.Option(min=1, help="Further tokens of each.")] = 256,
    head_dim: Annotated[int, typer.Option(min=1, max=1024)] = 64,
    attention_backend: Backend = "auto",
    runs: Annotated[int, typer.Option(min=1, help="Calls that count; their median is reported.")] = 9,
) -> None:
    """Print a line for 1, 4 and 8 query heads of a KV head."""
    try:
        for group in (1, 4, 8):
            shape = CascadeShape(batch=batch, shared=shared, own=own, head_dim=head_dim, num_kv_heads=8 // group)
            found = measure(ops.load(attention_backend), shape, runs)
            milliseconds = f"{1e3 * found.apart_seconds:.2f} -> {1e3 * found.shared_seconds:.2f} ms"
            message = f"{found.speedup:5.1f} x, {found.speedup / found.roof:4.0%} of {found.roof:.1f}"
            print(f"G = {group}: {milliseconds:>20s} {message}", flush=True)
    except QuireError as error:
        fail(error)


def measure(backend: ops.Backend, shape: CascadeShape, runs: int) -> CascadeFigure:
    """Time both calls in turn, the ceilings in between."""
    threads = torch.get_num_threads()
    reader, multiplier = read_rate(threads), product_rate("bfloat16", threads)
    apart, shared = call(backend, shape, shares=False), call(backend, shape, shares=True)
    apart(), shared()
    rounds = [(seconds_of(apart), reader(), seconds_of(shared), multiplier()) for _ in range(runs)]
    apart_seconds, read, shared_seconds, multiply = (statistics.median(column) for column in zip(*rounds, strict=True))
    return CascadeFigure(shape, apart_seconds, shared_seconds, read, multiply)


if __name__ == "__main__":
    typer.run(main)
