"""quire bench memory: KV memory under a load, paged against contiguous."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import AsJson, row
from quire_bench.cli.options import BlockSize, PrefixCaching, Save


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
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """KV slots live and wasted, and the batch that fits: paged against contiguous, without running a model.

    wasted: slots that requests own, with nothing in them. unusable: free slots, as many as the next request will ever
    fill, and it was refused. refused: requests that met with that. waste: the share of all these and of the live slots
    that is not live. batch: requests that run; like the shares a mean over the steps in which others wait for memory.
    """
    from quire_bench.engine import memory as bench_memory
    from quire_bench.plot import check_path
    from quire_bench.tables import save as write

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
        for name, shown in model.table():
            row(name, shown)
    write(save, "KV memory", (run.as_dict() for runs in comparisons for run in runs))
    if plot is not None:
        bench_memory.plot(comparisons, plot)
