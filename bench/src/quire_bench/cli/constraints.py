"""quire bench constraints: what grammars cost."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quire.cli.options import AsJson, fail
from quire.errors import QuireError
from quire_bench.cli.options import Backend, CacheMemory, Device, Dtype, Model


def constraints(
    model: Model = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    attention_backend: Backend = "auto",
    kv_cache_memory: CacheMemory = "1GiB",
    streams: Annotated[int, typer.Option(min=1, help="Sequences in the batch.")] = 64,
    constrained: Annotated[int, typer.Option(min=1, help="Of these, sequences that keep to a JSON schema.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps that count, of each kind in each round.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median of their ratios is reported.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Decode steps of a batch, some of whose rows keep to a JSON schema, in turn with steps without any."""
    from quire import LLM
    from quire_bench.engine.constraints import measure

    try:
        llm = LLM(
            model,
            dtype=dtype,
            device=device,
            attention_backend=attention_backend,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=streams,
            num_speculative_tokens=0,
        )
        found = measure(llm, streams, min(constrained, streams), steps, rounds)
    except QuireError as error:
        fail(error)
    if as_json:
        print(json.dumps({"model": str(llm.files.path)} | found.as_dict()), flush=True)
        return
    print(f"{found.streams} sequences, {found.constrained} of them with a JSON schema")
    print(f"  none        {found.plain_rate:9.0f} tokens/s")
    print(f"  with them   {found.rate:9.0f} tokens/s   {found.ratio:.3f} x")
