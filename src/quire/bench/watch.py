"""Looking at the cache in the middle of a step: after its blocks were handed out, before any comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from quire.batch import Batch
from quire.cache.usage import CacheUsage
from quire.engine.engine import Engine
from quire.engine.plan import StepOutput


class _Watched:
    """A runner that looks before it runs."""

    def __init__(self, engine: Engine, look: Callable[[CacheUsage], None]) -> None:
        self._engine, self._runner, self._look = engine, engine.runner, look

    def run(self, batch: Batch) -> StepOutput:
        usage = self._engine.scheduler.usage()
        coming = sum(int((group.slots >= 0).sum()) for group in batch.groups)  # this step fills these slots
        self._look(replace(usage, filled_slots=usage.filled_slots + coming))
        return self._runner.run(batch)


@contextmanager
def watch_steps(engine: Engine, look: Callable[[CacheUsage], None]) -> Iterator[None]:
    """Show `look` the cache's use in every step."""
    runner = engine.runner
    engine.runner = _Watched(engine, look)
    try:
        yield
    finally:
        engine.runner = runner
