"""What the inspector draws: arcs of copies, scales, the states of a hybrid model; and whether its pages can be read."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fakes import fake_engine, request, siblings
from tests.models import checkpoints
from tests.server.browsing import FAULTS, open_browser, shown
from tests.server.serving import Serving
from tests.server.watching import load

pytestmark = [pytest.mark.slow, pytest.mark.long]

SIZES = ({"width": 1280, "height": 800}, {"width": 390, "height": 844})  # of a desktop's window, and of a phone
# Keeps of every arc its blocks, its age in milliseconds, how far it reaches and how opaque it is.
KEEP_ARCS = """(() => {
  window.arcs = [];
  FLASHES.copy = 600;
  const drawArc = inspector.device.drawArc;
  inspector.device.drawArc = function (src, dst, done) {
    const before = this.fxctx.stroke;
    this.fxctx.stroke = function () { arcs.push([src, dst, done, this.globalAlpha]); before.call(this); };
    drawArc.call(this, src, dst, done);
    this.fxctx.stroke = before;
  };
})()"""
IS_CLEAR = """(() => {
  const { fx } = inspector.device, copy = document.createElement("canvas");
  Object.assign(copy, { width: fx.width, height: fx.height });
  const ctx = copy.getContext("2d", { willReadFrequently: true });
  ctx.drawImage(fx, 0, 0);
  return ctx.getImageData(0, 0, fx.width, fx.height).data.every(value => value === 0);
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


def test_an_arc_goes_from_a_copied_block_to_its_copy_and_fades(browser: Any) -> None:
    engine = fake_engine(num_blocks=40)
    with shown(browser, engine) as it:
        it.ask(KEEP_ARCS)
        for turn, name in enumerate(("hidden", "shown")):
            two = siblings(name, [*range(9), turn], 2, max_tokens=9)
            it.worker.do(lambda two=two: [engine.add(r) for r in two])
            it.worker.steps(2)
            it.catch_up()
            if name == "hidden":  # no request is in focus, and not all are asked for
                it.until("inspector.device.flashes.length === 0")
                assert it.ask("arcs.length") == 0
                it.page.click("#arcs")
        copied = [event[4:6] for event in it.ask("inspector.state.log") if event[0] == "copied"][-1]
        it.until("arcs.length > 1 && inspector.device.flashes.length === 0")
        it.settle()
        arcs = it.ask("arcs")
        assert [arc[:2] for arc in arcs] == [copied] * len(arcs)
        reaches, alphas = [arc[2] for arc in arcs], [arc[3] for arc in arcs]
        assert reaches == sorted(reaches)
        assert alphas == sorted(alphas, reverse=True)
        assert alphas[-1] < alphas[0]
        assert all(
            alpha == pytest.approx(min(1, 1.6 * (1 - done)), abs=1e-3)
            for done, alpha in zip(reaches, alphas, strict=True)
        )
        it.page.mouse.move(640, 4)
        it.settle()
        assert it.ask(IS_CLEAR)


@pytest.mark.parametrize(("motion", "drawn"), [("no-preference", {"s-1"}), ("reduce", set())])
def test_the_arcs_of_the_request_in_focus_are_drawn_unless_motion_is_unwanted(
    browser: Any, motion: str, drawn: set[str]
) -> None:
    engine = fake_engine(num_blocks=40)
    with shown(browser, engine, reduced_motion=motion) as it:
        it.ask(KEEP_ARCS)
        it.worker.do(lambda: [engine.add(r) for r in siblings("s", list(range(9)), 3, max_tokens=9)])
        it.worker.steps(1)
        it.catch_up()
        it.click_request("s-1")
        it.worker.steps(3)
        it.catch_up()
        it.until("inspector.device.flashes.length === 0")
        copies = [event for event in it.ask("inspector.state.log") if event[0] == "copied"]
        assert len(copies) == 2  # of the first two of three, which shared a block that was not full
        names = {tuple(event[4:6]): f"s-{event[3]}" for event in copies}
        assert {names[tuple(arc[:2])] for arc in it.ask("arcs")} == drawn


# Of each course: the labels that are drawn, and how high its last point is (in pixels, of the height below the margin).
SCALES = """(points => {
  const found = {}, write = CanvasRenderingContext2D.prototype.fillText;
  for (const canvas of document.querySelectorAll("canvas[data-series]")) {
    const labels = [];
    CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
      labels.push(text);
      write.call(this, text, ...at);
    };
    sparkline(canvas, points);
    CanvasRenderingContext2D.prototype.fillText = write;
    const { isCount } = COURSES[canvas.dataset.series], column = canvas.width - (isCount ? COUNT_MARGIN : MARGIN) - 1;
    const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    copy.canvas.height = canvas.height;
    copy.drawImage(canvas, -column, 0);
    const { data } = copy.getImageData(0, 0, 1, canvas.height);
    const top = [...Array(canvas.height).keys()].find(y => data[4 * y + 3] > 20) ?? canvas.height;
    found[canvas.dataset.series] = [labels, (canvas.height - top) / canvas.height];
  }
  return found;
})"""


def test_each_course_has_a_scale_and_is_drawn_to_it(browser: Any) -> None:
    """The last point of each is half of the highest one, or half of all blocks."""
    point = {
        "used": 0.25,
        "kept": 0.25,
        "saved": 600,
        "hit": 0.5,
        "running": 8,
        "waiting": 0,
        "rate": 12_500,
        "prompt": 0,
    }
    counts = {"copies": 2, "evictions": 1, "preemptions": 1, "swaps": 4}
    high = {"saved": 1200, "running": 16, "rate": 25_000, "copies": 4, "evictions": 2, "preemptions": 2, "swaps": 8}
    points = [{"time": time / 2, "prompt": 0} | point | counts | (high if time == 5 else {}) for time in range(25)]
    with shown(browser, fake_engine(num_blocks=8)) as it:
        it.settle()
        found = it.ask(f"{SCALES}({json.dumps(points)})")
        assert {name: labels for name, (labels, _) in found.items()} == {
            "pool": ["100%", "12 s"], "hit": ["100%", "12 s"], "saved": ["1,200", "12 s"], "running": ["16", "12 s"],
            "rate": ["25.0k", "12 s"], "copies": ["4"], "evictions": ["2"], "preemptions": ["2"], "swaps": ["8"],
        }  # fmt: skip
        assert {name for name, (_, height) in found.items() if not 0.38 < height < 0.56} == set()
        flat = it.ask(f"{SCALES}({json.dumps([{'time': 0.0, 'prompt': 0} | dict.fromkeys([*point, *counts], 0)])})")
        assert flat["running"] == [["1"], pytest.approx(0, abs=0.1)]
        assert flat["copies"][0] == []  # nothing was counted, and no scale says otherwise


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-Next: three layers with states, and one with full attention."""
    directory: Path = tmp_path_factory.mktemp("hybrid")
    checkpoints.save(directory, "Qwen3Next")
    return directory


def test_the_states_of_a_hybrid_model_are_shown_as_its_blocks_are(browser: Any, hybrid: Path) -> None:
    engine = checkpoints.engine(hybrid)
    manager = engine.scheduler.manager
    with shown(browser, engine) as it:
        it.worker.do(lambda: [engine.add(request(f"r{i}", [*range(40), i], max_tokens=30)) for i in range(3)])
        it.worker.steps(6)
        it.catch_up()
        it.check()
        tabs = it.page.locator("#tabs").get_by_role("tab")
        assert tabs.all_inner_texts() == [
            "Full attention · 1 layer",
            "States · 3 layers",
            "Rows of open pieces · 3 layers",
        ]
        it.click_request("r1")
        r = engine.scheduler.requests["r1"]
        for g, pool in enumerate(manager.pools):
            tabs.nth(g).click()
            it.settle()
            assert it.text("#mapsum").startswith(f"{pool.num_used} owned · 0 reusable")
            assert it.ask("inspector.device.pool.size") == pool.num_blocks
            rows = [row.split() for row in it.page.locator("#table .row:visible").all_inner_texts()]
            assert [int(block) for _, block, _, _ in rows] == list(manager.owned(r, g)) != []
            assert [int(owners) for *_, owners in rows] == [pool.ref_counts[block] for block in manager.owned(r, g)]
            block = int(rows[-1][1])
            assert it.ask(f"inspector.colourAt({block})") == it.ask(f"inspector.ownerColour({r.schedule.ordinal})")
        tabs.nth(1).click()
        it.page.keyboard.press("Escape")
        it.click_block(manager.owned(r, 1)[0])
        assert it.page.locator("#d-owners .chip").all_inner_texts() == ["R1 [0]", "R2 [0]", "R3 [0]"]
        assert it.text("#d-badge") == "shared by 3"
        it.worker.finish()
        it.catch_up()
        it.check()
        assert it.text("#mapsum").startswith("0 owned")


def test_the_inspector_can_be_read(browser: Any) -> None:
    engine = fake_engine(num_blocks=80, num_host_blocks=24, max_num_batched_tokens=16)
    with shown(browser, engine) as it:

        def check() -> None:
            for theme in ("light", "dark"):
                it.page.emulate_media(color_scheme=theme)
                it.settle()
                assert it.ask(FAULTS) == []

        for size in SIZES:  # with its welcome
            it.page.set_viewport_size(size)
            check()
        it.worker.do(lambda: load(engine, random.Random(4)))
        it.worker.steps(24)
        it.catch_up()
        it.click_request(it.ask("[...inspector.state.requests.values()].find(r => r.state === 'running').id"))
        for pane in ("map", "requests", "details", "numbers"):
            it.page.click(f"#panes [data-pane={pane}]")
            check()
        it.page.set_viewport_size(SIZES[0])
        check()


def test_the_start_page_can_be_read(browser: Any, server: Serving) -> None:
    context = browser.new_context(reduced_motion="reduce")
    try:
        page = context.new_page()

        def check() -> None:
            for size in SIZES:
                page.set_viewport_size(size)
                for theme in ("light", "dark"):
                    page.emulate_media(color_scheme=theme)
                    assert page.evaluate(FAULTS) == [], (size, theme)

        page.goto(f"{server.url}/")
        check()
        page.click("#settings")
        page.fill("#most", "24")
        page.fill("#prompt", "Write a function that reads a JSON file, and one that writes it.")
        page.press("#prompt", "Enter")
        page.locator("#sum", has_text="ended").wait_for()
        page.click("#programs summary")
        check()
        assert page.locator("#cards").evaluate("cards => cards.clientHeight") > 100
        assert page.locator("#sum").evaluate("sum => sum.scrollWidth <= sum.clientWidth")
    finally:
        context.close()
