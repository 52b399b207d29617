"""quire bench blocks: a workload with blocks of every size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import AsJson, fail
from quire.engine.workloads import WORKLOADS
from quire.errors import QuireError
from quire.progress import progress_bar
from quire_bench.cli.options import Backend, CacheMemory, Device, Dtype, MaxModelLen, Model


def blocks(
    workload: Annotated[str, typer.Argument(help=f"{', '.join(WORKLOADS)}.")] = "decode",
    block_size: Annotated[
        list[int] | None, typer.Option(help="May be repeated. Default: 1, 2, 4 and so on to 256.")
    ] = None,
    model: Model = None,
    attention_backend: Backend = "auto",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    kv_cache_memory: CacheMemory = "50%",
    warmup: Annotated[int, typer.Option(min=0, help="Runs before those that count.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Runs that count; their median is reported.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Draw speed and waste into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Speed and memory of a workload by the size of a block, beside the memory of contiguous allocation.

    waste: the share of the slots that requests own at the fullest moment (peak), or on average (mean), in which nothing
    stands. wasted each: such slots of each request, on average. table: entries of the longest request's block table.
    """
    from quire_bench.engine import blocks as bench
    from quire_bench.plot import check_path
    from quire_bench.workloads import workload as named

    try:
        check_path(plot)
        work, sizes = named(workload), block_size or bench.SIZES
        with progress_bar(work.name, work.num_new_tokens * (warmup + runs) * len(sizes)) as advance:
            figures = list(
                bench.sweep(
                    work,
                    sizes,
                    warmup,
                    runs,
                    advance,
                    model=model,
                    attention_backend=attention_backend,
                    device=device,
                    dtype=dtype,
                    max_model_len=max_model_len,
                    kv_cache_memory=kv_cache_memory,
                    num_speculative_tokens=0,
                )
            )
        others = bench.contiguous(work, figures[0].memory.run.setup.max_model_len)
        if as_json:
            found = [one.as_dict() for one in figures] + [one.as_dict() for one in others]
            print("\n".join(map(json.dumps, found)))
        else:
            print("\n".join(bench.table(figures, others)))
        if plot is not None:
            bench.plot(figures, others, plot)
    except QuireError as error:
        fail(error)
