"""The inspector's page in a real browser, against a live engine: what it shows is what the engine has."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cache.groups import CacheGroup, RowGroup, StateGroup, StatePools
from quire.server.observability.page import PAGES
from tests.engine.fakes import VOCAB, fake_engine, request, siblings
from tests.server.browsing import open_browser, shown
from tests.server.watching import EngineOnAThread, Served, load

pytestmark = pytest.mark.slow

TWO = (CacheGroup((0,)), CacheGroup((1,), window=8))
STATES = (CacheGroup((0,)), StateGroup((1, 2), piece=4), RowGroup((1, 2), piece=4))
PAGE = PAGES / "inspector.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.mark.parametrize(
    ("groups", "tabs"),
    [
        pytest.param(TWO, ["Full attention · 1 layer", "Window 8 · 1 layer"], id="windows", marks=pytest.mark.long),
        pytest.param(
            STATES, ["Full attention · 1 layer", "States · 2 layers", "Rows of open pieces · 2 layers"], id="states"
        ),
    ],
)
def test_the_page_has_the_books_of_the_engine(
    browser: Any, groups: tuple[CacheGroup | StateGroup | RowGroup, ...], tabs: list[str]
) -> None:
    """Under forks, copies, swaps, evictions, preemptions and aborts, in all groups and on the host."""
    rng = random.Random(4)
    engine = fake_engine(
        num_blocks=24, groups=groups, num_host_blocks=24, max_num_batched_tokens=16, state_pools=StatePools(17, 12, 8)
    )
    with shown(browser, engine) as it:
        it.worker.do(lambda: load(engine, rng))
        for turn in range(6):
            it.worker.steps(rng.randint(1, 24))
            if turn % 2 == 1:
                it.worker.do(lambda: engine.abort(rng.choice(list(engine.scheduler.requests))))
            if turn == 4:
                it.worker.do(engine.reset_prefix_cache)
            it.catch_up()
            it.check()
        assert it.ask("inspector.state.gauges.copies") > 0
        assert it.ask("inspector.state.gauges.swapped_out") > 0
        assert it.ask("inspector.state.gauges.evictions") > 0
        assert it.page.locator("#tabs").get_by_role("tab").all_inner_texts() == tabs
        for tab, pool in zip(tabs, engine.scheduler.manager.pools, strict=True):
            it.page.get_by_role("tab", name=tab).click()
            it.settle()
            assert it.text("#mapsum").startswith(f"{pool.num_used} owned")
            it.click_request(it.ask("[...inspector.state.requests.values()].find(r => r.state === 'running').id"))
            it.click_block(0)
            it.page.keyboard.press("Escape")
        it.worker.finish()
        it.catch_up()
        it.check()
        assert it.text("#g-running") == "0"


def test_colours_tell_owners(browser: Any) -> None:
    engine = fake_engine(num_blocks=40)
    with shown(browser, engine) as it:
        it.worker.do(lambda: [engine.add(request(name, [ord(name)] * 10, max_tokens=30)) for name in "ab"])
        it.worker.do(lambda: [engine.add(r) for r in siblings("s", [7] * 8, 3, max_tokens=30)])
        it.worker.steps(3)
        it.catch_up()
        requests, pool = engine.scheduler.requests, engine.scheduler.manager.pools[0]
        free = it.ask("inspector.colourAt(39)")
        seen = {tuple(free)}
        for r in requests.values():
            colour = it.ask(f"inspector.ownerColour({r.schedule.ordinal})")
            alone = [b for b in r.cache.block_ids[0][:-1] if pool.ref_counts[b] == 1]
            for block in alone:
                assert it.ask(f"inspector.colourAt({block})") == colour
            seen.add(tuple(colour))
        assert len(seen) == 1 + len(requests)  # no two alike
        [shared] = {b for b in range(40) if pool.ref_counts[b] == 3} & set(requests["s-0"].cache.block_ids[0][:1])
        assert tuple(it.ask(f"inspector.colourAt({shared})")) not in seen
        # Selecting a request leaves its own blocks as they are, and dims those of others.
        b_first, a_first = requests["b"].cache.block_ids[0][0], requests["a"].cache.block_ids[0][0]
        it.click_request("a")
        assert it.ask(f"inspector.colourAt({a_first})") == it.ask("inspector.ownerColour(0)")
        assert it.ask(f"inspector.colourAt({b_first})") != it.ask("inspector.ownerColour(1)")
        assert it.ask(f"inspector.colourAt({shared})") != [243, 239, 228]
        it.page.keyboard.press("Escape")
        it.page.mouse.move(640, 4)  # what is pointed at is lit, too
        it.settle()
        assert it.ask(f"inspector.colourAt({b_first})") == it.ask("inspector.ownerColour(1)")
        it.page.emulate_media(color_scheme="light")
        it.settle()
        assert it.ask("inspector.colourAt(39)") != free


def test_blocks_and_requests_tell_their_stories(browser: Any) -> None:
    engine = fake_engine(num_blocks=30)
    with shown(browser, engine) as it:
        it.worker.do(lambda: engine.add(request("early", list(range(13)), max_tokens=2)))
        it.worker.finish()
        it.worker.do(lambda: [engine.add(r) for r in siblings("late", [*range(9), 99, 98, 97, 96], 4, max_tokens=9)])
        it.worker.steps(3)
        it.catch_up()
        [first, *others] = engine.scheduler.requests.values()
        table = first.cache.block_ids[0]

        it.click_request("late-0")
        assert it.text("#d-title") == "R2.1 · late-0"
        assert it.text("#d-why") == str(first.cache.prefix_report)
        assert "differs from token 9 on" in it.text("#d-why")
        rows = it.page.locator("#table .row:visible").all_inner_texts()
        counts = engine.scheduler.manager.pools[0].ref_counts
        filled = [min(4, first.cache.num_computed - 4 * i) for i in range(len(table))]
        expected = zip(table, filled, strict=True)
        assert [row.split() for row in rows] == [
            [str(i), str(block), str(tokens), str(counts[block])] for i, (block, tokens) in enumerate(expected)
        ]
        story = it.text("#d-story")
        for part in ("arrived with 13 prompt tokens", "found 2 blocks in the cache", "first token, ", "copied"):
            assert part in story

        it.click_block(table[0])
        assert it.text("#d-title") == f"Block {table[0]}"
        assert it.text("#d-badge") == "shared by 4"
        assert it.page.locator("#d-owners .chip").count() == 4
        story = " ".join(it.text("#d-story").split())
        for part in ("allocated to R1", "full, and reusable as", "freed by R1", "found in the cache by R2.1",
                     "shared with R2.2 as a fork of R2.1"):  # fmt: skip
            assert part in story
        assert it.ask("document.querySelectorAll('#d-story time').length") >= 7

        it.page.locator("#d-owners .chip", has_text="R2.3").click()  # from a block on to its owner
        it.settle()
        assert it.text("#d-title") == "R2.3 · late-2"
        rows = it.page.locator("#table .row:visible").all_inner_texts()
        assert others[1].cache.block_ids[0].tolist() == [int(row.split()[1]) for row in rows]
        it.page.focus("#device")
        it.page.keyboard.press("ArrowRight")
        it.page.keyboard.press("ArrowRight")
        it.settle()
        assert it.text("#d-title") == "Block 1"
        assert it.text("#said").startswith("Block 1: shared by 4")

        it.worker.finish()
        it.catch_up()
        it.click_request("late-1")
        assert it.text("#d-badge") == "ended: length"
        assert "ended after 9 tokens: token limit" in it.text("#d-story")


def test_names_are_texts_and_nothing_else(browser: Any) -> None:
    engine = fake_engine()
    with shown(browser, engine) as it:
        name = "<img src=x onerror=alert(1)>"
        it.worker.do(lambda: engine.add(request(name, [1, 2, 3], max_tokens=50)))
        it.worker.steps(2)
        it.catch_up()
        it.click_request(name)
        assert "<img src=…" in it.text("#d-title")
        assert it.page.locator("img").count() == 0


def test_a_pause_freezes_the_view_and_resuming_catches_up(browser: Any) -> None:
    engine = fake_engine(num_blocks=60)
    with shown(browser, engine) as it:
        it.worker.do(lambda: [engine.add(request(f"r{i}", [i] * 9, max_tokens=40)) for i in range(4)])
        it.worker.steps(3)
        it.catch_up()
        it.page.keyboard.press(" ")
        before, number = it.tables(), it.ask("inspector.state.number")
        drawn = it.ask("inspector.device.drawn.cells")
        for _ in range(5):
            it.worker.steps(6)
            it.worker.do(it.worker.hub.inspector.flush)
        it.until("inspector.timeline.end >= inspector.timeline.cursor + 5")
        it.settle()
        assert it.text("#status") == "Paused"
        assert it.tables() == before
        assert it.ask("inspector.state.number") == number
        assert it.ask("inspector.device.drawn.cells") == drawn
        it.page.get_by_role("button", name="Resume").click()
        it.catch_up()
        it.check()
        assert it.text("#status") == "Live"
        it.page.focus("#device")
        it.page.locator("#back").click()
        it.settle()
        assert it.ask("inspector.timeline.end - inspector.timeline.cursor") == 1
        assert it.text("#status") == "Paused"
        it.page.locator("#play").click()  # plays on to the end, and follows again
        it.until("inspector.timeline.isFollowing")
        it.settle()
        it.check()


def test_a_full_recording_takes_no_more_and_resuming_begins_anew(browser: Any) -> None:
    engine = fake_engine(num_blocks=60)
    with shown(browser, engine) as it:
        it.worker.do(lambda: [engine.add(request(f"r{i}", [i] * 9, max_tokens=90)) for i in range(4)])
        it.worker.steps(2)
        it.catch_up()
        it.page.locator("#pause").click()
        it.ask("inspector.timeline.size = 47999900")
        it.worker.steps(9)
        it.worker.do(it.worker.hub.inspector.flush)
        it.until("inspector.timeline.isFull")
        assert it.ask("inspector.timeline.end - inspector.timeline.cursor") == 0
        it.page.locator("#pause").click()
        it.until("inspector.state && inspector.timeline.items.length === 1")
        it.catch_up()
        it.check()
        # While somebody follows, a full recording loses its first half instead.
        for _ in range(5):
            it.worker.steps(4)
            it.catch_up()
        it.ask("inspector.timeline.size = 47999900")
        it.worker.steps(4)
        it.catch_up()
        assert it.ask("inspector.timeline.items.length") <= 4
        assert it.ask("inspector.timeline.size") < 100_000
        it.check()
        it.ask("inspector.timeline.seek(0)")
        it.ask("inspector.timeline.seek(inspector.timeline.end)")
        it.settle()
        it.check()


def test_a_recording_opens_offline_and_shows_the_same(browser: Any, tmp_path: Path) -> None:
    engine = fake_engine(num_blocks=24, num_host_blocks=12, max_num_batched_tokens=16)
    # Books at a moment: all that can be seen of them.
    books = "inspector.state.save().replace(/,\"series\":.*/, '')"
    with shown(browser, engine) as it:
        it.worker.do(lambda: load(engine, random.Random(2)))
        saved = []
        for _ in range(12):
            it.worker.steps(3)
            it.catch_up()
            saved.append((it.ask("inspector.timeline.cursor"), it.ask(books)))
        with it.page.expect_download() as download:
            it.page.get_by_role("button", name="Export").click()
        download.value.save_as(tmp_path / "recording.json")
        assert download.value.suggested_filename.startswith("quire-inspector-")
    recording = json.loads((tmp_path / "recording.json").read_text())
    assert recording["format"] == "quire-inspector"
    (tmp_path / "other.json").write_text('{"items": []}')
    with shown(browser, url=PAGE.as_uri()) as it:
        it.page.locator("#nofile").wait_for(state="visible")
        it.page.locator("#file").set_input_files(tmp_path / "other.json")
        it.until("!document.getElementById('toast').hidden")
        assert it.text("#toast") == "other.json cannot be shown: it was not exported from a block inspector."
        it.page.locator("#file").set_input_files(tmp_path / "recording.json")
        it.until("inspector.state")
        it.settle()
        assert it.text("#status") == "recording.json"
        assert it.ask("inspector.timeline.cursor") == 0
        for cursor, expected in (saved[-1], saved[3], saved[7], saved[0]):  # forth and back
            it.page.locator("#scrub").fill(str(cursor))
            it.until(f"inspector.timeline.cursor === {cursor}")
            assert json.loads(it.ask(books) + "}") == json.loads(expected + "}")
        it.page.locator("#scrub").fill("0")
        it.page.locator("#speed").select_option("16")
        it.page.locator("#play").click()
        it.until("inspector.timeline.cursor === inspector.timeline.end")


def test_the_page_comes_back_after_the_server_does(browser: Any) -> None:
    with shown(browser, fake_engine(num_blocks=8)) as it:
        port = int(it.page.url.split(":")[2].split("/")[0])
        it.server.stop()
        it.until("document.getElementById('status').innerText.startsWith('Disconnected: again in ')")
        engine = fake_engine(num_blocks=13)
        it.page.context.clear_cookies()
        server = Served(EngineOnAThread(engine), port)
        try:
            it.until("inspector.status[0] === 'live' && inspector.state.config.num_blocks === 13")
            it.settle()
            assert it.text("#mapsum") == "0 owned · 0 reusable · 13 free"
        finally:
            it.page.goto("about:blank")
            server.stop()


def test_100_000_blocks(browser: Any) -> None:
    """Tiles stand for several blocks; the numbers are right, and only what has changed is drawn again."""
    engine = fake_engine(num_blocks=100_000, block_size=1, max_model_len=2048, max_num_batched_tokens=16_384,
                         max_num_seqs=64)  # fmt: skip
    for i in range(40):
        for r in siblings(f"r{i}", [i % VOCAB, *range(200)] * 4, 2, max_tokens=40):
            engine.add(r)
    with shown(browser, engine) as it:
        it.worker.steps(5)
        it.catch_up()
        pool = engine.scheduler.manager.pools[0]
        assert pool.num_used > 20_000
        assert it.ask("[...inspector.state.pools[0].refs]") == list(pool.ref_counts)
        assert it.text("#g-used") == f"{pool.num_used:,}"
        per = it.ask("inspector.device.per")
        assert per > 1
        assert it.ask("inspector.device.count") < 100_000  # those never used are hidden
        for _ in range(3):  # the page's layout may come to rest in between, and then all is drawn
            drawn, used = it.ask("({...inspector.device.drawn})"), pool.num_used
            for _ in range(5):
                it.worker.steps(1)
                it.catch_up()
            new, after = pool.num_used - used, it.ask("({...inspector.device.drawn})")
            assert new > 200
            if after["all"] == drawn["all"]:
                break
        assert after["all"] == drawn["all"]
        assert new / per <= after["cells"] - drawn["cells"] <= 3 * new  # given out, written, and stored
        assert it.ask("[...inspector.state.pools[0].refs]") == list(pool.ref_counts)

        block = engine.scheduler.running[3].cache.block_ids[0][700]
        it.page.fill("#find", f"block {block}")  # found, and shown as a cell of its own
        it.page.press("#find", "Enter")
        it.settle()
        assert it.ask("inspector.device.per") == 1
        assert it.text("#d-title") == f"Block {block:,}"
        assert it.text("#d-badge") == "shared by 2"
        assert it.page.locator("#minimap").is_visible()
        it.page.keyboard.press("Escape")
        it.page.evaluate("document.activeElement.blur(); select(null)")
        for r in list(engine.scheduler.running)[:3]:
            last = r.cache.block_ids[0][-1]
            it.ask(f"inspector.device.reveal({last})")
            it.settle()
            assert it.ask(f"inspector.colourAt({last})") == it.ask(f"inspector.ownerColour({r.schedule.ordinal})")
        before = it.ask("inspector.device.drawn.cells")
        it.ask(f"inspector.device.root.scrollTop = {block} / inspector.device.columns * inspector.device.cell - 50")
        it.settle()
        assert it.ask("inspector.device.drawn.cells") - before < 30_000  # only what is seen
        it.click_block(block)
        assert it.text("#d-title") == f"Block {block:,}"


def test_windows_without_a_group_of_full_attention(browser: Any) -> None:
    """Entries at the front of a table that were freed are not counted, and the indexes say so."""
    engine = fake_engine(num_blocks=30, groups=(CacheGroup((0, 1), window=8),))
    with shown(browser, engine) as it:
        it.worker.do(lambda: engine.add(request("r", [1] * 10, max_tokens=40)))
        it.worker.steps(20)
        it.catch_up()
        it.check()
        r = engine.scheduler.requests["r"]
        it.click_request("r")
        rows = [row.split()[:2] for row in it.page.locator("#table .row:visible").all_inner_texts()]
        given = r.cache.num_freed[0]
        assert given > 2
        assert rows == [[str(given + i), str(block)] for i, block in enumerate(r.cache.block_ids[0][given:])]
