"""The LoRA adapters of a model, and the slots of its tables that they occupy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire.errors import ConfigError, RequestError
from quire.models.text_part import TextPart
from quire.ops.weights.linear import Linears
from quire.ops.weights.lora import LoraPart, LoraTable


class LoraLimits(NamedTuple):
    """The limits of the number of loaded adapters, and of the rank of each."""

    max_loras: int
    max_rank: int


class LoraTables:
    """The tables of a model's linears, by the linear's name."""

    def __init__(self, linears: Linears, dtype: torch.dtype, limits: LoraLimits) -> None:
        """Start without tables. dtype: of the linears' inputs and results."""
        self.by_name: dict[str, LoraTable] = {}
        self._linears, self._dtype, self._limits = linears, dtype, limits

    def made(self, name: str, in_size: int, out_size: int, num_parts: int = 1) -> LoraTable:
        """Create a table. num_parts: the number of modules that the linear consists of."""
        count, rank = self._limits
        most_rank = num_parts * (rank + rank % 2)
        self.by_name[name] = self._linears.lora(in_size, out_size, self._dtype, count, most_rank)
        return self.by_name[name]


class Target(NamedTuple):
    """A module of a checkpoint that adapters may name."""

    table: LoraTable | None  # of the linear that contains the module; None: it cannot have an adapter
    why: str = ""  # reason, if it cannot
    first: int = 0  # its first column in the linear's results
    size: int = 0  # columns
    order: Tensor | None = None  # int64 [size]: the module's output for each of our columns; None: the same


class Lora(NamedTuple):
    """A loaded adapter."""

    name: str
    slot: int
    digest: str  # of its weights
    rank: int
    directory: Path


class Prepared(NamedTuple):
    """An adapter that was read and checked against the model."""

    directory: Path
    digest: str
    rank: int
    parts: Sequence[tuple[LoraTable, Sequence[LoraPart]]]


class Loras:
    """The adapters of a model. The slot of an unloaded adapter becomes free when no request uses it any more."""

    def __init__(
        self, targets: Mapping[str, Target], limits: LoraLimits, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        """Start without adapters. targets: by the module's name in checkpoints. dtype: of the matrices."""
        self.limits = limits
        self.by_name: dict[str, Lora] = {}  # adapters that requests may name
        self.targets, self.dtype, self.device = targets, dtype, device
        self.part: TextPart | None = None  # the served part of the checkpoint; set after loading
        self.module: Callable[[str], str] = str  # a module's name in an adapter -> its name in `targets`; set likewise
        self._tables = list({id(one.table): one.table for one in targets.values() if one.table is not None}.values())
        self.left: set[int] = set()  # slots of unloaded adapters that running requests may still use

    def __getitem__(self, name: str) -> Lora:
        """Return the adapter of that name. Raises RequestError if it is not loaded."""
        if name not in self.by_name:
            known = ", ".join(map(repr, self.by_name)) or "none"
            raise RequestError(f"there is no adapter {name!r}; loaded are: {known}", "lora")
        return self.by_name[name]

    @property
    def row_bytes(self) -> int:
        """The most bytes per token that a step needs for adapters, in addition to its other memory."""
        return 4 * max((table.in_size + 8 * self.limits.max_rank for table in self._tables), default=0)

    def put(self, name: str, prepared: Prepared, in_use: Collection[int] = (), *, replace: bool = False) -> Lora:
        """Load an adapter under a name. in_use: slots of requests that have not ended.

        replace: replace the adapter of this name; running requests continue with the old one.
        Raises ConfigError if the name is taken, or all slots are.
        """
        if name in self.by_name and not replace:
            raise ConfigError(f"there is an adapter {name!r} already; unload it first, or choose another name")
        self.settle(in_use)
        taken = {one.slot for one in self.by_name.values()} | self.left
        if name in self.by_name and self.by_name[name].slot not in in_use:
            left = self.by_name.pop(name).slot
            taken.discard(left)
            self._clear(left)
        slot = next((slot for slot in range(self.limits.max_loras) if slot not in taken), None)
        if slot is None:
            raise ConfigError(
                f"{name!r} finds no room: max_loras is {self.limits.max_loras}, and all slots have adapters that are "
                "loaded, or unloaded with requests that still run"
            )
        try:
            for table, parts in prepared.parts:
                table.put(slot, parts)
        except BaseException:  # memory may run out between two tables
            self._clear(slot)
            raise
        if name in self.by_name:
            self.left.add(self.by_name[name].slot)
        self.by_name[name] = Lora(name, slot, prepared.digest, prepared.rank, prepared.directory)
        return self.by_name[name]

    def remove(self, name: str, in_use: Collection[int] = ()) -> None:
        """Unload an adapter. Running requests keep using it until they end. Raises RequestError if it is not loaded."""
        self.left.add(self[name].slot)
        del self.by_name[name]
        self.settle(in_use)

    def settle(self, in_use: Collection[int]) -> None:
        """Free the slots of unloaded adapters that no request uses."""
        for slot in self.left.difference(in_use):
            self.left.discard(slot)
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        for table in self._tables:
            table.clear(slot)
