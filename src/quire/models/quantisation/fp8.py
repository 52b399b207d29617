"""FP8 checkpoints as model vendors publish them: e4m3 weights with a scale per tensor, per output, or per block.

Rows of x are not rounded to FP8, whatever a checkpoint specifies for activations: rounding them only serves to use a
GPU's FP8 units, and products without it are at least as accurate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import ModelError, QuireError
from quire.models.hf_config import shown
from quire.models.patterns import Patterns
from quire.models.quantisation.module import Form, Module
from quire.models.quantisation.reader import PLACE, Modules, SchemeReader, unserved
from quire.ops.weights.narrow import E4M3, NarrowWeight, narrow_bytes

SCALES = ("weight_scale_inv", "weight_scale")  # both have the same meaning: the number is the code times the scale
# Keys about activations, and about other programs' kernels.
IMMATERIAL = ["scale_fmt", "dequantize", "ignore"]


@dataclass(frozen=True)
class Fp8Form:
    """A weight number * scale."""

    block: tuple[int, int] | None  # outputs and inputs that share a scale; None: all, or all inputs of an output
    needs = ("weight",)
    takes = (*SCALES, "input_scale", "activation_scale")
    rounds_rows = False

    def nbytes(self, out_size: int, in_size: int) -> int:
        """Return the bytes that such a weight takes in memory."""
        return narrow_bytes(out_size, in_size, E4M3)

    def read(self, module: Module, dtype: torch.dtype) -> NarrowWeight:
        """Read the weight; dtype: of x. Raises ModelError, with the tensor's name, if it violates the format."""
        rows, columns, size = module.out_size, module.in_size, E4M3.group_size
        kind = next((kind for kind in SCALES if module.has(kind)), None)
        if kind is None:
            raise module.error("weight", f"has no scales; there has to be a {' or a '.join(SCALES)}")
        codes = module.tensor("weight", (rows, columns), torch.float8_e4m3fn).view(torch.uint8)
        groups = -(-columns // size)
        shape = module.shape(kind)
        if shape.numel() == 1:
            scales = module.scales(kind, tuple(shape)).view(1, 1)
        elif self.block is None:
            scales = module.scales(kind, (rows,) if len(shape) == 1 else (rows, 1)).view(rows, 1)
        else:
            high, wide = self.block
            stored = module.scales(kind, (-(-rows // high), -(-columns // wide)))
            scales = stored.repeat_interleave(high, 0)[:rows].repeat_interleave(wide // size, 1)[:, :groups]
        try:
            return NarrowWeight(codes, scales.expand(rows, groups).contiguous(), E4M3, dtype)
        except QuireError as error:
            raise ModelError(f"{module.name}: {error}") from error


@dataclass(frozen=True)
class Fp8:
    """One form for all linears except excluded ones."""

    usual: Fp8Form
    left_out: tuple[Modules, ...]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Fp8:
        """Read a quantization_config. Raises ModelError if it is not supported."""
        config = SchemeReader(raw, "fp8", IMMATERIAL)
        fmt = config.get("fmt", "e4m3")
        if fmt not in ("e4m3", "float8_e4m3fn"):
            raise unserved(f"FP8 of the kind {shown(fmt)}")
        config.only("activation_scheme", "dynamic", "static")
        block = block_size(config, "weight_block_size")
        patterns = Patterns(PLACE)
        left_out = tuple(config.modules(key, patterns) for key in ("modules_to_not_convert", "ignored_layers"))
        config.finish()
        return cls(Fp8Form(block), left_out)

    @property
    def description(self) -> str:
        """The format."""
        return fp8_description("fp8", self.usual)

    def form(self, name: str) -> Form | None:  # noqa: ARG002  # all are alike
        """Return the form of a linear if it is quantised."""
        return self.usual

    def excludes(self, name: str) -> bool:
        """Return whether a linear is excluded from quantisation. The output projection usually is."""
        return name == "lm_head" or any(modules.have(name) for modules in self.left_out)


def block_size(config: SchemeReader, key: str) -> tuple[int, int] | None:
    """Return the outputs and inputs that share a scale; None: no blocks. Raises ModelError for any other value."""
    block = config.get(key)
    if block is None:
        return None
    whole = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if not whole or block[1] % E4M3.group_size:
        raise ModelError(
            f"{PLACE}: {key} is {shown(block)}; it must be [outputs, inputs], these a multiple of {E4M3.group_size}"
        )
    return block[0], block[1]


def fp8_description(name: str, form: Fp8Form) -> str:
    """Return a scheme's description."""
    blocks = "" if form.block is None else f", blocks of {form.block[0]} x {form.block[1]}"
    return f"{name} e4m3{blocks}, multiplied in 16 bits"
