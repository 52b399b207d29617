"""Options that several commands share: the engine's own, for commands with defaults of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import field_option
from quire.config import CacheConfig, EngineConfig

Model = Annotated[str | None, field_option(EngineConfig, "model")]
Backend = Annotated[str, field_option(EngineConfig, "attention_backend")]
Device = Annotated[str, field_option(EngineConfig, "device")]
Dtype = Annotated[str, field_option(EngineConfig, "dtype")]
ModelImpl = Annotated[str, field_option(EngineConfig, "model_impl")]
MaxModelLen = Annotated[int | None, field_option(EngineConfig, "max_model_len")]
TensorParallelSize = Annotated[int, field_option(EngineConfig, "tensor_parallel_size")]
SchedulingPolicy = Annotated[str, field_option(EngineConfig, "scheduling_policy")]
MaxNumSeqs = Annotated[int, field_option(EngineConfig, "max_num_seqs")]
MaxNumBatchedTokens = Annotated[int, field_option(EngineConfig, "max_num_batched_tokens")]
MeasuredGuesses = Annotated[
    int, typer.Option("--num-speculative-tokens", help="Tokens that prompt lookup guesses at a time; 0 for none.")
]
BlockSize = Annotated[int, field_option(CacheConfig, "block_size")]
NumBlocks = Annotated[int | None, field_option(CacheConfig, "num_blocks")]
CacheMemory = Annotated[str, field_option(CacheConfig, "kv_cache_memory")]
PrefixCaching = Annotated[bool, field_option(CacheConfig, "enable_prefix_caching")]
Preemption = Annotated[str, field_option(CacheConfig, "preemption")]
SwapSpace = Annotated[str | None, field_option(CacheConfig, "swap_space")]
Save = Annotated[Path | None, typer.Option(help="Write the figures into this file, in the format of bench/results.")]
Threads = Annotated[
    str | None,
    typer.Option(help="Numbers of threads, as in 1,2,4, and the speed-up over the first. Default: torch's number."),
]
