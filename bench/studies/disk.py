"""Measure KV blocks that come from a disk, and decoding while they go there.

    python bench/studies/disk.py --model DIR --tokens 1088

Prints the first token of a known prompt after `quire serve --kv-disk` was started again, computed, read and cached,
and steps of decoding with and without writing.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from quire import LLM, SamplingParams
from quire.cache.disk.store import SLOTS
from quire.cache.disk.tier import DiskTier
from quire.cli.options import fail
from quire.errors import QuireError
from quire_bench.cli.options import Model
from quire_bench.server.process import server

VOCABULARY = 500  # token ids that every model has
WRITTEN_AFTER = 0.5  # s without a further byte after which all is written
WRITTEN_WITHIN = 120.0  # s
TOO_SLOW = ("slower", "late")  # reasons for which a prompt is computed though its blocks are on the disk
MISSES = re.compile(r'^quire:kv_disk_misses_total{.*reason="(\w+)".*} (\S+)$', re.MULTILINE)
FLUSH_WITHIN = 600.0  # s
ROUNDS = 6  # half of them without writing
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


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
            found = first_tokens(model, Path(made) / "kv", tokens, prompts)
            step = measure(model, Path(made) / "kv", tokens, prompts, steps, sequences)
    except QuireError as error:
        fail(error)
    print(f"first token of {found.tokens:,} tokens, {found.bytes / 2**20:.1f} MiB of blocks:")
    for name in ("computed", "on_disk", "in_memory", "cached"):
        if (seconds := getattr(found, name)) is not None:
            print(f"  {name.replace('_', ' '):12s} {1e3 * seconds:8.1f} ms  {seconds / found.computed:6.1%}")
    if found.unread:
        print(f"  {found.unread} of {2 * prompts} prompts after a restart were computed, as reading was no faster")
    slower = step.seconds_writing / step.seconds - 1
    print(
        f"a step that decodes: {1e3 * step.seconds:.2f} ms, while {step.bytes_written / 2**20:.1f} MiB/s are written:"
    )
    print(f"  {1e3 * step.seconds_writing:.2f} ms  {slower:+.1%}")


@dataclass(frozen=True)
class FirstTokens:
    """Seconds from a request to its answer of one token: medians of prompts."""

    tokens: int  # of each prompt
    bytes: int  # of its blocks
    computed: float  # of an unknown prompt
    in_memory: float | None  # of one that was read after a restart, its files in the system's memory
    on_disk: float | None  # its files out of it
    cached: float  # of one that is in the prefix cache
    unread: int  # prompts that were computed after a restart, as reading was no faster; they are in no median


def prompt(i: int, tokens: int) -> list[int]:
    """A prompt that differs from every other one from its first block on."""
    return [(i * 7919 + j * (31 + i)) % VOCABULARY for j in range(tokens)]


def first_tokens(model: str | None, directory: Path, tokens: int, prompts: int) -> FirstTokens:
    """Measure with a directory that is empty. Raises QuireError where blocks that are on the disk cannot be read."""
    asked = [prompt(i, tokens) for i in range(prompts)]
    own = ["--kv-disk", str(directory), "--num-speculative-tokens", "0", *([] if model is None else ["--model", model])]
    with server(*own) as process:
        client = _Client(process.url)
        client.seconds(prompt(-1, tokens))  # the first step of a process has more to do
        computed = [client.seconds(one) for one in asked]
        cached = [client.seconds(one) for one in asked]
        client.wait_until_written()
        size = int(client.metric("kv_disk_used_bytes")) // (prompts + 1)
    reading: dict[str, list[float]] = {}
    for name in ("in memory", "on disk"):
        with server(*own) as process:
            client, reading[name] = _Client(process.url), []
            client.seconds(prompt(-2, tokens))
            for one in asked:
                if name == "on disk":
                    _forget_pages(directory)
                before = client.metric("kv_disk_hits_total")
                seconds = client.seconds(one)
                if client.metric("kv_disk_hits_total") > before:
                    reading[name].append(seconds)
            if failed := client.failed_reads():
                raise QuireError(f"KV blocks were not read from {directory}: {failed}")
    return FirstTokens(
        tokens,
        size,
        statistics.median(computed),
        _median(reading["in memory"]),
        _median(reading["on disk"]),
        statistics.median(cached),
        sum(prompts - len(read) for read in reading.values()),
    )


def _median(seconds: list[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


class _Client:
    """A connection to the server that stays open."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._http = HTTPConnection(parts.hostname or "", parts.port, timeout=600.0)

    def seconds(self, tokens: list[int]) -> float:
        """Until the answer of one token."""
        asked: dict[str, Any] = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        body = json.dumps(asked)
        start = time.perf_counter()
        answer = self._answer("POST", "/v1/completions", body)
        took = time.perf_counter() - start
        if json.loads(answer)["usage"]["completion_tokens"] != 1:
            raise QuireError(f"the server answered {answer[:200]!r}; one token was asked for")
        return took

    def metric(self, name: str) -> float:
        """A number of the server's that has no labels of its own."""
        for line in self._answer("GET", "/metrics").decode().splitlines():
            if line.startswith(f"quire:{name}{{"):
                return float(line.rsplit(" ", 1)[1])
        raise QuireError(f"the server has no metric {name}")

    def failed_reads(self) -> dict[str, int]:
        """KV blocks that are on the disk and could not be read, by reason."""
        misses = MISSES.findall(self._answer("GET", "/metrics").decode())
        return {reason: int(float(count)) for reason, count in misses if float(count) and reason not in TOO_SLOW}

    def wait_until_written(self) -> None:
        """Wait until all blocks are on the disk."""
        before, deadline = -1.0, time.monotonic() + WRITTEN_WITHIN
        while (now := self.metric("kv_disk_written_bytes_total")) != before:
            if time.monotonic() > deadline:
                raise QuireError(f"the blocks are not on the disk after {WRITTEN_WITHIN:.0f} s")
            before = now
            time.sleep(WRITTEN_AFTER)

    def _answer(self, method: str, path: str, body: str | None = None) -> bytes:
        self._http.request(method, path, body, {"Content-Type": "application/json"})
        answer = self._http.getresponse()
        found = answer.read()
        if answer.status != 200:
            raise QuireError(f"the server answered {path} with HTTP status {answer.status}: {found[:200]!r}")
        return found


def _forget_pages(directory: Path) -> None:
    """Let the system remove from its memory what it has of the files."""
    for path in directory.rglob(f"{SLOTS}.*"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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


if __name__ == "__main__":
    typer.run(main)
