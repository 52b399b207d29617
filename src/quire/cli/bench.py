"""quire bench: measure speed, start-up and memory on this machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from quire.bench.workloads import WORKLOADS
from quire.cli.options import (
    AsJson,
    Backend,
    BlockSize,
    CacheMemory,
    Device,
    Dtype,
    MaxModelLen,
    Model,
    NumBlocks,
    fail,
    row,
)
from quire.errors import QuireError
from quire.progress import progress_bar

app = typer.Typer(no_args_is_help=True, help="Measure speed, start-up and memory on this machine.")


@app.command()
def throughput(
    workloads: Annotated[list[str] | None, typer.Argument(help=f"{', '.join(WORKLOADS)}.")] = None,
    model: Model = None,
    attention_backend: Backend = "auto",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at the same time.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Query tokens a step.")] = 2048,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    kv_cache_memory: CacheMemory = "50%",
    warmup: Annotated[int, typer.Option(min=0, help="Runs before those that count.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Runs that count; their median is told.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Tokens a second of whole workloads, greedily, without stopping early. Default: decode."""
    from quire import LLM
    from quire.bench.throughput import measure
    from quire.bench.workloads import workload

    try:
        chosen = [workload(name) for name in workloads or ["decode"]]
        llm = LLM(
            model,
            dtype=dtype,
            device=device,
            attention_backend=attention_backend,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_memory=kv_cache_memory,
        )
        for work in chosen:
            with progress_bar(work.name, work.num_new_tokens * (warmup + runs)) as advance:
                figures = measure(llm, work, warmup, runs, advance).as_dict()
            if as_json:
                print(json.dumps(figures))
            else:
                new, total = figures["new_tokens_per_second"], figures["total_tokens_per_second"]
                told = f"{new:10.1f} new tok/s {total:10.1f} total tok/s {figures['most_blocks'] or '?':>7} blocks"
                print(f"{work.name:12s} {figures['median_seconds']:9.2f} s {told}", flush=True)
    except QuireError as error:
        fail(error)


@app.command()
def attention(
    sets: Annotated[
        list[str] | None,
        typer.Argument(
            help="peers, groups, dims, blocks, scatter, contexts, batches, long, dtypes, or all. Default: peers."
        ),
    ] = None,
    attention_backend: Backend = "auto",
    isa: Annotated[str | None, typer.Option(help="Of the native kernels, as in avx2. Default: the best here.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Calls that count; their median is told.")] = 9,
    sdpa_runs: Annotated[int, typer.Option(min=0, help="Calls of torch's attention to compare with.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="Draw the shares of the ceilings into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Attention alone: GB/s of KV or GFLOP/s, and the share of what the machine reads or multiplies meanwhile."""
    from quire import ops
    from quire.bench import attention as bench_attention

    try:
        shapes = bench_attention.chosen(sets or ["peers"])
        figures = []
        with bench_attention.instruction_set(isa) as name:
            backend = ops.load(attention_backend)
            for shape in shapes:
                figure = bench_attention.measure(backend, shape, runs, sdpa_runs)
                figures.append(figure)
                if as_json:
                    print(json.dumps({"backend": backend.NAME, "isa": name} | figure.as_dict()), flush=True)
                else:
                    unit = "GB/s" if shape.query_len == 1 else "GFLOP/s"
                    told = "" if figure.speedup is None else f"{figure.speedup:7.1f} x torch SDPA"
                    print(f"{shape.name:52s} {figure.rate:7.1f} {unit:7s} {figure.fraction:5.0%}{told}", flush=True)
            beside = bench_attention.overhead(backend)
        if as_json:
            print(json.dumps({"backend": backend.NAME, "isa": name, "name": "smallest call", "seconds": beside}))
        else:
            row("kernels", f"{backend.NAME}, {name}")
            row("smallest call", f"{1e6 * beside:.1f} us on one thread")
        if plot is not None:
            bench_attention.plot(figures, plot)
    except QuireError as error:
        fail(error)


@app.command()
def startup(
    model: Model = None,
    runs: Annotated[int, typer.Option(min=1, help="Fresh processes; their median is told.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Seconds from the start of a process to the first token, with a warm page cache."""
    from quire.bench.startup import measure, median

    try:
        figures = measure(model, runs)
    except subprocess.CalledProcessError as error:
        fail(error.stderr.strip().splitlines()[-1])
    for name, seconds in figures.items():
        if as_json:
            print(json.dumps({"what": name, "seconds": seconds, "median_seconds": median(seconds)}))
        else:
            print(f"{name:36s} {median(seconds):6.2f} s   ({seconds[0]:.2f} to {seconds[-1]:.2f})")


@app.command()
def memory(
    model: Model = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences side by side.")] = 32,
    mean_length: Annotated[int, typer.Option(min=2, help="Mean of their final lengths, in tokens.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each of them generates.")] = 32,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    as_json: AsJson = False,
) -> None:
    """KV slots that are reserved, used and wasted over a run."""
    from quire import LLM
    from quire.bench.memory import measure
    from quire.bench.memory import sequences as workload

    try:
        llm = LLM(model, block_size=block_size, num_blocks=num_blocks, max_num_seqs=sequences)
        figures = measure(llm, workload(sequences, mean_length, new_tokens)).as_dict()
    except QuireError as error:
        fail(error)
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        row(name.replace("_", " "), f"{value:.2%}" if name == "waste" else f"{value:,.0f}")
