"""The protocol of an engine's process: JSON lines in at standard input, JSON lines out at its first standard output.

First its settings, answered with the engine's version; then the paths of files with prompts, each answered with the
seconds that they took. Nothing here or in a runner imports Quire, Quire's own runner offload_if_large.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Settings:
    """The settings of every engine, sent before it starts."""

    model: str | None  # a checkpoint, or what became of it for this engine; None: Quire's embedded model
    threads: int
    max_model_len: int | None  # tokens of the longest request
    max_requests: int  # that run at the same time
    max_tokens: int  # of all requests that run at the same time
    prefix_caching: bool
    kv_cache_gib: int
    dtype: str = "bfloat16"  # in which engines that do not choose by themselves compute fastest here
    quantization: str | None = None  # int8 or int4: how engines that round while they load do it; None: as the model is


# Prompts and the number of tokens to generate for each -> how many came. Greedy, past the model's end tokens.
Generate: TypeAlias = Callable[[list[list[int]], list[int]], list[int]]


def serve(start: Callable[[Settings], tuple[str, Generate]]) -> None:
    """Start an engine, which gives its version and its function, and run what standard input names until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an engine prints is no answer

    def answer(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")

    version, generate = start(Settings(**json.loads(sys.stdin.readline())))
    answer(version=version)
    for line in sys.stdin:
        work = json.loads(Path(json.loads(line)).read_text())
        begun = time.perf_counter()
        counts = generate(work["prompts"], work["new_tokens"])
        answer(seconds=time.perf_counter() - begun, new_tokens=counts)
