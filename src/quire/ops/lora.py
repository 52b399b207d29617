"""Low-rank adapters of linears (LoRA, Hu et al. 2021): out += (scale * x @ A.T) @ B.T, for each row by its own adapter.

A table has what every adapter adds to one linear, by the adapter's slot. Rows of different adapters, and of none, stand
in one batch. What a row gets does not depend on the others: on a CPU to the last bit.
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
    """What an adapter adds to some columns of a linear's results."""

    a: Tensor  # [rank, in]
    b: Tensor  # [size, rank]
    scale: float
    first: int  # column

    @property
    def rank(self) -> int:
        """Numbers between the two products."""
        return len(self.a)


class LoraRows:
    """Which adapter each row of a step has."""

    def __init__(
        self,
        slots: Tensor,  # int32 [T], host; -1: none
    ) -> None:
        self.slots = slots
        self._of: dict[torch.device, list[tuple[int, Tensor]]] = {}

    def of(self, device: torch.device) -> list[tuple[int, Tensor]]:
        """The slots that occur, ascending, each with its rows: int64, on that device."""
        if device not in self._of:
            found = sorted(set(self.slots.tolist()) - {-1})
            self._of[device] = [(slot, (self.slots == slot).nonzero().flatten().to(device)) for slot in found]
        return self._of[device]

    def part(
        self,
        rows: Tensor | slice,  # int64 [R]
    ) -> LoraRows:
        """Of these rows."""
        return LoraRows(self.slots[rows.cpu() if isinstance(rows, Tensor) else rows])


class LoraTable(Protocol):
    """What each adapter adds to one linear."""

    in_size: int
    out_size: int

    def put(self, slot: int, parts: Sequence[LoraPart]) -> None:
        """Let a slot, which is free, have these parts, of the linear's dtype, on its device."""

    def clear(self, slot: int) -> None:
        """Free a slot."""

    def add(
        self,
        x: Tensor,  # [T, in]
        out: Tensor,  # [T, out], added to
        rows: LoraRows,
    ) -> None:
        """Add to each row what its adapter makes of the row of x. Both have a last stride of 1."""


class PlainLoraTable:
    """A table whose products are linears of the backend: each adapter's rows are multiplied by themselves."""

    def __init__(self, linear: Callable[[Tensor], Product], in_size: int, out_size: int) -> None:
        """linear: makes one of a weight [out, in]."""
        self.in_size, self.out_size, self._linear = in_size, out_size, linear
        self._slots: dict[int, list[tuple[Product, Product, LoraPart]]] = {}

    def put(self, slot: int, parts: Sequence[LoraPart]) -> None:
        """As LoraTable."""
        self._slots[slot] = [(self._linear(part.a), self._linear(part.b), part) for part in parts]

    def clear(self, slot: int) -> None:
        """As LoraTable."""
        self._slots.pop(slot, None)

    def add(self, x: Tensor, out: Tensor, rows: LoraRows) -> None:
        """As LoraTable."""
        for slot, own in rows.of(x.device):
            for down, up, part in self._slots.get(slot, ()):
                columns = out[:, part.first : part.first + len(part.b)]
                columns.index_copy_(0, own, columns[own] + up(down(x[own]) * part.scale))
