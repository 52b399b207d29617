"""MXFP4 (OCP Microscaling 1.0), the format of gpt-oss's experts: 4-bit numbers, 32 of which share an exponent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import ModelError, QuireError
from quire.models.quantisation.module import Form, Module, nibbles
from quire.models.quantisation.reader import SchemeReader
from quire.ops.weights.narrow import E2M1, NarrowWeight, narrow_bytes, powers_of_two

# Excluded modules have other tensor names; `dequantize` is for other programs' kernels.
IMMATERIAL = ["modules_to_not_convert", "dequantize"]


@dataclass(frozen=True)
class Mxfp4Form:
    """A weight number * 2 ** (exponent - 127)."""

    needs = ("blocks", "scales")
    takes = ()
    rounds_rows = False

    def nbytes(self, out_size: int, in_size: int) -> int:
        """Return the bytes that such a weight takes in memory."""
        return narrow_bytes(out_size, in_size, E2M1)

    def read(self, module: Module, dtype: torch.dtype) -> NarrowWeight:
        """Read the weight; dtype: of x. Raises ModelError, with the tensor's name, if it violates the format."""
        rows, columns, size = module.out_size, module.in_size, E2M1.group_size
        module.check_multiple("inputs", columns, size)
        pairs = module.tensor("blocks", (rows, columns // size, size // 2), torch.uint8)
        exponents = module.tensor("scales", (rows, columns // size), torch.uint8)
        if (exponents == 255).any():
            raise module.error("scales", "holds 255, which is no exponent; all numbers must be finite")
        try:
            return NarrowWeight(nibbles(pairs).view(rows, columns), powers_of_two(exponents), E2M1, dtype)
        except QuireError as error:
            raise ModelError(f"{module.name}: {error}") from error


@dataclass(frozen=True)
class Mxfp4:
    """Blocks for the weights of all experts; linears with separate tensors are not quantised."""

    description = "mxfp4, multiplied in 16 bits"

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Mxfp4:
        """Read a quantization_config. Raises ModelError for an unknown key."""
        config = SchemeReader(raw, "mxfp4", IMMATERIAL)
        config.finish()
        return cls()

    def form(self, name: str) -> Form | None:
        """Return the form of a linear if it is quantised. Entries of tensors are."""
        return Mxfp4Form() if name.endswith("]") else None

    def excludes(self, name: str) -> bool:
        """Return whether a linear is not quantised."""
        return not name.endswith("]")
