"""Files of requests for tests of batches, and runs of them on a server of this process."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from quire.server.api.service import Service
from quire.server.batch.answering import Answerer
from quire.server.batch.results import Results
from quire.server.batch.runner import BatchRun, prepared
from tests.server.serving import Serving

T = TypeVar("T")


def request(number: int, url: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}).encode()


def mixed(count: int) -> list[bytes]:
    """Requests of all kinds, most of them drawn without a seed, and a line in nine that fails."""
    lines = []
    for i in range(count):
        if i % 9 == 4:
            lines.append([b"{", b"[]", request(i, "/v1/models"), request(i, "/v1/completions", prompt=7)][i % 4])
        elif i % 4 == 0:
            lines.append(
                request(i, "/v1/chat/completions", messages=[{"role": "user", "content": f"a {i}"}], max_tokens=3)
            )
        elif i % 4 == 1:
            lines.append(request(i, "/v1/completions", prompt=["def f", "def f"], max_tokens=2 + i % 7, n=2))
        elif i % 4 == 2:
            lines.append(request(i, "/v1/embeddings", input=f"def f{i % 8}", dimensions=4))
        else:
            lines.append(request(i, "/v1/score", text_1="a queue", text_2=[f"a list {i}", "a deque"]))
    return lines


async def answering(service: Service, lines: list[bytes], results: Results, width: int = 4) -> None:
    answerer, source = Answerer(service), io.BytesIO(b"\n".join(lines))
    parser, _ = await prepared(answerer, source, results)
    await BatchRun(answerer, source, parser, results, lambda: width).run()


def on(server: Serving, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine on a server's event loop."""
    assert server.loop is not None
    return asyncio.run_coroutine_threadsafe(work, server.loop).result(60)


def answered(server: Serving, lines: list[bytes], directory: Path, width: int = 4) -> tuple[bytes, bytes]:
    """The answers and the errors that are in a directory after a run."""
    paths = directory / "answers", directory / "errors"
    results = Results(*paths)
    try:
        on(server, answering(server.service, lines, results, width))
    finally:
        results.close()
    return paths[0].read_bytes(), paths[1].read_bytes()
