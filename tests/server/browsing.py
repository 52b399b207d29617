"""The server's pages in a real browser, in tests."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.watching import EngineOnAThread, Served

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--no-first-run"]  # fmt: skip


@contextmanager
def open_browser() -> Iterator[Any]:
    """Chromium; skips where it or playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium to open the page in")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


FAULTS = Path(__file__).with_name("faults.js").read_text()


class Shown:
    """A page that is open, and its engine."""

    def __init__(self, page: Any, server: Served | None) -> None:
        self.page, self.server = page, server
        if server is not None:
            self.worker, self.engine = server.worker, server.worker.engine

    def ask(self, what: str) -> Any:
        return self.page.evaluate(what)

    def until(self, what: str) -> None:
        deadline = time.monotonic() + 60
        while not self.ask(what):
            assert time.monotonic() < deadline, f"{what} did not come true"
            time.sleep(0.01)

    def catch_up(self) -> None:
        """Wait until the page has been told everything, and has drawn it."""
        watched = self.worker.hub.inspector
        number = self.worker.do(lambda: watched.flush() or watched._number)
        self.until(f"inspector.state?.number === {number}")
        self.settle()

    def settle(self) -> None:
        """Wait until all is drawn, panels too."""
        self.ask("inspector.drawn().then(() => true)")

    def click_block(self, block: int) -> None:
        self.page.mouse.click(*self.ask(f"inspector.place({block})"))
        self.settle()

    def click_request(self, name: str) -> None:
        self.page.fill("#find", name)
        self.page.press("#find", "Enter")
        self.page.evaluate("document.activeElement.blur()")
        self.settle()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def tables(self) -> dict[str, list[list[int]]]:
        """Of each request that has not ended, its blocks a group."""
        return self.ask(
            "Object.fromEntries([...inspector.state.requests.values()].filter(r => r.state !== 'ended')"
            ".map(r => [r.id, r.tables]))"
        )

    def check(self) -> None:
        """The page's books are those of the engine."""
        manager = self.engine.scheduler.manager
        for g, pool in enumerate(manager.pools):
            assert self.ask(f"[...inspector.state.pools[{g}].refs]") == list(pool.ref_counts)
            cached = self.ask(f"[...inspector.state.pools[{g}].cached].flatMap((on, block) => on ? [block] : [])")
            assert cached == sorted(manager.indexes[g].by_block)
            assert self.ask(f"[...inspector.state.hosts[{g}].refs]") == list(manager.host_pools[g].ref_counts)
        assert self.tables() == {
            r.id: [manager.owned(r, g).tolist() if r.cache.block_ids else [] for g in range(len(manager.groups))]
            for r in self.engine.scheduler.requests.values()
        }
        usage, shown = self.engine.scheduler.usage(), self.ask("inspector.state.usage()")
        for name in ("num_blocks", "used_blocks", "logical_blocks", "cached_blocks", "filled_slots", "host_blocks"):
            assert shown[name] == getattr(usage, name), name
        assert shown["wasted_slots"] == usage.wasted_slots
        assert self.text("#g-used") == f"{usage.used_blocks:,}"
        assert self.text("#g-saved") == f"{usage.logical_blocks - usage.used_blocks:,}"


@contextmanager
def shown(browser: Any, engine: Any = None, url: str | None = None, **options: Any) -> Iterator[Shown]:
    """A page that complains of nothing and talks to nobody else."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"} | options)
    page = context.new_page()
    complaints: list[str] = []
    addresses: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda sent: addresses.append(sent.url))
    server = Served(EngineOnAThread(engine)) if engine is not None else None
    try:
        page.goto(server.url if server else url)
        it = Shown(page, server)
        if server:
            it.until("inspector.status[0] === 'live'")
        yield it
        assert complaints == []
        home = server.url if server else "file://"
        assert [address for address in addresses if not address.startswith((home, "data:", "blob:"))] == []
    finally:
        context.close()
        if server:
            server.stop()
