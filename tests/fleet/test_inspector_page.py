"""The fleet's page in a real browser, against a gateway and two replicas: what it shows is what the gateway knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire.fleet.placement import PARTS, reason_of
from tests.fleet.gateways import at, drain, fronting, lose, replicas, slow_all, until
from tests.fleet.serving import Front
from tests.fleet.test_metrics import Asked, serving_one
from tests.server.browsing import FAULTS, open_browser
from tests.server.serving import Serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@contextmanager
def shown(browser: Any, front: Front, **options: Any) -> Iterator[Any]:
    """A page that complains of nothing and talks to no one else."""
    context = browser.new_context(**{"viewport": {"width": 1360, "height": 820}, "color_scheme": "dark"} | options)
    page = context.new_page()
    complaints: list[str] = []
    addresses: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda sent: addresses.append(sent.url))
    try:
        page.goto(f"{front.url}/inspector")
        until(lambda: page.evaluate("inspector.status") == "live")
        yield page
        assert complaints == []
        assert [address for address in addresses if not address.startswith((front.url, "data:"))] == []
    finally:
        context.close()


def host(server: Serving) -> str:
    return f"127.0.0.1:{server.port}"


def test_replicas_and_an_idle_gateway(browser: Any, front: Front, servers: list[Serving]) -> None:
    with shown(browser, front) as page:
        assert "quire-embedded" in page.locator("#about").inner_text()
        assert page.locator("#counts").inner_text() == "2 up"
        assert page.locator("#noopen").is_visible()
        assert page.locator("#noplacement").inner_text() == "No request came yet."
        rows = page.locator("#replicas tr")
        assert rows.count() == 2
        for server in servers:
            row = page.locator(f'#replicas tr[data-url="{server.url}"]').inner_text()
            assert host(server) in row
            assert "up" in row
            assert "0 / 8" in row
            assert "/ 128" in row


def test_a_request_that_moves(browser: Any, front: Front, servers: list[Serving]) -> None:
    slow_all(servers, 0.05)  # a request takes half a minute, until it is let go
    with shown(browser, front) as page:
        asked = Asked(front, prompt=list(range(5, 45)), max_tokens=600, temperature=0, ignore_eos=True)
        url = serving_one(front)
        computes = at(servers, url)
        until(lambda: host(computes) in page.locator("#requests").inner_text())
        request = page.evaluate("inspector.state.requests[0]")
        assert request["prompt"] == 40
        page.locator("#placements tr").first.click()
        reason = reason_of(front.gateway.fleet.placements[0].choice)
        assert page.locator("#why").inner_text() == f"{reason[0].upper()}{reason[1:]}."
        assert page.locator("#candidates tr").count() == 2
        assert page.locator("#candidates tr.best").inner_text().startswith(host(computes))
        assert page.locator("#legend span").count() == len(PARTS)

        lose(computes)
        until(lambda: page.locator('#placements tr[data-reason="lost"]').count() == 1)
        moved = page.locator('#placements tr[data-reason="lost"]').inner_text()
        assert f"tokens: {host(computes)} was lost" in moved
        slow_all(servers, 0.0)
        assert asked.result().status == 200
        until(lambda: page.locator("#noopen").is_visible())
        page.get_by_role("button", name="Moved").click()
        assert page.locator("#placements tr").count() == 1
        assert page.locator("#choice").is_visible()  # what was chosen stays, and it is not of those that moved
        page.get_by_role("button", name="All").click()
        assert page.locator("#placements tr").count() == 2


def test_pause_keeps_what_is_shown(browser: Any, front: Front, servers: list[Serving]) -> None:
    with shown(browser, front) as page:
        page.keyboard.press("Space")
        assert page.evaluate("inspector.status") == "paused"
        number = page.evaluate("inspector.number")
        front.post("/v1/completions", prompt="a", max_tokens=2)
        until(lambda: page.evaluate("latest.placements.length") == 1)
        assert page.evaluate("inspector.number") == number
        assert page.locator("#placements tr").count() == 0
        page.keyboard.press("Space")
        until(lambda: page.locator("#placements tr").count() == 1)


def test_names_are_shown_as_text(browser: Any, front: Front) -> None:
    """Nothing that comes from outside is markup."""
    with shown(browser, front, viewport={"width": 800, "height": 900}, color_scheme="light") as page:
        front.on_loop(lambda: front.gateway.watch._about.update(model="<img src=x onerror=alert(1)>"))
        until(lambda: "<img src=x" in page.locator("#about").inner_text())


def test_replicas_that_drain_and_go(browser: Any) -> None:
    with (
        replicas(2) as servers,
        fronting(*(server.url for server in servers)) as front,
        shown(browser, front) as page,
    ):
        first, second = servers
        drain(first)
        until(lambda: "1 draining" in page.locator("#counts").inner_text())
        front.gateway.fleet.roster.links[second.url]._headers["Authorization"] = "Bearer another"  # it stays lost
        lose(second)
        until(lambda: "1 lost" in page.locator("#counts").inner_text())
        row = page.locator(f'#replicas tr[data-url="{second.url}"]')
        assert row.get_attribute("data-status") == "lost"


def test_a_gateway_that_goes(browser: Any, servers: list[Serving]) -> None:
    with fronting(servers[0].url) as front:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{front.url}/inspector")
        until(lambda: page.evaluate("inspector.status") == "live")
    until(lambda: page.evaluate("inspector.status") == "lost")
    assert page.locator("#counts").inner_text() == "1 up"  # the last that was known
    context.close()


# Whether the first row of each table can be seen, in what scrolls.
ROWS = """["requests", "placements", "candidates"].every(name => {
  const row = document.querySelector(`#${name} tr`), box = row.closest(".scroll").getBoundingClientRect();
  return row.getBoundingClientRect().bottom <= box.bottom + 1;
})"""


def test_it_can_be_read(browser: Any, front: Front, servers: list[Serving]) -> None:
    slow_all(servers, 0.05)
    with shown(browser, front) as page:
        asked = [Asked(front, prompt=list(range(5, 45)), max_tokens=600, temperature=0, ignore_eos=True) for _ in "ab"]
        until(lambda: page.locator("#requests tr").count() == 2)
        page.locator("#placements tr").first.click()
        page.keyboard.press("Space")
        for width in (1360, 390):
            page.set_viewport_size({"width": width, "height": 844})
            for theme in ("light", "dark"):
                page.emulate_media(color_scheme=theme)
                assert page.evaluate(FAULTS) == []
            assert page.evaluate(ROWS)
        slow_all(servers, 0.0)
        assert all(one.result().status == 200 for one in asked)
