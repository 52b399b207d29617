"""Clients that hang up at random moments. `python -m tests.server.storm 10000` does it for long."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server.serving import Serving, serving

AT_A_TIME = 24


@dataclass
class Report:
    """What a storm did and left."""

    disconnected: int
    completed: int
    leaked: list[str]  # in words; empty: nothing


def num_descriptors(server: Serving) -> int:
    """Files but those of the sandboxes' processes, which come when they are first needed and stay."""
    service = server.service
    grammars = service.factory._grammars
    tools = None if grammars is None else grammars._tools
    sandboxes = [
        *([] if tools is None else [tools.trials]),
        *([service.model.template._renderers] if service.model.template else []),
    ]
    processes = [process for sandbox in sandboxes for process in sandbox._processes]
    running = [process._process for process in processes if process._process is not None]
    pipes = sum(not pipe.closed for each in running for pipe in (each.stdin, each.stdout, each.stderr))  # type: ignore[union-attr]
    return len(os.listdir("/proc/self/fd")) - pipes if Path("/proc/self/fd").exists() else 0


def num_threads() -> int:
    """Threads but those of the pools, which come when they are first needed and stay."""
    # The third is uvloop 0.21's.
    pools = ("asyncio_", "uvloop_", "ThreadPoolExecutor-", "quire-grammar_", "quire-text_", "quire-template_")
    return sum(not thread.name.startswith(pools) for thread in threading.enumerate())


def num_tasks(server: Serving) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    assert server.loop is not None
    return asyncio.run_coroutine_threadsafe(count(), server.loop).result(60)


def bodies(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A request of some kind."""
    sampling: dict[str, Any] = {
        "max_tokens": rng.choice((1, 5, 60, 300)),
        "stream": rng.random() < 0.7,
        "n": rng.choice((1, 1, 1, 3)),
        "temperature": rng.choice((0, 1)),
        "ignore_eos": True,
    }
    kind = rng.random()
    if kind < 0.1:
        return "/v1/completions", sampling | {"prompt": "x", "use_beam_search": True, "n": 3, "stream": False}
    if kind < 0.3:
        return "/v1/chat/completions", sampling | {"messages": [{"role": "user", "content": "a sorted list"}]}
    prompts = ["import os\n" * rng.choice((1, 10, 40)), "def f(x):\n", [7] * rng.randint(1, 200)]
    prompt = rng.choice([*prompts, ["a", "b"]])
    if kind < 0.4:
        return "/v1/completions", sampling | {"prompt": prompt, "regex": "[a-z]{40,80}"}
    return "/v1/completions", sampling | {"prompt": prompt}


def request(path: str, body: dict[str, Any]) -> bytes:
    import json

    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    )
    return head.encode() + b"\r\n\r\n" + payload


async def one(server: Serving, rng: random.Random) -> bool:
    """A client that hangs up somewhere: within what it sends, before an answer, within one, or at its end."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    sent = request(*bodies(rng))
    where = rng.random()
    writer.write(sent[: rng.randrange(len(sent))] if where < 0.1 else sent)
    completed = False
    try:
        if where >= 0.1:
            patience = rng.choice((0.0, 0.002, 0.02, 0.2, 1.0))
            end = time.monotonic() + patience
            while (left := end - time.monotonic()) > 0:
                part = await asyncio.wait_for(reader.read(65536), left)
                if not part or b"[DONE]" in part:
                    completed = True
                    break
    except asyncio.TimeoutError:
        pass
    if rng.random() < 0.5:  # with a reset instead of an orderly end
        own = writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    writer.close()
    return completed


async def clients(server: Serving, count: int, seed: int) -> int:
    """All of them, some at a time. Returns how many saw the end of their answer."""
    rng, slots, completed = random.Random(seed), asyncio.Semaphore(AT_A_TIME), 0

    async def run(own: random.Random) -> None:
        nonlocal completed
        async with slots:
            completed += await one(server, own)

    await asyncio.gather(*(run(random.Random(rng.random())) for _ in range(count)))
    return completed


def held(server: Serving) -> tuple[int, int, int]:
    """Tasks, descriptors and threads."""
    return num_tasks(server), num_descriptors(server), num_threads()


def storm(server: Serving, count: int, seed: int) -> Report:
    """So many clients that hang up; then what they left behind."""
    asyncio.run(clients(server, min(count, 2 * AT_A_TIME), seed + 1))  # so that all that is made once is there
    settle(server)
    before = held(server)
    completed = asyncio.run(clients(server, count, seed))
    settle(server)
    end = time.monotonic() + 60
    while any(now > then for now, then in zip(held(server), before, strict=True)) and time.monotonic() < end:
        time.sleep(0.05)  # some wait for a template's process; the system closes connections when it comes to it
    after = held(server)
    leaked = [
        f"{now - then} {what}"
        for what, then, now in zip(("tasks", "file descriptors", "threads"), before, after, strict=True)
        if now > then
    ]
    if not server.is_idle():
        leaked.append("blocks or requests")
    worker = server.service.engine_client
    if worker.llm._generations or worker.llm._searches or not worker.clocks.is_empty:
        leaked.append("entries of the worker")
    return Report(count, completed, leaked)


def settle(server: Serving, are_gone: bool = True) -> None:
    """Wait until the server has nothing to do. are_gone: and no connections, for all clients have closed theirs."""
    assert server.server is not None
    state = server.server.server_state
    for _ in range(5):  # turns of its loop, in which it takes what clients have sent until now
        num_tasks(server)
    end = time.monotonic() + 60
    while ((state.connections if are_gone else state.tasks) or not server.is_idle()) and time.monotonic() < end:
        time.sleep(0.02)
    gc.collect()


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with serving() as server:
        start = time.monotonic()
        report = storm(server, count, seed=0)
        alive = server.post("/v1/completions", prompt="x", max_tokens=1).status
    shown = ", ".join(report.leaked) or "nothing"
    print(
        f"{count} clients hung up in {time.monotonic() - start:.0f} s ({report.completed} had seen the end of their "
        f"answer); left behind: {shown}; the next request got {alive}"
    )
    raise SystemExit(bool(report.leaked))


if __name__ == "__main__":
    main()
