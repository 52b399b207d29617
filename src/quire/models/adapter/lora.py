"""The LoRA adapter of each row during a step of a transformers model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.ops.weights.lora import LoraRows


class CurrentLora:
    """The rows' adapters, which the linears of one model read during a step."""

    def __init__(self) -> None:
        self.rows: LoraRows | None = None  # None: no row has an adapter

    @contextmanager
    def of(self, rows: LoraRows | None) -> Iterator[None]:
        """Set the rows' adapters within this context."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None
