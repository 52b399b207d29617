"""MXFP4 (OCP Microscaling 1.0), in which gpt-oss has its experts: numbers of 4 bits, 32 of which share an exponent.

All their values are exact in bfloat16, in which they are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.quantisation.module import Form
from quire.models.quantisation.reader import SchemeReader

BLOCKS, SCALES = "_blocks", "_scales"  # what the names of a tensor's two halves end with
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the numbers 0..7; 8..15 are the same with a minus
BIAS = 127  # of an exponent
IMMATERIAL = ["modules_to_not_convert", "dequantize"]  # what is stored so has other names; how others compute


@dataclass(frozen=True)
class Mxfp4:
    """Experts are stored as blocks; no linear that the checkpoint has by itself is."""

    description = "mxfp4, multiplied in 16 bits"

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Mxfp4:
        """What the quantization_config says. Raises ModelError for what is not understood."""
        config = SchemeReader(raw, "mxfp4", IMMATERIAL)
        config.finish()
        return cls()

    def form(self, name: str) -> Form | None:  # noqa: ARG002  # as the protocol has it
        """None."""
        return None

    def excludes(self, name: str) -> bool:  # noqa: ARG002  # as the protocol has it
        """Whether the linear of that name is stored as usual: all are."""
        return True


def numbers(
    name: str,
    blocks: Tensor,  # uint8 [..., out, groups, 16]: two numbers a byte, the first one in its lower half
    scales: Tensor,  # uint8 [..., out, groups]
) -> Tensor:
    """What the blocks of that name mean, with outputs last: bfloat16 [..., in, out]. Raises ModelError for others."""
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape != (*scales.shape, 16):
        raise ModelError(
            f"{name}{BLOCKS} is {blocks.dtype} {tuple(blocks.shape)} and {name}{SCALES} {scales.dtype} "
            f"{tuple(scales.shape)}; MXFP4 has uint8 [..., 16] and uint8 [...]"
        )
    if (scales == 255).any():
        raise ModelError(f"{name}{SCALES} holds 255, which is no exponent; all numbers must be finite")
    values = torch.tensor([*VALUES, *(-value for value in VALUES)], device=blocks.device)
    pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], -1)
    wide = torch.ldexp(pairs.flatten(-2), (scales.int() - BIAS)[..., None])
    return wide.flatten(-2).transpose(-1, -2).to(torch.bfloat16)
