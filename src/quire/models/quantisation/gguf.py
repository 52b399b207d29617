"""Quantised tensors of GGUF files: blocks of 32 or 256 inputs, of a kind that each tensor has of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from quire.errors import QuireError, Unsupported
from quire.models.gguf.architecture import Turns
from quire.models.quantisation.module import Form, Module
from quire.ops.gguf_blocks import MXFP4, SIZES, BlockWeight, weight_of
from quire.ops.narrow import NarrowWeight

KIND = "blocks"  # of a quantised tensor in our names, which else is a "weight"


@dataclass(frozen=True)
class BlocksForm:
    """A linear whose rows are blocks."""

    kind: str
    column_turns: Turns | None = None  # the order of its columns

    needs = (KIND,)
    takes = ()

    @property
    def rounds_rows(self) -> bool:
        """Whether rows of x are rounded where they are multiplied with it."""
        return self.kind != MXFP4

    def nbytes(self, out_size: int, in_size: int) -> int:
        """Bytes in the file, and about as many in memory."""
        numbers, size = SIZES[self.kind]
        return out_size * in_size // numbers * size

    def read(self, module: Module, dtype: torch.dtype) -> BlockWeight | NarrowWeight:
        """The weight; dtype: of x. Raises ModelError, with the tensor's name, for what the format does not allow."""
        numbers, size = SIZES[self.kind]
        blocks = module.tensors[f"{module.name}.{KIND}"]
        if blocks.shape != (module.out_size, module.in_size // numbers * size) or module.in_size % numbers:
            inputs = blocks.shape[1] // size * numbers
            raise module.error(
                KIND,
                f"are [{len(blocks)}, {inputs}] numbers; the metadata ask for [{module.out_size}, {module.in_size}]",
            )
        try:
            weight = cast(BlockWeight | NarrowWeight, weight_of(self.kind, blocks, module.in_size, dtype))
            if self.column_turns is None:
                return weight
            if isinstance(weight, NarrowWeight):
                raise Unsupported(f"{self.kind} has no order of inputs, which this architecture needs here")
            return replace(weight, order=self.column_turns.order(module.in_size).argsort())
        except QuireError as error:
            raise module.error(KIND, f"cannot be read: {error}") from error


@dataclass(frozen=True)
class Gguf:
    """Each tensor's kind is in the file."""

    description: str
    kinds: Mapping[str, str]  # by the names of modules
    column_turns: Mapping[str, Turns]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Gguf:
        """As `GgufModel.config` says it."""
        return cls(str(raw["description"]), raw["kinds"], raw["column_turns"])

    def form(self, name: str) -> Form | None:
        """How the tensor of that name is stored if it is quantised."""
        return BlocksForm(self.kinds[name], self.column_turns.get(name)) if name in self.kinds else None

    def excludes(self, name: str) -> bool:
        """Whether it is numbers."""
        return name not in self.kinds
