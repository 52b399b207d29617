"""quire bench throughput: tokens a second of whole workloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import AsJson
from quire.engine.workloads import WORKLOADS
from quire.progress import progress_bar
from quire_bench.cli.options import (
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
    Save,
    SchedulingPolicy,
    SwapSpace,
    TensorParallelSize,
    Threads,
)


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
    tensor_parallel_size: TensorParallelSize = 1,
    threads: Threads = None,
    warmup: Annotated[int, typer.Option(min=0, help="Runs before those that count.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Runs that count; their median is reported.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Draw the runs into this file.")] = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Tokens a second of whole workloads, greedily, without stopping early. Default: decode."""
    from quire import LLM
    from quire_bench.engine.throughput import measure
    from quire_bench.plot import check_path, plot_runs
    from quire_bench.tables import save as write
    from quire_bench.threads import counted, on_threads, thread_counts
    from quire_bench.workloads import workload

    counts = thread_counts(threads)
    check_path(plot)
    found, rows = {}, []
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
        tensor_parallel_size=tensor_parallel_size,
    )
    for work in chosen:
        first = None
        for count in counts:
            with on_threads(count), progress_bar(work.name, work.num_new_tokens * (warmup + runs)) as advance:
                measured = measure(llm, work, warmup, runs, advance)
            first = first or measured.median
            figures = measured.as_dict() | {"threads": count, "speedup_over_first": first / measured.median}
            rows.append(figures)
            name = work.name if len(counts) == 1 else f"{work.name}, {counted(count)}"
            found[name] = [measured.num_tokens / seconds for seconds in measured.seconds]
            if as_json:
                print(json.dumps(figures))
                continue
            new, total = figures["new_tokens_per_second"], figures["total_tokens_per_second"]
            message = f"{new:10.1f} new tok/s {total:10.1f} total tok/s {figures['most_blocks'] or '?':>7} blocks"
            gain = "" if len(counts) == 1 else f" {figures['speedup_over_first']:6.2f} x"
            print(f"{name:{12 if len(counts) == 1 else 24}s} {measured.median:9.2f} s {message}{gain}", flush=True)
    llm.close()
    write(save, "Workloads", rows)
    if plot is not None:
        plot_runs(plot, "total tokens a second", found)
