"""The work of `quire batch`: an engine of this process answers a file."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from quire.progress import progress_bar
from quire.server.batch.answering import Answerer
from quire.server.batch.results import STANDARD, Results
from quire.server.batch.runner import BatchRun, prepared
from quire.server.run import ServerParts, build_parts
from quire.server.server_config import ServerConfig


def answer_file(options: Mapping[str, Any], config: ServerConfig, source: Path, results: Results) -> None:
    """Load a model and answer the lines of a file that have no result yet, with a progress bar.

    options: those of `LLM`. source: - is stdin. Raises QuireError, and OSError for a file that cannot be used.
    """
    asyncio.run(_answer(build_parts(options, config), source, results))


async def _answer(parts: ServerParts, source: Path, results: Results) -> None:
    service = parts.service

    def width() -> int:
        return 2 * service.engine_client.num_slots()[0]  # so that a line waits for each that ends

    parts.engine_client.llm.observers.remove(parts.inspector.observe_step)  # there is no page to watch it
    service.engine_client.start()
    try:
        answerer = Answerer(service)
        with _opened(source, results) as lines:
            total: int | None = None
            if lines.seekable():
                parser, total = await prepared(answerer, lines, results)
            else:
                parser = await answerer.parser()
            with progress_bar("Answering lines", total, results.count, "lines") as advance:
                await BatchRun(
                    answerer, lines, parser, results, lambda: 2 * service.engine_client.num_slots()[0], advance
                ).run()
    finally:
        await service.engine_client.stop()
        service.close()
        parts.llm.engine.close()


def _opened(source: Path, results: Results) -> BinaryIO:
    """Open the lines. Those of stdin are read at once only if there are results to compare with them."""
    if source != STANDARD:
        return source.open("rb")
    stdin = sys.stdin.buffer
    return stdin if results.is_empty or stdin.seekable() else io.BytesIO(stdin.read())
