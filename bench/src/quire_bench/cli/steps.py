"""quire bench steps: steps of a model against what the machine reads and multiplies."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quire.cli.options import AsJson, fail
from quire.errors import QuireError
from quire_bench.cli.options import CacheMemory, Dtype, Model


def steps(
    model: Model = None,
    dtype: Dtype = "auto",
    quantization: Annotated[str | None, typer.Option(help="int8 or int4, as the weights are loaded.")] = None,
    kv_cache_memory: CacheMemory = "4GiB",
    count: Annotated[int, typer.Option(min=1, max=256, help="Steps of each kind; their median is reported.")] = 15,
    as_json: AsJson = False,
) -> None:
    """Decode of one and of 32 sequences and a prompt of 2,048 tokens, each against the longer of two times.

    These are the step's bytes at the machine's read rate, and its operations at the rate of its bf16 product. Below
    each step are the parts that take a hundredth of it or more.
    """
    from quire import LLM
    from quire_bench.engine.steps import CASES, measure

    try:
        llm = LLM(
            model,
            dtype=dtype,
            quantization=quantization,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=32,
            num_speculative_tokens=0,
        )
        for case in CASES:
            found = measure(llm, case, count if case.query_len == 1 else min(count, 3))
            if as_json:
                print(json.dumps({"model": str(llm.files.path)} | found.as_dict()), flush=True)
                continue
            times = (found.seconds, found.bytes_seconds, found.operations_seconds)
            measured, read, multiplied = (f"{1e3 * seconds:,.1f} ms" for seconds in times)
            parts = ", ".join(f"{part} {share:.0%}" for part, share in found.shares.items() if share >= 0.01)
            print(
                f"{case.name:16s}{measured:>12s}   bytes {read}, operations {multiplied}: {found.ratio:.2f} x",
                flush=True,
            )
            print(f"    {parts}", flush=True)
    except QuireError as error:
        fail(error)
