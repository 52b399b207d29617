"""What the inspector's page explains, its views, its demo and the chat box, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.server.observability.page import PAGES
from tests.engine.fakes import fake_engine, request, siblings
from tests.server.browsing import open_browser, shown
from tests.server.serving import Serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


def test_the_empty_page_explains_itself_and_plays_a_demo(browser: Any) -> None:
    with shown(browser, fake_engine(num_blocks=24)) as it:
        it.settle()
        assert it.page.locator("#picture").is_visible()
        assert "block table" in it.text("#welcome p")
        assert it.text("#try").startswith(f"curl {it.page.url.removesuffix('/inspector')}/v1/completions")
        it.page.click("#demo")
        it.until("inspector.timeline.chapters.length > 0")
        it.settle()
        assert not it.page.locator("#welcome").is_visible()
        assert it.text("#status") == "Demo"
        chapters = it.ask("inspector.timeline.chapters")
        assert [chapter["title"] for chapter in chapters] == ["Start", "Share", "Fork", "Evict", "Preempt"]
        first, last = it.ask("[inspector.timeline.items[0].wall, inspector.timeline.items.at(-1).wall]")
        assert 20 < last - first < 40
        counts = {}
        for chapter in chapters:
            it.page.get_by_role("button", name=f"Chapter: {chapter['title']}").click()  # and plays on from there
            it.settle()
            assert it.text("#caption") == f"{chapter['title']}\n{chapter['caption']}"
            counts[chapter["title"]] = it.ask(f"(goTo({chapter['at']}), {{...inspector.state.gauges}})")
        it.page.locator("#scrub").fill(str(it.ask("inspector.timeline.end")))
        it.settle()
        end = it.ask("inspector.state.gauges")
        assert counts["Share"]["cached_tokens"] == 0 < counts["Fork"]["cached_tokens"]
        assert counts["Fork"]["copies"] == 0 < counts["Evict"]["copies"]
        assert counts["Evict"]["evictions"] == 0 < counts["Preempt"]["evictions"]
        assert counts["Preempt"]["preemptions"] == 0 < end["preemptions"]
        it.page.click("#live")
        it.until("inspector.status[0] === 'live' && inspector.state")
        it.settle()
        assert it.page.locator("#welcome").is_visible()
        it.page.click("#hide")
        it.settle()
        assert not it.page.locator("#welcome").is_visible()


def test_every_number_says_what_it_means(browser: Any) -> None:
    engine = fake_engine(num_blocks=30)
    with shown(browser, engine) as it:
        it.worker.do(lambda: engine.add(request("r", list(range(13)), max_tokens=9)))
        it.worker.steps(3)
        it.catch_up()
        assert it.ask(
            "[...document.querySelectorAll('#gauges .gauge h2, #gauges dt')].every(one => one.querySelector('.q'))"
        )
        it.click_block(0)
        assert it.ask("[...document.querySelectorAll('#d-facts dt')].every(one => one.querySelector('.q'))")
        it.click_request("R1")
        assert it.ask("[...document.querySelectorAll('#d-facts dt')].every(one => one.querySelector('.q'))")
        visible = it.page.locator(".q:visible")
        assert visible.count() >= 16
        texts = set()
        for i in range(visible.count()):
            visible.nth(i).dispatch_event("click") if i else visible.nth(i).click()
            texts.add(it.text("#help"))
            visible.nth(i).dispatch_event("click") if i else visible.nth(i).click()
            assert not it.page.locator("#help").is_visible()
        assert min(map(len, texts)) > 15
        assert len(texts) == visible.count()


def test_the_prefix_tree_shows_trunks_users_and_where_a_prompt_branched(browser: Any) -> None:
    engine = fake_engine(num_blocks=60)
    with shown(browser, engine) as it:
        it.worker.do(lambda: engine.add(request("first", [*range(16), *[20] * 8], max_tokens=40)))
        it.worker.steps(2)
        it.worker.do(lambda: engine.add(request("second", [*range(16), *[30] * 8], max_tokens=40)))
        it.worker.steps(2)
        it.catch_up()
        it.page.keyboard.press("3")
        it.settle()
        text = it.page.locator("#tree").text_content()
        assert all(name in text for name in ("R1", "R2"))
        assert "differs from token 16" in text
        shared = [b for b, n in enumerate(engine.scheduler.manager.pools[0].ref_counts) if n == 2]
        assert len(shared) == 4
        assert it.page.locator("#tree g.segment[data-users='2']").get_attribute("aria-label") == (
            "2 requests share 16 tokens: tokens 0 to 15 of sequences that begin here, in 4 blocks from 0 on"
        )
        assert it.page.locator("#tree g.segment[data-users='1']").count() >= 2
        assert not it.page.get_by_text("Nothing is cached yet").is_visible()


def test_the_timeline_says_what_a_request_waited_for(browser: Any) -> None:
    engine = fake_engine(num_blocks=8, max_num_batched_tokens=8)
    with shown(browser, engine) as it:
        it.worker.do(lambda: [engine.add(request(f"r{i}", [i] * 14, max_tokens=16)) for i in range(3)])
        it.worker.finish()
        it.catch_up()
        it.page.keyboard.press("4")
        it.settle()
        kinds = it.ask("[...inspector.state.requests.values()].flatMap(r => r.phases.map(phase => phase.kind))")
        assert {"queued", "prefill", "decode"} <= set(kinds)
        assert it.ask("inspector.state.steps.every(step => step.prompt + step.decoded > 0)")
        pieces = it.ask("[...inspector.state.requests.values()].map(r => r.pieces.map(piece => piece.count))")
        assert sum(pieces[0]) == 14
        assert len(pieces[0]) > 1  # its prompt was computed in chunks
        told = it.ask(
            "[...inspector.state.requests.values()]"
            ".flatMap(r => inspector.gantt.phasesOf(r).map(phase => inspector.gantt.tellPhase(phase)))"
        )
        assert any("pool full" in one for one in told)


def test_the_pool_and_the_requests_are_two_views_of_the_same_blocks(browser: Any) -> None:
    engine = fake_engine(num_blocks=40)
    with shown(browser, engine) as it:
        it.worker.do(lambda: [engine.add(r) for r in siblings("s", list(range(10)), 3, max_tokens=30)])
        it.worker.steps(3)
        it.catch_up()
        it.page.click("#v-requests")
        assert it.page.locator("#moving").is_visible()  # blocks fly from one view to the other
        it.until("document.getElementById('moving').hidden")
        it.settle()
        assert it.ask("inspector.logical.rows.map(r => r.id)") == [f"s-{i}" for i in range(3)]
        table = engine.scheduler.requests["s-1"].cache.block_ids[0].tolist()
        assert it.ask("inspector.logical.tableOf(inspector.logical.rows[1])") == table
        it.page.keyboard.press("1")
        it.until("document.getElementById('moving').hidden")
        assert it.page.locator("#device").is_visible()


def test_requests_are_numbered_grouped_and_lit_by_the_pointer(browser: Any) -> None:
    engine = fake_engine(num_blocks=60)
    with shown(browser, engine) as it:
        it.worker.do(lambda: engine.add(request("alone", [9] * 10, max_tokens=50)))
        it.worker.do(lambda: [engine.add(r) for r in siblings("s", list(range(10)), 3, max_tokens=50)])
        it.worker.steps(3)
        it.worker.do(lambda: engine.abort("s-0"))  # still stands with its siblings
        it.worker.steps(1)
        it.catch_up()
        rows = it.page.locator("#requests .row:visible .who")
        assert rows.all_inner_texts() == ["R2", "R2.1", "R2.2", "R2.3", "R1"]
        requests = engine.scheduler.requests
        mine, others = requests["s-1"].cache.block_ids[0][-1], requests["alone"].cache.block_ids[0][0]
        lit, before = it.ask(f"inspector.colourAt({mine})"), it.ask(f"inspector.colourAt({others})")
        it.page.locator("#requests .row:visible", has_text="R2.2").hover()
        it.settle()
        assert it.ask(f"inspector.colourAt({mine})") == lit
        assert it.ask(f"inspector.colourAt({others})") != before  # dimmed
        it.page.mouse.move(640, 4)
        it.settle()
        assert it.ask(f"inspector.colourAt({others})") == before
        it.page.fill("#find", "R77")
        it.page.press("#find", "Enter")
        assert it.text("#toast") == "There is no request R77 at this moment"


def test_the_tooltip_follows_the_block_and_events_are_folded_by_step(browser: Any) -> None:
    engine = fake_engine(num_blocks=20)
    with shown(browser, engine) as it:
        it.worker.do(lambda: engine.add(request("r", list(range(13)), max_tokens=4)))
        it.worker.steps(2)
        it.catch_up()
        block = engine.scheduler.requests["r"].cache.block_ids[0][-1]
        it.page.mouse.move(*it.ask(f"inspector.place({block})"))
        it.settle()
        assert "R1" in it.text("#tip")
        it.worker.finish()
        it.catch_up()
        assert "R1" not in it.text("#tip")  # the pointer has not moved
        steps = it.page.locator("#d-steps > li").all_inner_texts()
        assert "1 prompt of 13 tokens began" in " ".join(steps[-1].split())
        it.page.locator("#d-steps > li summary").last.click()
        inner = it.page.locator("#d-steps > li").last.locator("ol li")
        inner.first.wait_for()
        told = inner.all_inner_texts()
        arrived = next(i for i, one in enumerate(told) if "arrived" in one)
        given = next(i for i, one in enumerate(told) if "block" in one)
        assert arrived < given  # the cause above its effect


def test_unused_blocks_are_hidden_and_shown(browser: Any) -> None:
    engine = fake_engine(num_blocks=4000)
    with shown(browser, engine) as it:
        it.worker.do(lambda: engine.add(request("r", [1] * 40, max_tokens=9)))
        it.worker.steps(2)
        it.catch_up()
        assert it.ask("inspector.device.count") < 200
        assert it.text("#unused").endswith(" unused")
        it.page.click("#unused")
        it.settle()
        assert it.ask("inspector.device.count") == 4000
        x, y = it.ask("inspector.place(60)")
        it.page.mouse.move(x, y)
        it.page.keyboard.down("Control")
        for _ in range(8):
            it.page.mouse.wheel(0, -100)
        it.page.keyboard.up("Control")
        it.settle()
        assert it.ask("inspector.device.zoom") > 2
        assert it.page.locator("#minimap").is_visible()
        it.page.click("#follow")
        it.worker.steps(8)
        it.catch_up()
        assert it.page.locator("#follow").get_attribute("aria-pressed") == "true"
        it.page.click("#fit")
        it.settle()
        assert it.ask("inspector.device.zoom") == 1


def test_the_colours_can_be_chosen(browser: Any) -> None:
    with shown(browser, fake_engine(num_blocks=8)) as it:
        seen = []
        for _ in range(3):
            seen.append(
                (it.ask("document.documentElement.dataset.theme"), it.page.locator("#theme").get_attribute("title"))
            )
            it.page.click("#theme")
        assert seen == [
            ("dark", "Colours: those of the system"), ("light", "Colours: light"), ("dark", "Colours: dark"),
        ]  # fmt: skip


ITEM = {"kind": "record", "id": 2, "time": 1.0, "events": [], "requests": [], "gauges": {}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("hello", "it was not exported from a block inspector"),
        ('{"format":"quire-inspector","version":1,"items":[', "it ends too early or is damaged; export it once more"),
        ('{"format":"quire-inspector","version":9,"items":[]}', "it is of version 9, and this page reads version 1"),
        ('{"format":"quire-inspector","version":1,"items":[]}', "nothing is recorded in it"),
        (
            json.dumps({"format": "quire-inspector", "version": 1, "items": [ITEM]}),
            "it does not begin with a snapshot, so the state before is unknown",
        ),
        (
            '{"format":"quire-inspector","version":1,"items":[{"kind":"snapshot","time":1}]}',
            "record 1 of 1 cannot be read: a part of it is missing or has a wrong type",
        ),
    ],
)
def test_a_broken_recording_is_a_sentence(offline: Any, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    offline.page.evaluate("document.getElementById('toast').hidden = true")
    offline.page.locator("#file").set_input_files(tmp_path / "broken.json")
    offline.until("!document.getElementById('toast').hidden")
    assert offline.text("#toast") == f"broken.json cannot be shown: {words}."
    offline.page.locator("#nofile").wait_for(state="visible")


@pytest.fixture(scope="module")
def offline(browser: Any) -> Iterator[Any]:
    with shown(browser, url=(PAGES / "inspector.html").as_uri()) as it:
        yield it


def test_what_is_typed_on_the_start_page_lands_in_blocks(browser: Any, server: Serving) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    try:
        page = context.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.evaluate("document.getElementById('most').value = 40")
        for turn in range(2):
            page.fill("#prompt", "Write a function that reads a JSON file, and one that writes it.")
            page.press("#prompt", "Enter")
            page.locator("#messages small").nth(turn).wait_for()
            page.locator("#sum", has_text="ended").wait_for()
            names = page.locator("#cards .name b").all_inner_texts()
            assert len(names) > 2
            assert all(name.startswith("block ") for name in names[:-1])
        assert page.locator("#messages li.assistant").last.inner_text().strip()
        summary = page.locator("#messages small").last.inner_text()
        assert "40 new" in summary
        assert page.locator("#cards .found").count() >= 1  # the first turn's blocks, found again
        assert "of 16 tokens" in page.locator("#sum").inner_text()
        assert complaints == []
        page.click("#clear")
        assert page.locator("#messages li").count() == page.locator("#cards li").count() == 0
    finally:
        context.close()
