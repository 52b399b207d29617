"""The inspector's map in a real browser: zoom keeps the block below the pointer, at the size of a default server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.fakes import fake_engine, request
from tests.server.browsing import open_browser, shown

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


def test_zoom_goes_to_the_pointer_and_what_was_never_used_is_hidden(browser: Any) -> None:
    engine = fake_engine(
        num_blocks=16_384, block_size=1, max_model_len=2048, max_num_batched_tokens=8192, max_num_seqs=64
    )
    with shown(browser, engine) as it:
        for i in range(4):
            it.worker.do(lambda i=i: engine.add(request(f"r{i}", [i] * 800, max_tokens=30)))
        it.worker.steps(3)
        it.catch_up()
        hidden = 16_384 - it.ask("inspector.device.count")
        assert hidden > 11_000
        assert it.text("#unused") == f"{hidden:,} unused"
        x, y = it.ask("inspector.place(1700)")
        it.page.mouse.move(x, y)
        block = it.ask("inspector.device.hover")
        assert 0 <= 1700 - block < 8
        for _ in range(8):
            it.page.keyboard.down("Control")
            it.page.mouse.wheel(0, -100)
            it.page.keyboard.up("Control")
            it.settle()
        assert it.ask("inspector.device.per") == 1
        cell = it.ask("inspector.device.cell")
        assert cell > 12
        assert abs(it.ask(f"inspector.place({block})")[1] - y) <= cell
        it.page.locator("#follow").click()  # and where something happens comes into sight
        it.ask("inspector.device.root.scrollTop = 0")
        it.worker.steps(1)
        it.catch_up()
        it.until("inspector.device.root.scrollTop > 0")
