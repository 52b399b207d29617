"""What several commands share: their options, and how they print."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

Model = Annotated[str | None, typer.Option(help="Directory or hub name. Default: the embedded model.")]
Backend = Annotated[str, typer.Option("--attention-backend", "--attention", help="auto or a name from `quire info`.")]
Device = Annotated[str, typer.Option(help="cpu, or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")]
ModelImpl = Annotated[
    str,
    typer.Option(help="quire: its decoder; transformers: its code with our attention; auto: what there is."),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence in tokens.")]
Reproducible = Annotated[
    bool, typer.Option("--reproducible", help="On a GPU too: the same bits whatever runs beside a request.")
]
BlockSize = Annotated[int, typer.Option(help="Tokens a KV block.")]
NumBlocks = Annotated[int | None, typer.Option(help="KV blocks; overrides --kv-cache-memory.")]
CacheMemory = Annotated[str, typer.Option(help="Bytes (2GiB) or a share of the free memory (50%).")]
PrefixCaching = Annotated[bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching")]
Preemption = Annotated[str, typer.Option(help="When blocks run out: recompute, or swap.")]
SwapSpace = Annotated[str | None, typer.Option(help="On the host, for swap: bytes or a share. Default: 4GiB.")]
SchedulingPolicy = Annotated[str, typer.Option(help="Who comes first: fcfs, priority or shortest.")]
MaxNumSeqs = Annotated[int, typer.Option(help="Sequences that run at the same time.")]
MaxNumBatchedTokens = Annotated[int, typer.Option(help="Query tokens a step.")]
NumSpeculativeTokens = Annotated[
    int | None, typer.Option(help="Guessed at a time by prompt lookup; 0: none. Default: 3, on a GPU 0.")
]
MeasuredGuesses = Annotated[
    int, typer.Option("--num-speculative-tokens", help="Guessed at a time by prompt lookup; 0: none.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def row(name: str, value: str) -> None:
    """Print one line of a table."""
    print(f"{name:18s} {value}")


def fail(reason: object) -> NoReturn:
    """Say what is wrong and end with status 1."""
    print(f"error: {reason}", file=sys.stderr)
    raise typer.Exit(1)
