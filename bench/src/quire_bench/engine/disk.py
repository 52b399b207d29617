"""Blocks on a disk: the first token of a known prompt after a restart, and decoding while blocks are written."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.cache.disk.store import SLOTS
from quire.cache.disk.tier import DiskTier
from quire.errors import QuireError

VOCABULARY = 500  # token ids that every model has
FLUSH_WITHIN = 600.0  # s
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Found:
    """In seconds: medians of prompts, means of steps.

    What is read comes from the system's memory, or from the disk where that was forgotten.
    """

    tokens: int  # of each prompt
    bytes: int  # of its blocks
    computed: float  # to the first token of an unknown prompt
    in_memory: float  # the same of one that was known before the restart, its files in the system's memory
    on_disk: float  # its files out of it
    cached: float  # of one that stands in the prefix cache
    step: float  # that decodes
    step_writing: float  # the same while blocks are written
    bytes_written: float  # a second, meanwhile

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return asdict(self)


def measure(model: str | None, directory: Path, tokens: int, prompts: int, steps: int, sequences: int) -> Found:
    """Measure with a directory that is empty.

    steps: to decode with, and as many without writing, of so many sequences; several times in turn.
    """
    asked = [_prompt(i, tokens) for i in range(prompts)]
    options: dict[str, Any] = {
        "kv_disk": str(directory),
        "max_num_seqs": max(1, sequences),
        "num_speculative_tokens": 0,
    }
    with LLM(model, **options) as llm:
        _seconds(llm, _prompt(-1, tokens))  # what the first step of a process has to do besides
        computed = [_seconds(llm, prompt) for prompt in asked]
        cached = [_seconds(llm, prompt) for prompt in asked]
        _flush(_disk(llm))
        size = _disk(llm).store.num_bytes // (prompts + 1)
    reading: dict[str, list[float]] = {}
    for name in ("in memory", "on disk"):
        with LLM(model, **options) as llm:
            _seconds(llm, _prompt(-2, tokens))
            reading[name], before = [], _disk(llm).reader.counts.hits
            for prompt in asked:
                if name == "on disk":
                    _forget_pages(directory)
                reading[name].append(_seconds(llm, prompt))
            if (hits := _disk(llm).reader.counts.hits - before) != prompts:
                raise QuireError(f"{hits} of {prompts} prompts were read from the disk; the others were computed")
    with LLM(model, **options) as llm:
        idle, writing, rate = _decode(llm, steps, sequences, prompts, tokens)
    return Found(
        tokens=tokens,
        bytes=size,
        computed=statistics.median(computed),
        in_memory=statistics.median(reading["in memory"]),
        on_disk=statistics.median(reading["on disk"]),
        cached=statistics.median(cached),
        step=idle,
        step_writing=writing,
        bytes_written=rate,
    )


def _prompt(i: int, tokens: int) -> list[int]:
    return [(i * 7919 + j * (31 + i)) % VOCABULARY for j in range(tokens)]


def _seconds(llm: LLM, prompt: list[int]) -> float:
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt}], ONE, use_tqdm=False)
    return time.perf_counter() - start


def _disk(llm: LLM) -> DiskTier:
    disk = llm.engine.scheduler.manager.disk
    if disk is None:
        raise QuireError("the engine has no disk")
    return disk


def _flush(disk: DiskTier) -> None:
    if not disk.flush(FLUSH_WITHIN):
        raise QuireError(f"the disk has not taken all blocks in {FLUSH_WITHIN:.0f} s")


def _forget_pages(directory: Path) -> None:
    """Let the system forget what it has of the files in memory."""
    for path in directory.rglob(f"{SLOTS}.*"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _decode(llm: LLM, steps: int, sequences: int, prompts: int, tokens: int) -> tuple[float, float, float]:
    """Mean seconds of a step without and with writing, and the bytes that are written a second."""
    engine, disk = llm.engine, _disk(llm)
    for i in range(prompts):
        _seconds(llm, _prompt(i, tokens))  # reusable blocks, that nobody owns
    rounds = 6
    params = SamplingParams(temperature=0, max_tokens=(rounds + 1) * steps, ignore_eos=True)
    requests = llm.prompts.requests(
        [llm.prompts.encoded({"prompt_token_ids": _prompt(100 + i, 64)}) for i in range(sequences)], params, None, None
    )
    for request, _ in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()
    manager = engine.scheduler.manager
    blocks = [
        [(i, one) for i, one in enumerate(index.by_block.values()) if pool.ref_counts[one.block] == 0]
        for pool, index in zip(manager.pools, manager.indexes, strict=True)
    ]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    written, took = 0, 0.0
    for i in range(rounds):
        is_writing = i % 2 == 1
        disk.flush(FLUSH_WITHIN)
        if is_writing:
            disk.store.clear()
            for group, those in enumerate(blocks):
                disk.offer(group, those, disk.store.next_tick())
        before, start = disk.counts.bytes, time.perf_counter()
        for _ in range(steps // 2):
            began = time.perf_counter()
            engine.step()
            seconds[is_writing].append(time.perf_counter() - began)
        if is_writing:
            written += disk.counts.bytes - before
            took += time.perf_counter() - start
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    return statistics.fmean(seconds[False]), statistics.fmean(seconds[True]), written / took
