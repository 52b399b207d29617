"""Which low-rank adapter each row has that goes through a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.ops.lora import LoraRows


class CurrentLora:
    """What the linears of one model look at, while a step goes through it."""

    def __init__(self) -> None:
        self.rows: LoraRows | None = None  # None: none has one

    @contextmanager
    def of(self, rows: LoraRows | None) -> Iterator[None]:
        """Within it, linears get these rows."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None
