"""MXFP4 (OCP Microscaling 1.0), in which gpt-oss has its experts: numbers of 4 bits, 32 of which share an exponent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import ModelError, QuireError
from quire.models.quantisation.module import Form, Module, nibbles
from quire.models.quantisation.reader import SchemeReader
from quire.ops.narrow import E2M1, NarrowWeight, narrow_bytes, powers_of_two

IMMATERIAL = ["modules_to_not_convert", "dequantize"]  # what is stored so has other names; how others compute


@dataclass(frozen=True)
class Mxfp4Form:
    """number * 2 ** (exponent - 127)."""

    needs = ("blocks", "scales")
    takes = ()
    rounds_rows = False

    def nbytes(self, out_size: int, in_size: int) -> int:
        """Bytes that such a weight takes, once it was read."""
        return narrow_bytes(out_size, in_size, E2M1)

    def read(self, module: Module, dtype: torch.dtype) -> NarrowWeight:
        """The weight; dtype: of x. Raises ModelError, with the tensor's name, for what the format does not allow."""
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
    """Weights of all experts are stored as blocks; no linear that the checkpoint has by itself is."""

    description = "mxfp4, multiplied in 16 bits"

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Mxfp4:
        """What the quantization_config says. Raises ModelError for what is not understood."""
        config = SchemeReader(raw, "mxfp4", IMMATERIAL)
        config.finish()
        return cls()

    def form(self, name: str) -> Form | None:
        """How the linear of that name is stored if it is quantised: entries of tensors are."""
        return Mxfp4Form() if name.endswith("]") else None

    def excludes(self, name: str) -> bool:
        """Whether the linear of that name is stored as usual."""
        return not name.endswith("]")
