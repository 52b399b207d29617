"""Record the inspector's demo: half a minute, with chapters, of a real engine with the embedded model.

`python tools/inspector_demo.py [file]` writes src/quire/server/observability/page/demo.json.gz. The engine runs at full
speed; its clock advances by a tenth of a second per step, so that a viewer can follow the recording.
"""

from __future__ import annotations

import gzip
import json
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire import LLM
from quire.engine.engine import Engine
from quire.request import Request, SampleGroup, SamplingParams
from quire.server.observability.inspector import Inspector, Watcher

ROOT = Path(__file__).parent.parent
OUT = ROOT / "src" / "quire" / "server" / "observability" / "page" / "demo.json.gz"
STEP = 0.1  # seconds
EPOCH = 1_767_261_600.0  # fixed date of the recording, so that two recordings are equal
NUM_BLOCKS = 40

# The step at which a chapter begins, its title and its caption.
CHAPTERS = [
    (0, "Start", "A prompt arrives. It is computed in one step, and the blocks that it needs are taken from the pool. "
     "Then each step adds a token, and when a block is full, the next one is taken."),
    (55, "Share", "Two more prompts begin as the first one does. Their common beginning is found in the cache: those "
     "blocks show the number of requests that share them, and need not be computed again."),
    (115, "Fork", "One prompt, three samples. They share all of the prompt's blocks; the first to write into a shared, "
     "half-filled block gets a copy of it (copy on write)."),
    (175, "Evict", "Earlier requests have ended, and their full blocks stay reusable, hatched. Now others need memory: "
     "the longest unused blocks are given up first, and flash red."),
    (225, "Preempt", "More is asked for than the pool can hold. The last request is preempted: its blocks are freed "
     "for those before it, and it comes back when there is room."),
]  # fmt: skip
HEAD = '''"""Readers of settings: each returns a dictionary, and says which file and line is wrong if it cannot."""

from pathlib import Path
import json
'''
SERVER = "import socket\nimport threading\n\n\nclass Server:\n    def __init__(self, port: int) -> None:\n"
# The step at which a request arrives, its name, prompt, number of new tokens, and samples.
REQUESTS: list[tuple[int, str, str, int, int]] = [
    (2, "first", HEAD + "\n\ndef read_json(path: Path) -> dict:\n", 66, 1),
    (58, "second", HEAD + "\n\ndef read_lines(path: Path) -> list[str]:\n", 40, 1),
    (74, "third", HEAD + "import tomllib\n\n\ndef read_toml(path: Path) -> dict:\n", 44, 1),
    (118, "samples", HEAD + "\n\nclass Settings:\n    def __init__(self, values: dict) -> None:\n", 46, 3),
    (176, "other", SERVER * 4, 40, 1),
    (186, "another", "def mean(values):\n    return sum(values) / len(values)\n\n\ndef median(values):\n" * 5, 98, 1),
    (227, "long", "class Matrix:\n    def __init__(self, rows):\n        self.rows = rows\n\n" * 5, 60, 1),
    (230, "longer", "async def fetch(session, url):\n    async with session.get(url) as answer:\n" * 5, 48, 1),
    (233, "last", HEAD + "\n\ndef read_yaml(path: Path) -> dict:\n", 30, 1),
]  # fmt: skip


def requests_of(llm: LLM, name: str, prompt: str, max_tokens: int, samples: int) -> Iterator[Request]:
    """Yield a prompt's requests."""
    group = SampleGroup() if samples > 1 else None
    tokens = llm.get_tokenizer().encode(prompt)
    for i in range(samples):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.8, seed=i + 1)
        request = Request(f"demo-{name}-{i}", array("i", tokens), len(tokens), sampling, i, group=group)
        if group is not None:
            group.members.append(request)
        yield request


def record(llm: LLM) -> dict[str, Any]:
    """Run the engine. Return the recording."""
    engine: Engine = llm.engine
    now = 0.0
    engine.scheduler.clock = lambda: now
    inspector = Inspector(engine, {"model": "quire-embedded", "backend": llm.backend.name})
    items: list[dict[str, Any]] = []

    def deliver(part: bytes) -> None:
        watcher.num_taken += len(part)
        items.append(json.loads(part.split(b"data: ", 1)[1]))

    watcher = Watcher(deliver)
    inspector.subscribe(watcher)
    items[0]["epoch"] = EPOCH
    chapters = []
    for step in range(10_000):
        for at, title, caption in CHAPTERS:
            if at == step:
                chapters.append({"at": len(items) if step else 0, "title": title, "caption": caption})
        for at, name, prompt, max_tokens, samples in REQUESTS:
            if at == step:
                for request in requests_of(llm, name, prompt, max_tokens, samples):
                    engine.add(request)
        if not engine.has_work and step > REQUESTS[-1][0]:
            break
        now = round(now + STEP, 3)
        if engine.has_work:
            inspector.observe(engine.step())
        inspector.flush()
    return {"format": "quire-inspector", "version": 1, "chapters": chapters, "items": items}


def main() -> None:
    """Write the recording and print its size."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    with LLM(num_blocks=NUM_BLOCKS, max_num_seqs=8, max_model_len=512) as llm:
        recording = record(llm)
    text = json.dumps(recording, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    items = recording["items"]
    print(f"{path}: {len(items)} records, {items[-1]['time']:.0f} s, {path.stat().st_size / 1024:.0f} KiB")
    print(items[-1]["gauges"])


if __name__ == "__main__":
    main()
