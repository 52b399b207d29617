"""Decoding while KV blocks are written to a disk."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from quire import LLM, SamplingParams
from quire.cache.disk.tier import DiskTier
from quire.errors import QuireError
from quire_bench.server.restart import prompt

FLUSH_WITHIN = 600.0  # s
ROUNDS = 6  # half of them without writing
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Steps:
    """Means of steps that decode."""

    seconds: float
    seconds_writing: float  # while blocks are written
    bytes_written: float  # a second, meanwhile


def measure(model: str | None, directory: Path, tokens: int, prompts: int, steps: int, sequences: int) -> Steps:
    """Measure with blocks of so many prompts. steps: to decode with, and as many without writing, in turn."""
    with LLM(model, kv_disk=str(directory), max_num_seqs=sequences, num_speculative_tokens=0) as llm:
        engine, disk = llm.engine, _disk(llm)
        for i in range(prompts):  # reusable blocks without owners
            llm.generate([{"prompt_token_ids": prompt(i, tokens)}], ONE, use_tqdm=False)
        params = SamplingParams(temperature=0, max_tokens=(ROUNDS + 1) * steps, ignore_eos=True)
        asked = [llm.factory.tokenize({"prompt_token_ids": prompt(100 + i, 64)}) for i in range(sequences)]
        for _, [request] in llm.factory.generations(asked, params, None, None):
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
        for i in range(ROUNDS):
            is_writing = i % 2 == 1
            if not disk.flush(FLUSH_WITHIN):
                raise QuireError(f"the disk has not taken all blocks in {FLUSH_WITHIN:.0f} s")
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
    return Steps(statistics.fmean(seconds[False]), statistics.fmean(seconds[True]), written / took)


def _disk(llm: LLM) -> DiskTier:
    disk = llm.engine.scheduler.manager.disk
    if disk is None:
        raise QuireError("the engine has no disk")
    return disk
