"""Quantised tensors of GGUF files: blocks of 32 or 256 inputs. Each tensor has its own kind of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from quire.errors import QuireError, Unsupported
from quire.models.gguf.architecture import Turns
from quire.models.quantisation.module import Form, Module
from quire.ops.weights.gguf_blocks import MXFP4, SIZES, BlockWeight, weight_of
from quire.ops.weights.narrow import NarrowWeight

KIND = "blocks"  # suffix of a quantised tensor in our names, instead of "weight"


@dataclass(frozen=True)
class BlocksForm:
    """A linear whose rows are blocks."""

    kind: str
    column_turns: Turns | None = None  # the order of its columns

    needs = (KIND,)
    takes = ()

    @property
    def rounds_rows(self) -> bool:
        """True if rows of x are rounded before they are multiplied with the weight."""
        return self.kind != MXFP4

    def nbytes(self, out_size: int, in_size: int) -> int:
        """Return the bytes in the file, which are about those in memory."""
        numbers, size = SIZES[self.kind]
        return out_size * in_size // numbers * size

    def read(self, module: Module, dtype: torch.dtype) -> BlockWeight | NarrowWeight:
        """Read the weight; dtype: of x. Raises ModelError, with the tensor's name, if it violates the format."""
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
    """One form per tensor, by its kind in the file."""

    description: str
    kinds: Mapping[str, str]  # by the names of modules
    column_turns: Mapping[str, Turns]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Gguf:
        """Read the quantization_config of `GgufModel.config`."""
        return cls(str(raw["description"]), raw["kinds"], raw["column_turns"])

    def form(self, name: str) -> Form | None:
        """Return the form of a tensor if it is quantised."""
        return BlocksForm(self.kinds[name], self.column_turns.get(name)) if name in self.kinds else None

    def excludes(self, name: str) -> bool:
        """Return whether a tensor is not quantised."""
        return name not in self.kinds
