"""Rotation of image rows by two-dimensional positions (M-RoPE, Wang et al. 2024).

Each pair of dimensions of q and k is rotated by one of three positions: time, height or width. The angles of a row are
composed in additional rows of the model's tables, so its layers rotate image rows like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.batch import GivenRows
from quire.models.hf_config import shown

NUM_AXES = 3  # time, height, width
Table: TypeAlias = tuple[Tensor, Tensor]  # cos and sin


class ImageTurns:
    """The angles of a step's image rows."""

    def __init__(self, axes: Sequence[int], max_model_len: int, most_rows: int) -> None:
        """axes: of each rotated pair of dimensions. max_model_len: rows of the tables before they are extended.

        most_rows: the most image rows of a step.
        """
        self._axes, self._first, self._most_rows = torch.tensor(axes), max_model_len, most_rows
        self._tables: dict[int, Tensor] = {}

    def extended(self, tables: Sequence[Table | None]) -> list[Table | None]:
        """Return the tables with rows for the images of a step. Tables that are the same object stay so."""
        extended: dict[int, Tensor] = {}
        for table in (part for pair in tables if pair is not None for part in pair):
            if id(table) not in extended:
                extended[id(table)] = torch.cat([table, table.new_zeros(self._most_rows, table.shape[1])])
        self._tables = {id(table): table for table in extended.values()}
        return [None if pair is None else (extended[id(pair[0])], extended[id(pair[1])]) for pair in tables]

    def applied(
        self,
        turns: Tensor,  # int64 [T]
        given: GivenRows,
    ) -> Tensor:
        """Compose the angles of image rows. Return the row of the tables for each row of the step: int64 [T]."""
        if given.axes is None:
            return turns
        count, device = len(given.rows), turns.device
        positions = given.axes.to(device)[:, self._axes.to(device)]  # [K, D_rot / 2]
        for table in self._tables.values():
            table[self._first : self._first + count] = table.gather(0, positions)
        turns = turns.clone()
        turns[given.rows.to(device)] = self._first + torch.arange(count, device=device)
        return turns


def image_axes(rope: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the axis of each rotated pair of dimensions, from a config's RoPE parameters; empty: images have none.

    Raises ModelError for sections that are not three counts.
    """
    sections = rope.get("mrope_section")
    if sections is None:
        return ()
    if (
        not isinstance(sections, list)
        or len(sections) != NUM_AXES
        or not all(type(n) is int and 0 < n <= 2**12 for n in sections)
    ):
        raise ModelError(f"rope's mrope_section is {shown(sections)}; it must be three counts of pairs of dimensions")
    if not rope.get("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for at in range(axis, NUM_AXES * sections[axis], NUM_AXES):
            if at >= len(axes):
                raise ModelError(f"rope's mrope_section is {shown(sections)}; its parts cannot be interleaved")
            axes[at] = axis
    return tuple(axes)
