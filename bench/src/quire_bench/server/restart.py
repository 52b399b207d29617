"""The first token of a known prompt after `quire serve --kv-disk` was started again, a process each time."""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.cache.disk.store import SLOTS
from quire.errors import QuireError
from quire_bench.server.process import server

VOCABULARY = 500  # token ids that every model has
WRITTEN_AFTER = 0.5  # s without a further byte after which all is written
WRITTEN_WITHIN = 120.0  # s
TOO_SLOW = ("slower", "late")  # reasons for which a prompt is computed though its blocks are on the disk
MISSES = re.compile(r'^quire:kv_disk_misses_total{.*reason="(\w+)".*} (\S+)$', re.MULTILINE)


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
