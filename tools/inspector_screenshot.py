"""Take the pictures of the pages in docs/, of `quire serve` with the embedded model and prompts that share blocks.

python tools/inspector_screenshot.py [directory]: writes assets/chat.webp, inspector.png, inspector-request.png and the
animation inspector.webp. Needs chromium.
"""

from __future__ import annotations

import http.client
import io
import json
import random
import shutil
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from quire_bench.server.process import running

ROOT = Path(__file__).parent.parent
SERVE = ["serve", "--port", "0", "--num-blocks", "768", "--max-num-seqs", "40"]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
CLIENTS = 22
WARM_UP = 24.0  # seconds of load before a picture is taken
FRAMES, FRAME, SIZE = 28, 200, (960, 600)  # of the animation; milliseconds per frame

# The block that most requests share, and the request with the most details: only part of its prefix was cached.
MOST_SHARED = """(() => {
  const { refs } = inspector.state.pools[0], most = Math.max(...refs);
  select({ block: refs.indexOf(most), group: 0, isHost: false });
})()"""
MOST_TOLD = """(() => {
  const running = [...inspector.state.requests.values()].filter(r => r.state === "running" && r.report.cached > 0);
  const left = r => r.limit - r.prompt - r.generated;
  running.sort((a, b) => (b.report.miss === "differs") - (a.report.miss === "differs") || left(b) - left(a));
  select({ key: running[0].key });
})()"""


def prompts(rng: random.Random) -> tuple[str, int]:
    """Return a prompt with a common beginning and a rare end, and the number of its samples."""
    files = sorted((ROOT / "src" / "quire").rglob("*.py"))
    head = rng.choice(files[8:12]).read_text(encoding="utf-8")[: rng.choice([400, 700, 900])]
    body = rng.choice(files).read_text(encoding="utf-8")
    start = rng.randrange(max(1, len(body) - 300))
    return head + "\n\n" + body[start : start + rng.randrange(40, 300)], rng.choice([1, 1, 1, 2, 4])


def ask(port: int, seed: int, stop: threading.Event) -> None:
    """Request one completion after the other, as one client."""
    rng = random.Random(seed)
    while not stop.is_set():
        prompt, n = prompts(rng)
        body = {"prompt": prompt, "n": n, "max_tokens": rng.randrange(60, 240), "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(answer.read())
        answer.read()
        connection.close()


def take(page: Page, path: Path, selecting: str) -> None:
    """Select an item, wait until the page has drawn it, and take the picture."""
    page.evaluate(selecting)
    page.wait_for_timeout(700)
    page.evaluate("inspector.drawn().then(() => true)")
    page.screenshot(path=path)
    print(path, f"{path.stat().st_size / 1024:.0f} KiB")


def film(page: Page, path: Path) -> None:
    """Take pictures at full speed, a few per second, and write them as an animation with FRAME ms per picture."""
    frames = [
        Image.open(io.BytesIO(page.screenshot())).convert("RGB").resize(SIZE, Image.Resampling.LANCZOS)
        for _ in range(FRAMES)
    ]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=FRAME, loop=0, quality=60, method=6)
    print(path, f"{path.stat().st_size / 1024:.0f} KiB, {FRAMES * FRAME / 1000:.1f} s")


def take_chat(page: Page, path: Path) -> None:
    """Send two messages in the chat page, and take the picture of the second one's first blocks."""
    page.evaluate("$('most').value = 80")
    for text in ("def read_json(path):", "def write_json(path, value):"):
        page.fill("#prompt", text)
        page.press("#prompt", "Enter")
        page.locator("#messages .assistant:last-child .tools").wait_for()
    page.locator("#prompt").blur()
    page.evaluate("$('cards').scrollTop = 0")
    page.wait_for_timeout(700)
    path.parent.mkdir(exist_ok=True)
    Image.open(io.BytesIO(page.screenshot())).save(path, quality=80, method=6)
    print(path, f"{path.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    """Start the server and its clients, and take the pictures."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    stop = threading.Event()
    with running(*SERVE) as server, sync_playwright() as playwright:
        port = urlsplit(server.url).port
        clients = [threading.Thread(target=ask, args=(port, seed, stop), daemon=True) for seed in range(CLIENTS)]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 800}, device_scale_factor=1.5, color_scheme="dark")
        page.goto(server.url)
        take_chat(page, out / "assets" / "chat.webp")
        page.goto(f"{server.url}/inspector")
        for client in clients:
            client.start()
            time.sleep(0.1)
        time.sleep(WARM_UP)
        take(page, out / "inspector.png", MOST_SHARED)
        film(page, out / "inspector.webp")
        page.emulate_media(color_scheme="light")
        take(page, out / "inspector-request.png", MOST_TOLD)
        browser.close()
        stop.set()
        for client in clients:
            client.join()


if __name__ == "__main__":
    main()
