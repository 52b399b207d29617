"""quire bench lora: what adapters cost."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quire.cli.options import AsJson, fail
from quire.errors import QuireError
from quire_bench.cli.options import Backend, CacheMemory, Device, Dtype, Model


def lora(
    model: Model = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    attention_backend: Backend = "auto",
    quantization: Annotated[str | None, typer.Option(help="int8 or int4, as the weights are loaded.")] = None,
    kv_cache_memory: CacheMemory = "1GiB",
    adapters: Annotated[int, typer.Option(min=1, max=4096, help="Adapters in the batch.")] = 16,
    rank: Annotated[int, typer.Option(min=1, max=1024, help="Rank of each.")] = 16,
    streams: Annotated[int, typer.Option(min=1, help="Sequences in the batch.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps that count, of each kind in each round.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median of their ratios is reported.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Decode steps of a batch with random adapters of all linears, in turn with steps of the model alone."""
    from quire import LLM
    from quire_bench.engine.lora import measure

    try:
        llm = LLM(
            model,
            dtype=dtype,
            device=device,
            attention_backend=attention_backend,
            quantization=quantization,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=streams,
            num_speculative_tokens=0,
            enable_lora=True,
            max_loras=adapters,
            max_lora_rank=rank,
        )
        found = measure(llm, adapters, rank, streams, steps, rounds)
    except QuireError as error:
        fail(error)
    if as_json:
        print(json.dumps({"model": str(llm.files.path)} | found.as_dict()), flush=True)
        return
    size = f"{found.adapter_bytes / 2**20:.1f} MiB"
    print(f"{adapters} adapters of rank {rank}, {size} each, {streams} sequences")
    print(f"  alone          {1e3 * found.alone_seconds:9.1f} ms a step")
    print(f"  with adapters  {1e3 * found.seconds:9.1f} ms a step   {found.ratio:.2f} x")
