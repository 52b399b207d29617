"""Low-rank adapters of linears (LoRA, Hu et al. 2021): out += (scale * x @ A.T) @ B.T, for each row by its own adapter.

A table has the low-rank matrices of one linear for every adapter, by the adapter's slot. A batch may have rows of
different adapters, and rows without one. A row's result does not depend on the other rows; on a CPU it has the same
bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Product: TypeAlias = Callable[[Tensor], Tensor]  # of rows [T, in]: [T, out]


@dataclass(frozen=True)
class LoraPart:
    """The low-rank update by an adapter of some columns of a linear's results."""

    a: Tensor  # [rank, in]
    b: Tensor  # [size, rank]
    scale: float
    first: int  # column of the results

    @property
    def rank(self) -> int:
        """Number of columns between the two products."""
        return len(self.a)


class LoraRows:
    """The adapter of each row in a step."""

    def __init__(
        self,
        slots: Tensor,  # int32 [T], host; -1: none
    ) -> None:
        self.slots = slots
        self._of: dict[torch.device, list[tuple[int, Tensor]]] = {}

    def of(self, device: torch.device) -> list[tuple[int, Tensor]]:
        """Return the slots that occur, ascending, each with its rows: int64, on the device."""
        if device not in self._of:
            found = sorted(set(self.slots.tolist()) - {-1})
            self._of[device] = [(slot, (self.slots == slot).nonzero().flatten().to(device)) for slot in found]
        return self._of[device]

    def part(
        self,
        rows: Tensor | slice,  # int64 [R]
    ) -> LoraRows:
        """Return the adapters of a part of the rows."""
        return LoraRows(self.slots[rows.cpu() if isinstance(rows, Tensor) else rows])


class LoraTable(Protocol):
    """The low-rank matrices of one linear for each adapter."""

    in_size: int
    out_size: int

    def put(self, slot: int, parts: Sequence[LoraPart]) -> None:
        """Store the parts of an adapter in a free slot. They have the linear's dtype and device."""

    def clear(self, slot: int) -> None:
        """Free a slot."""

    def add(
        self,
        x: Tensor,  # [T, in]
        out: Tensor,  # [T, out], added to
        rows: LoraRows,
    ) -> None:
        """Add the product of each row of x with its adapter to the row of `out`. Both have a last stride of 1."""


class PlainLoraTable:
    """A table whose products are linears of the backend: the rows of each adapter are multiplied separately."""

    def __init__(self, linear: Callable[[Tensor], Product], in_size: int, out_size: int) -> None:
        """Make an empty table. `linear` returns the product of a weight [out, in]."""
        self.in_size, self.out_size, self._linear = in_size, out_size, linear
        self._slots: dict[int, list[tuple[Product, Product, LoraPart]]] = {}

    def put(self, slot: int, parts: Sequence[LoraPart]) -> None:
        """Store the parts of an adapter in a free slot."""
        self._slots[slot] = [(self._linear(part.a), self._linear(part.b), part) for part in parts]

    def clear(self, slot: int) -> None:
        """Free a slot."""
        self._slots.pop(slot, None)

    def add(self, x: Tensor, out: Tensor, rows: LoraRows) -> None:
        """Add the product of each row of x with its adapter to the row of `out`."""
        for slot, own in rows.of(x.device):
            for down, up, part in self._slots.get(slot, ()):
                columns = out[:, part.first : part.first + len(part.b)]
                columns.index_copy_(0, own, columns[own] + up(down(x[own]) * part.scale))
