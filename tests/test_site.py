"""The documentation as a site that is opened from the disk: complete, searchable, and readable on a phone."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from quire import ops
from tests.server.browsing import open_browser, shown
from tools import docs

ROOT = Path(__file__).parent.parent
DIAGRAMS = sorted(path.stem for path in (ROOT / "docs" / "concepts").glob("*.svg"))
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
# Texts that leave the picture, cross the edge of a box, or are crossed by an arrow.
COLLISIONS = """() => {
  const found = [], root = document.documentElement, all = (names) => [...root.querySelectorAll(names)];
  const view = root.viewBox.baseVal, boxes = all("rect").map((rect) => rect.getBBox());
  const lines = all(".line").map((line) => {
    const steps = Math.ceil(line.getTotalLength());
    return Array.from({ length: steps + 1 }, (_, i) => line.getPointAtLength(i));
  });
  for (const text of all("text")) {
    const { x, y, width, height } = text.getBBox(), right = x + width, bottom = y + height;
    const name = text.textContent;
    if (x < 0 || y < 0 || right > view.width || bottom > view.height) found.push(`${name}: outside`);
    const crossed = (at) => at.x > x - 1 && at.x < right + 1 && at.y > y && at.y < bottom;
    if (lines.some((line) => line.some(crossed))) found.push(`${name}: arrow`);
    for (const box of boxes) {
      const apart = right <= box.x || x >= box.x + box.width || bottom <= box.y || y >= box.y + box.height;
      const inside = x >= box.x && right <= box.x + box.width && y >= box.y && bottom <= box.y + box.height;
      if (!apart && !inside) found.push(`${name}: edge of a box`);
    }
  }
  return found;
}"""

pytestmark = [pytest.mark.long, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path


def test_the_site_is_built_and_complete(site: Path) -> None:
    """All parts that are generated from the code are on their pages."""
    text = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    for name in ops.__all__:
        assert name in ("BACKENDS", "layouts") or f'id="quire.ops.{name}"' in text["reference/operators.html"], name
    for command, option in (("quire serve", "--max-num-seqs"), ("quire generate", "--temperature")):
        assert command in text["reference/cli.html"]
        assert option in text["reference/cli.html"]
    assert "POST /v1/chat/completions" in text["reference/http.html"]
    assert "quire:time_to_first_token_seconds" in text["reference/metrics.html"]
    for path in (ROOT / "src" / "quire" / "ops").glob("*.py"):
        assert path.stem.startswith("__") or f"<code>{path.stem}</code>" in text["develop/architecture.html"], path
    assert "<!-- made:" not in "".join(text.values())
    for page, html in text.items():  # nothing is loaded from elsewhere
        assert not re.search(r"<(?:script|img|link)[^>]*(?:src|href)=\"?https?://(?!squidfunk)", html), page


def test_versions_are_offered_where_mike_builds_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(extra={"version": {"provider": "mike"}, "polyfills": []})
    monkeypatch.setenv("MIKE_DOCS_VERSION", "dev")
    docs.on_config(config)
    assert "version" in config.extra
    monkeypatch.delenv("MIKE_DOCS_VERSION")
    docs.on_config(config)
    assert list(config.extra) == ["polyfills"]


@pytest.mark.parametrize(
    ("page", "viewport"), [("index.html", DESKTOP), ("concepts/block.html", PHONE)], ids=["desktop", "phone"]
)
def test_the_search_works_from_the_disk(site: Path, page: str, viewport: dict[str, int]) -> None:
    """No server and no network: the page complains of nothing, and a result leads to its page."""
    with open_browser() as browser, shown(browser, url=(site / page).as_uri(), viewport=viewport) as it:
        if viewport is PHONE:
            it.page.locator("label[for=__search]").first.click()
        it.page.locator(".md-search__input").press_sequentially("lineage")
        it.page.locator(".md-search-result__link[href*='/lineage.html']").first.click()
        it.page.wait_for_url("**/lineage.html?h=lineage")
        assert it.text("h1 mark") == "Lineage"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_diagram_is_readable_on_a_phone(site: Path, name: str, scheme: str) -> None:
    """Its text is large enough, the page does not scroll sideways, and no white box is in the dark."""
    url = (site / "concepts" / f"{name}.html").as_uri()
    with open_browser() as browser, shown(browser, url=url, viewport=PHONE, color_scheme=scheme) as it:
        picture = it.page.locator(f"img[src$='{name}.svg']")
        source = (site / "concepts" / f"{name}.svg").read_text()
        smallest = min(map(int, re.findall(r"(\d+)px", source)))
        [view] = re.findall(r'<svg.* viewBox="0 0 (\d+) ', source)
        assert smallest * picture.bounding_box()["width"] / int(view) >= 11
        assert it.ask("document.documentElement.scrollWidth") == PHONE["width"]
        # The part that can be seen: most of it is the page's own background.
        background = it.ask("getComputedStyle(document.body).backgroundColor")
        paint = Image.open(io.BytesIO(picture.locator("..").screenshot())).convert("RGB")
        count, color = max(paint.getcolors(paint.width * paint.height) or [])
        assert color == tuple(map(int, re.findall(r"\d+", background)))
        assert count > 0.5 * paint.width * paint.height
        assert (sum(color) < 3 * 64) is (scheme == "dark")


@pytest.mark.parametrize("name", DIAGRAMS)
def test_no_label_touches_an_arrow_or_an_edge(site: Path, name: str) -> None:
    url = (site / "concepts" / f"{name}.svg").as_uri()
    with open_browser() as browser, shown(browser, url=url) as it:
        assert it.ask("document.querySelectorAll('text').length") > 10
        assert it.ask(COLLISIONS) == []
