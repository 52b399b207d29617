"""quire bench: measure speed, start-up and memory on this machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from quire.bench.workloads import WORKLOADS
from quire.cli import bench_blocks, bench_latency, bench_scheduler, bench_serve, bench_soak
from quire.cli.options import (
    AsJson,
    Backend,
    BlockSize,
    CacheMemory,
    Device,
    Dtype,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MeasuredGuesses,
    Model,
    ModelImpl,
    NumBlocks,
    Preemption,
    PrefixCaching,
    SchedulingPolicy,
    SwapSpace,
    fail,
    row,
)
from quire.errors import QuireError
from quire.progress import progress_bar

app = typer.Typer(no_args_is_help=True, help="Measure speed, start-up and memory on this machine.")
app.command("latency")(bench_latency.latency)
app.command("scheduler")(bench_scheduler.scheduler)
app.command("blocks")(bench_blocks.blocks)
app.command("serve")(bench_serve.serve)
app.command("http")(bench_serve.http)
app.command("soak")(bench_soak.soak)


@app.command()
def throughput(
    workloads: Annotated[list[str] | None, typer.Argument(help=f"{', '.join(WORKLOADS)}.")] = None,
    model: Model = None,
    attention_backend: Backend = "auto",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    model_impl: ModelImpl = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    kv_cache_memory: CacheMemory = "50%",
    prefix_caching: PrefixCaching = True,
    preemption: Preemption = "recompute",
    swap_space: SwapSpace = None,
    scheduling_policy: SchedulingPolicy = "fcfs",
    num_speculative_tokens: MeasuredGuesses = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Runs before those that count.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Runs that count; their median is told.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Draw the runs into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens a second of whole workloads, greedily, without stopping early. Default: decode."""
    from quire import LLM
    from quire.bench.plot import check_path, plot_runs
    from quire.bench.throughput import measure
    from quire.bench.workloads import workload

    try:
        if plot is not None:
            check_path(plot)
        found = {}
        chosen = [workload(name) for name in workloads or ["decode"]]
        llm = LLM(
            model,
            dtype=dtype,
            model_impl=model_impl,
            device=device,
            attention_backend=attention_backend,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_memory=kv_cache_memory,
            enable_prefix_caching=prefix_caching,
            preemption=preemption,
            swap_space=swap_space,
            scheduling_policy=scheduling_policy,
            num_speculative_tokens=num_speculative_tokens,
        )
        for work in chosen:
            with progress_bar(work.name, work.num_new_tokens * (warmup + runs)) as advance:
                measured = measure(llm, work, warmup, runs, advance)
            figures = measured.as_dict()
            found[work.name] = [measured.num_tokens / seconds for seconds in measured.seconds]
            if as_json:
                print(json.dumps(figures))
            else:
                new, total = figures["new_tokens_per_second"], figures["total_tokens_per_second"]
                told = f"{new:10.1f} new tok/s {total:10.1f} total tok/s {figures['most_blocks'] or '?':>7} blocks"
                print(f"{work.name:12s} {figures['median_seconds']:9.2f} s {told}", flush=True)
        if plot is not None:
            plot_runs(plot, "total tokens a second", found)
    except QuireError as error:
        fail(error)


