"""quire bench latency: how long one batch takes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import AsJson, row
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
    NumBlocks,
    PrefixCaching,
    Save,
)

NAMES = {"latency": "whole batch", "ttft": "first token", "itl": "between tokens"}


def latency(
    model: Model = None,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 32,
    output_len: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Requests, all there at once.")] = 8,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches before those that count.")] = 10,
    num_iters: Annotated[int, typer.Option(min=1, help="Batches that count.")] = 30,
    attention_backend: Backend = "auto",
    device: Device = "cpu",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    block_size: BlockSize = 16,
    num_blocks: NumBlocks = None,
    kv_cache_memory: CacheMemory = "50%",
    prefix_caching: PrefixCaching = True,
    num_speculative_tokens: MeasuredGuesses = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the distributions into this file.")] = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Seconds of one batch after another: the whole, the time to each first token, and between tokens.

    Greedy, without stopping early, and with an empty prefix cache before each batch.
    """
    from quire import LLM
    from quire_bench.engine.latency import Batch, measure, summaries
    from quire_bench.engine.latency import plot as draw
    from quire_bench.plot import check_path
    from quire_bench.tables import save as write

    check_path(plot)
    batch = Batch(input_len, output_len, batch_size)
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
        enable_prefix_caching=prefix_caching,
        num_speculative_tokens=num_speculative_tokens,
    )
    with progress_bar("batches", num_iters_warmup + num_iters) as advance:
        found = measure(llm, batch, num_iters_warmup, num_iters, advance)
    shown = summaries(found)
    figures = {**asdict(batch), "seconds": found["latency"], **shown}
    if as_json:
        print(json.dumps(figures))
    else:
        for name, values in shown.items():
            if cells := [f"{what} {1e3 * value:.2f}" for what, value in values.items() if value is not None]:
                row(NAMES[name], ", ".join(cells) + " ms")
    write(save, "Latency of a batch", [figures])
    if plot is not None:
        draw(found, plot)
