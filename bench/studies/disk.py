"""Measure KV blocks that come from a disk, and decoding while they go there.

    python bench/studies/disk.py --model DIR --tokens 1088

Prints the first token of a known prompt after `quire serve --kv-disk` was started again, computed, read and cached,
and steps of decoding with and without writing.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from quire import LLM, SamplingParams
from quire.cache.disk.store import SLOTS
from quire.cli.options import fail
from quire.errors import QuireError
from quire_bench.cli.options import Model
from quire_bench.fleet.running import Replica, fetch, waited_for
from quire_bench.proc import num_cores

VOCABULARY = 500  # token ids that every model has
FLUSH_WITHIN = 600.0  # s
ROUNDS = 6  # half of them without writing


def main(
    model: Model = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where the blocks go; a directory below it is made, and removed.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Of each prompt.")] = 1088,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts; their median is reported.")] = 7,
    steps: Annotated[int, typer.Option(min=2, help="That decode, with and without writing.")] = 200,
    sequences: Annotated[int, typer.Option(min=1, help="That decode.")] = 1,
) -> None:
    """Print both."""
    try:
        with TemporaryDirectory(prefix="quire-disk-", dir=directory) as made:
            first_tokens(model, Path(made) / "kv", tokens, prompts)
            writing(model, Path(made) / "kv", tokens, prompts, steps, sequences)
    except QuireError as error:
        fail(error)


def prompt(i: int, tokens: int) -> list[int]:
    """Return a prompt that differs from every other one from its first block on."""
    return [(i * 7919 + j * (31 + i)) % VOCABULARY for j in range(tokens)]


def first_tokens(model: str | None, directory: Path, tokens: int, prompts: int) -> None:
    """Print medians of the time to the answer of one token. The directory must be empty."""
    asked = [prompt(i, tokens) for i in range(prompts)]
    own = ["--kv-disk", str(directory), "--num-speculative-tokens", "0", *([] if model is None else ["--model", model])]
    replica = Replica(own, num_cores())
    taken: dict[str, list[float]] = {}
    try:
        replica.start()
        answer(replica, prompt(-1, tokens))  # the first step of a process has more to do
        for name in ("computed", "in the prefix cache"):
            taken[name] = [answer(replica, one) for one in asked]
        waited_for(lambda: written(replica) or None, "the blocks are not on the disk")
        size = replica.metric("kv_disk_used_bytes") / (prompts + 1)
        for name in ("in the page cache", "on the disk"):
            replica.restart()
            answer(replica, prompt(-2, tokens))
            taken[name] = []
            for one in asked:
                if name == "on the disk":
                    forget_pages(directory)
                before = replica.metric("kv_disk_hits_total")
                seconds = answer(replica, one)
                if replica.metric("kv_disk_hits_total") > before:  # else reading was no faster
                    taken[name].append(seconds)
    finally:
        replica.close()
    print(f"first token of {tokens:,} tokens, {size / 2**20:.1f} MiB of blocks:")
    computed = statistics.median(taken["computed"])
    for name, seconds_of in taken.items():
        if seconds_of:
            median = statistics.median(seconds_of)
            print(f"  {name:20s} {1e3 * median:8.1f} ms  {median / computed:6.1%}  {len(seconds_of)} of {prompts}")


def answer(replica: Replica, tokens: list[int]) -> float:
    """Return the seconds until the answer of one token."""
    body = json.dumps({"prompt": tokens, "max_tokens": 1, "temperature": 0, "ignore_eos": True}).encode()
    start = time.perf_counter()
    fetch(f"{replica.url}/v1/completions", body, {"Content-Type": "application/json"})
    return time.perf_counter() - start


def written(replica: Replica) -> bool:
    """Return whether no byte was written within half a second."""
    before = replica.metric("kv_disk_written_bytes_total")
    time.sleep(0.5)
    return replica.metric("kv_disk_written_bytes_total") == before > 0


def forget_pages(directory: Path) -> None:
    """Make the system remove the pages of the files from its memory."""
    for path in directory.rglob(f"{SLOTS}.*"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def writing(model: str | None, directory: Path, tokens: int, prompts: int, steps: int, sequences: int) -> None:
    """Print the mean of steps that decode, in turn with and without writing blocks of that number of prompts."""
    with LLM(model, kv_disk=str(directory), max_num_seqs=sequences, num_speculative_tokens=0) as llm:
        engine, manager = llm.engine, llm.engine.scheduler.manager
        disk = manager.disk
        assert disk is not None
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        for i in range(prompts):  # reusable blocks without owners
            llm.generate([{"prompt_token_ids": prompt(i, tokens)}], one, use_tqdm=False)
        params = SamplingParams(temperature=0, max_tokens=(ROUNDS + 1) * steps, ignore_eos=True)
        asked = [llm.factory.tokenize({"prompt_token_ids": prompt(100 + i, 64)}) for i in range(sequences)]
        for _, [request] in llm.factory.generations(asked, params, None, None):
            engine.add(request)
        for _ in range(4):
            engine.step()
        blocks = [
            [(i, entry) for i, entry in enumerate(index.by_block.values()) if pool.ref_counts[entry.block] == 0]
            for pool, index in zip(manager.pools, manager.indexes, strict=True)
        ]
        seconds: dict[bool, list[float]] = {False: [], True: []}
        num_bytes = 0
        for i in range(ROUNDS):
            if not disk.flush(FLUSH_WITHIN):
                raise QuireError(f"the disk has not taken all blocks in {FLUSH_WITHIN:.0f} s")
            if is_writing := i % 2 == 1:
                disk.store.clear()
                for group, those in enumerate(blocks):
                    disk.offer(group, those, disk.store.next_tick())
            before = disk.counts.bytes
            for _ in range(steps // 2):
                began = time.perf_counter()
                engine.step()
                seconds[is_writing].append(time.perf_counter() - began)
            num_bytes += (disk.counts.bytes - before) * is_writing
        for request_id in list(engine.scheduler.requests):
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
    alone, both = (statistics.fmean(found) for found in seconds.values())
    rate = num_bytes / sum(seconds[True]) / 2**20
    print(f"a step that decodes: {1e3 * alone:.2f} ms, while {rate:.1f} MiB/s are written:")
    print(f"  {1e3 * both:.2f} ms  {both / alone - 1:+.1%}")


if __name__ == "__main__":
    typer.run(main)
