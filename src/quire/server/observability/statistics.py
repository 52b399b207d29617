"""Statistics: a log line about an engine's recent work."""

from __future__ import annotations

import time

from quire.engine.engine import Engine
from quire.frontend.metrics import Metrics, cache_use


class Statistics:
    """The changes since the last line. It belongs to the event loop, and reads counters while the engine runs."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._last = self._now()

    def line(self) -> str | None:
        """Return the line to log, or None if there was no work."""
        before, self._last = self._last, self._now()
        seconds, computed, new, asked, found = (b - a for a, b in zip(before, self._last, strict=True))
        scheduler = self._engine.scheduler
        if not computed and not scheduler.has_work:
            return None
        seconds = max(seconds, 1e-3)
        hits = f"{found / asked:.0%}" if asked else "-"
        return (
            f"{max(0, computed - new) / seconds:,.1f} prompt tokens a second, {new / seconds:,.1f} new; "
            f"{len(scheduler.running)} running, {len(scheduler.waiting) + len(scheduler.swapped)} waiting; "
            f"cache {cache_use(scheduler):.0%} used; prefix hits {hits}"
        )

    def _now(self) -> tuple[float, int, int, int, int]:
        scheduler = self._engine.scheduler
        hits = scheduler.manager.hits
        return (
            time.monotonic(),
            scheduler.num_planned,
            self._metrics.num_generated,
            hits.prompt_tokens,
            hits.cached_tokens,
        )