@app.command()
def attention(
    sets: Annotated[
        list[str] | None,
        typer.Argument(
            help="peers, groups, mqa, dims, blocks, scatter, contexts, batches, long, dtypes, or all. Default: peers."
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
    from quire.bench.plot import check_path

    try:
        if plot is not None:
            check_path(plot)
        shapes = bench_attention.chosen(sets or ["peers"])
        figures = []
        with bench_attention.instruction_set(isa) as name:
            backend = ops.load(attention_backend)
            for shape in shapes:
                figure = bench_attention.measure(backend, shape, runs, sdpa_runs)
                figures.append(figure)
                if as_json:
                    print(json.dumps({"backend": backend.name, "isa": name} | figure.as_dict()), flush=True)
                else:
                    unit = "GB/s" if shape.query_len == 1 else "GFLOP/s"
                    told = "" if figure.speedup is None else f"{figure.speedup:7.1f} x torch SDPA"
                    print(f"{shape.name:52s} {figure.rate:7.1f} {unit:7s} {figure.fraction:5.0%}{told}", flush=True)
            beside = bench_attention.overhead(backend)
        if as_json:
            print(json.dumps({"backend": backend.name, "isa": name, "name": "smallest call", "seconds": beside}))
        else:
            row("kernels", f"{backend.name}, {name}")
            row("smallest call", f"{1e6 * beside:.1f} us on one thread")
        if plot is not None:
            bench_attention.plot(figures, plot)
    except QuireError as error:
        fail(error)


@app.command()
def cascade(
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 64,
    shared: Annotated[int, typer.Option(min=1, help="Tokens that all of them begin with.")] = 8192,
    own: Annotated[int, typer.Option(min=1, help="Tokens of each one's own.")] = 256,
    head_dim: Annotated[int, typer.Option(min=1, max=1024)] = 64,
    attention_backend: Backend = "auto",
    runs: Annotated[int, typer.Option(min=1, help="Calls that count; their median is told.")] = 9,
    as_json: AsJson = False,
) -> None:
    """What a shared prefix saves in decode: the speedup, and its share of what bytes and products allow."""
    from quire import ops
    from quire.bench.cascade import measure, shapes

    try:
        for shape in shapes(batch, shared, own, head_dim):
            figure = measure(ops.load(attention_backend), shape, runs)
            if as_json:
                print(json.dumps(figure.as_dict()), flush=True)
            else:
                milliseconds = f"{1e3 * figure.apart_seconds:.2f} -> {1e3 * figure.shared_seconds:.2f} ms"
                told = f"{figure.speedup:5.1f} x, {figure.speedup / figure.roof:4.0%} of {figure.roof:.1f}"
                print(f"G = {shape.group_size}: {milliseconds:>20s} {told}", flush=True)
    except QuireError as error:
        fail(error)


@app.command()
def startup(
    model: Model = None,
    runs: Annotated[int, typer.Option(min=1, help="Fresh processes; their median is told.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Draw the runs into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Seconds from the start of a process to the first token, with a warm page cache, and the memory of loading."""
    from quire.bench import loading
    from quire.bench.plot import check_path, plot_runs
    from quire.bench.startup import measure, measured, median

    try:
        if plot is not None:
            check_path(plot)
        with progress_bar("processes", len(measured(model)) * (1 + runs) + 1) as advance:
            figures = measure(model, runs, advance)
            memory = loading.measure(model)
            advance()
        if plot is not None:
            plot_runs(plot, "seconds", figures)
    except QuireError as error:
        fail(error)
    except subprocess.CalledProcessError as error:
        fail(error.stderr.strip().splitlines()[-1])
    for name, seconds in figures.items():
        if as_json:
            print(json.dumps({"what": name, "seconds": seconds, "median_seconds": median(seconds)}))
        else:
            print(f"{name:36s} {median(seconds):6.2f} s   ({seconds[0]:.2f} to {seconds[-1]:.2f})")
    if as_json:
        print(json.dumps({"what": "memory of loading", "bytes": None if memory is None else memory.as_dict()}))
    else:
        print(f"{'memory of loading':36s} {loading.told(memory)}")


@app.command()
def planning(
    sequences: Annotated[
        list[int] | None, typer.Option(min=1, help="That decode; may be repeated. Default: 1, 64, 1024.")
    ] = None,
    contexts: Annotated[
        list[int] | None, typer.Option("--context", min=1, help="Tokens of each. Default: 100, 1000, 10000, 100000.")
    ] = None,
    spare: Annotated[
        list[int] | None, typer.Option(min=0, help="Blocks in the pool besides theirs. Default: 0, 1000000.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What the scheduler and the block manager take of a step of decoding, in microseconds a sequence."""
    from itertools import product

    from quire.bench import planning as bench_planning

    chosen = (sequences or (1, 64, 1024), contexts or (100, 1_000, 10_000, 100_000), spare or (0, 1_000_000))
    for point in product(*chosen):
        found = bench_planning.measure(*point, steps=max(64, 4096 // point[0]))
        if as_json:
            print(json.dumps(found.as_dict()))
        else:
            told = f"{found.sequences:6,d} sequences of {found.context:7,d} tokens, {found.pool:11,d} blocks"
            print(f"{told} {found.microseconds_each:8.2f} us each, worst step {found.worst_each:8.2f}", flush=True)


@app.command()
def memory(
    distribution: Annotated[
        list[str] | None, typer.Option(help="chat, uniform or long-tailed; may be repeated. Default: all.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of each distribution, all there from the start.")] = 512,
    seed: Annotated[int, typer.Option(help="Of their lengths.")] = 0,
    shared_prefix: Annotated[int, typer.Option(help="Tokens that all prompts begin with, besides their own.")] = 0,
    prefix_caching: PrefixCaching = False,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence in tokens. Default: 2048, and for the model what it can.")
    ] = None,
    block_size: BlockSize = 16,
    num_blocks: Annotated[
        int | None, typer.Option(help="KV blocks. Default: as many as 16 requests of full length fill.")
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="A config.json or its directory. Default: the embedded model's.")
    ] = None,
    kv_memory: Annotated[
        str, typer.Option("--memory", help="For that model's KV: bytes (54GB) or a share of the free memory.")
    ] = "100%",
    plot: Annotated[Path | None, typer.Option(help="Draw the use of the memory into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """KV slots live and wasted, and the batch that fits: paged against contiguous, without running a model.

    wasted: slots that requests own, with nothing in them. unusable: free slots, as many as the next request will ever
    fill, and it was refused. refused: requests that met with that. waste: the share of all these and of the live slots
    that is not live. batch: requests that run; like the shares a mean over the steps in which others wait for memory.
    """
    from quire.bench import memory as bench_memory
    from quire.bench.plot import check_path

    try:
        if plot is not None:
            check_path(plot)
        model = bench_memory.model_fit(model_config, kv_memory, block_size, max_model_len, requests, seed)
        comparisons = []
        for name in distribution or bench_memory.DISTRIBUTIONS:
            setup = bench_memory.Setup(
                distribution=name,
                requests=requests,
                seed=seed,
                shared_prefix=shared_prefix,
                prefix_caching=prefix_caching,
                max_model_len=2048 if max_model_len is None else max_model_len,
                block_size=block_size,
                num_blocks=num_blocks,
            )
            runs = bench_memory.compare(setup)
            comparisons.append(runs)
            lines = [json.dumps(run.as_dict()) for run in runs] if as_json else [*bench_memory.table(runs), ""]
            print("\n".join(lines))
        if as_json:
            print(json.dumps(model.as_dict()))
        else:
            for name, told in model.table():
                row(name, told)
        if plot is not None:
            bench_memory.plot(comparisons, plot)
    except QuireError as error:
        fail(error)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def gpu(context: typer.Context) -> None:
    """Everything that is to be known of a GPU, in under ten minutes. Its options: quire bench gpu --help."""
    from quire.bench.gpu.run import main

    raise typer.Exit(main(context.args))
