"""Measure the frame rate of the inspector's page and its cost for the server: 100,000 blocks, 200 allocated per second.

python tools/inspector_speed.py: a server without a model, but with Quire's scheduler and block manager, runs 50 steps
per second; chromium shows its page. Prints frames per second, the page's script time per frame, and the additional
share of a core that the server needs while the page is open. Needs chromium.

python tools/inspector_speed.py --unwatched: measure the inspector's time per step while no page is open.
"""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import statistics
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

NUM_BLOCKS, BLOCK_SIZE = 100_000, 16
NUM_RUNNING, NUM_WAITING = 64, 0
STEPS = 50  # per second: 64 * 50 / 16 = 200 blocks per second
PROMPT, SHARED = 25_000, 8_000  # tokens; half of the requests begin with the shared ones
SECONDS = 12.0
UNWATCHED = {"running": 256, "waiting": 3_000}  # requests
TURNS = 2_000
VIEWS = {"pool": "1", "by request": "2", "prefix tree": "3", "timeline": "4"}
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
FRAMES = """seconds => new Promise(done => {
  const begun = performance.now(), from = { count: frame.count, ms: frame.ms };
  let frames = 0, worst = 0, last = begun;
  const tick = now => {
    frames++; worst = Math.max(worst, now - last); last = now;
    if (now - begun < seconds * 1000) requestAnimationFrame(tick);
    else {
      const drawn = frame.count - from.count, ms = (frame.ms - from.ms) / drawn;
      done({ fps: frames / (now - begun) * 1000, worst, drawn, ms });
    }
  };
  requestAnimationFrame(tick);
})"""


class Worker:
    """The thread of an engine without a model."""

    def __init__(
        self, num_running: int = NUM_RUNNING, num_waiting: int = NUM_WAITING, prompt: int = PROMPT, shared: int = SHARED
    ) -> None:
        from quire.cache.groups import CacheGroup
        from quire.cache.manager import BlockManager
        from quire.engine.scheduler import Scheduler
        from quire.request import Request, SamplingParams
        from quire.server.observability.inspector import Inspector

        manager = BlockManager((CacheGroup((0,)),), NUM_BLOCKS, BLOCK_SIZE, num_running * prompt)
        self.scheduler = Scheduler(
            manager, max_model_len=10**6, max_num_seqs=num_running, max_num_batched_tokens=num_running * prompt
        )
        for i in range(num_running + num_waiting):
            own = [i + 1] * (prompt - shared)
            tokens = array("i", [7] * shared + own if i % 2 else own + [i] * shared)
            sampling = SamplingParams(max_tokens=10**5, ignore_eos=True)
            self.scheduler.add(Request(f"r{i}", tokens, len(tokens), sampling))
        # Of an engine, an Inspector needs only the scheduler and `listen`.
        self.inspector = Inspector(cast(Any, self), {"model": "none"})
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def listen(self, listener: Callable[[Any], None]) -> None:
        """Subscribe to block events, as Engine.listen does."""
        self.scheduler.manager.listeners.append(listener)

    def run(self) -> None:
        """Run steps at a constant rate, and the functions of `call` between them."""
        from quire_bench.engine.no_model import sampled

        due = time.monotonic()
        while True:
            plan = self.scheduler.plan()
            self.inspector.observe(self.scheduler.commit(plan, sampled(plan)))
            due = max(due + 1 / STEPS, time.monotonic())
            while (left := due - time.monotonic()) > 0:
                try:
                    self.inbox.get(timeout=left)()
                except queue.Empty:
                    break

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread, between two steps."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def run_it() -> None:
            loop.call_soon_threadsafe(future.set_result, function())

        self.inbox.put(run_it)
        return await future


def serve() -> None:
    """Run the server. It prints its port when the pool is full."""
    import uvicorn
    from fastapi import FastAPI

    from quire.server.observability.inspector import router

    worker = Worker()
    threading.Thread(target=worker.run, daemon=True).start()
    app = FastAPI()
    app.include_router(router(worker.inspector, worker))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started or worker.scheduler.waiting or not worker.scheduler.running:
        time.sleep(0.05)
    print(server.servers[0].sockets[0].getsockname()[1], worker.scheduler.manager.pools[0].num_used, flush=True)
    sys.stdin.read()


def unwatched() -> None:
    """Measure the inspector's time per step, for the events of blocks and for the step itself."""
    from quire_bench.engine.no_model import sampled

    worker = Worker(UNWATCHED["running"], UNWATCHED["waiting"], 256, 128)
    [hear] = worker.scheduler.manager.listeners
    taken = 0.0

    def timed(event: Any) -> None:
        nonlocal taken
        begun = time.perf_counter()
        hear(event)
        taken += time.perf_counter() - begun

    worker.scheduler.manager.listeners[:] = [timed]
    steps = []
    for _ in range(TURNS + TURNS // 4):  # the first ones prefill
        taken = 0.0
        plan = worker.scheduler.plan()
        events = worker.scheduler.commit(plan, sampled(plan))
        begun = time.perf_counter()
        worker.inspector.observe(events)
        steps.append(1e6 * (taken + time.perf_counter() - begun))
    steps = steps[-TURNS:]  # all sequences fill a block in the same step
    print(
        f"a step of {UNWATCHED['running']:,} sequences, {UNWATCHED['waiting']:,} waiting, that no page watches: "
        f"{statistics.fmean(steps):.0f} us for the inspector on average, {statistics.median(steps):.0f} us where no "
        f"block is filled"
    )


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share_of_a_core(pid: int, wait: Callable[[], Any]) -> tuple[float, Any]:
    """Return the share of a core that a process uses while `wait` runs, and the result of `wait`."""
    begun, before = time.monotonic(), cpu_seconds(pid)
    found = wait()
    return (cpu_seconds(pid) - before) / (time.monotonic() - begun), found


def main() -> None:
    """Measure the page and the server."""
    from playwright.sync_api import sync_playwright

    server = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port, used = map(int, server.stdout.readline().split())
        time.sleep(2)
        alone, _ = share_of_a_core(server.pid, lambda: time.sleep(SECONDS))
        print(f"{used:,} of {NUM_BLOCKS:,} blocks owned; server without a page: {alone:.1%} of a core")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
            page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="dark")
            page.goto(f"http://127.0.0.1:{port}/inspector")
            while not page.evaluate("Boolean(inspector.state)"):
                page.wait_for_timeout(50)
            before = page.evaluate("inspector.state.pools[0].used")
            for name, key in VIEWS.items():
                page.keyboard.press(key)
                page.wait_for_timeout(1500)
                watched, found = share_of_a_core(server.pid, lambda: page.evaluate(FRAMES, SECONDS))
                print(
                    f"{name}: {found['fps']:.1f} frames a second (longest {found['worst']:.0f} ms), "
                    f"{found['drawn'] / SECONDS:.0f} drawn a second, {found['ms']:.2f} ms of script each; "
                    f"server {watched:.1%} of a core, {watched - alone:+.1%}"
                )
            if len(sys.argv) > 1:
                page.keyboard.press("1")
                page.wait_for_timeout(800)
                page.screenshot(path=sys.argv[1])
            given = page.evaluate("inspector.state.pools[0].used") - before
            print(f"{given:,} blocks allocated meanwhile")
            browser.close()
    finally:
        server.kill()


if __name__ == "__main__":
    {"--serve": serve, "--unwatched": unwatched}.get(" ".join(sys.argv[1:]), main)()
