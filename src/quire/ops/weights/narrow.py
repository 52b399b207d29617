"""Weights of floating-point numbers of 8 or 4 bits with scales, and their product with a row.

Every number of such a format is exact in bfloat16, float16 and float32, so products are those of a 16-bit weight. The
scales are applied afterwards, in fp32, to the sum of each group of inputs:

    out = bias;  for each group, ascending:  out += (sum over its inputs of number[i] * x[i]) * scale

Rows of x are not rounded. The order within a group's sum depends on the instruction set, as for 16-bit weights.

Formats: E4M3 as in "FP8 Formats for Deep Learning" (Micikevicius et al. 2022), without infinities; E2M1 with scales
that are powers of two, which is MXFP4 of the OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape, BadValue

ROWS_AT_ONCE = 2**22  # products that NarrowLinear keeps in memory at a time


@dataclass(frozen=True)
class NarrowFormat:
    """The meaning of a weight's codes."""

    name: str
    bits: int
    group_size: int  # inputs that share a scale
    numbers: tuple[float, ...]  # the value of each code

    @property
    def table(self) -> Tensor:
        """The values of all codes: fp32 [2 ** bits]."""
        return torch.tensor(self.numbers)


_E4M3 = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist())
_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = NarrowFormat("e4m3", 8, 128, _E4M3)
E2M1 = NarrowFormat("e2m1", 4, 32, (*_HALVES, *(-number for number in _HALVES)))


@dataclass(frozen=True, eq=False)  # tensors do not compare as a whole
class NarrowWeight:
    """A weight of narrow numbers times scales. Validated on construction.

    Raises BadShape, BadDtype or BadValue, naming the field.
    """

    codes: Tensor  # uint8 [out, in], one number a byte
    scales: Tensor  # fp32 [out, groups]: of each group of inputs, the last of which may have fewer
    format: NarrowFormat
    dtype: torch.dtype  # of x, and of the product

    def __post_init__(self) -> None:
        if self.codes.dim() != 2 or self.codes.numel() == 0:
            raise BadShape(f"codes has shape {tuple(self.codes.shape)}; expected [out, in]")
        groups = (self.out_size, -(-self.in_size // self.format.group_size))
        if self.scales.shape != groups:
            raise BadShape(f"scales has shape {tuple(self.scales.shape)}; expected {groups}")
        for name, tensor, dtype in (
            ("codes", self.codes, torch.uint8),
            ("scales", self.scales, torch.float32),
        ):
            if tensor.dtype is not dtype:
                raise BadDtype(f"{name} is {tensor.dtype}; expected {dtype}")
        if self.format.bits == 8:
            sizes, wrong, what = self.codes & 0x7F, 0x7F, "NaN"
        else:
            sizes, wrong, what = self.codes, 16, "more than 4 bits"
        if int(sizes.max()) >= wrong:
            place = (sizes >= wrong).nonzero()[0].tolist()
            raise BadValue(f"codes holds {what} at {place}; all numbers must be {self.format.name}")
        unfit = ~self.scales.isfinite()
        if self.format.bits == 4:
            unfit |= (self.scales.view(torch.int32) & 0x807FFFFF != 0) & (self.scales != 2.0**-127)
        if unfit.any():
            place = unfit.nonzero()[0].tolist()
            served = "finite" if self.format.bits == 8 else "powers of two"
            raise BadValue(f"scales holds {float(self.scales[tuple(place)])} at {place}; all must be {served}")

    @property
    def out_size(self) -> int:
        """Number of outputs."""
        return self.codes.shape[0]

    @property
    def in_size(self) -> int:
        """Number of inputs."""
        return self.codes.shape[1]

    @property
    def is_cpu(self) -> bool:
        """True if the weight is on the CPU."""
        return self.codes.is_cpu

    @property
    def device(self) -> torch.device:
        """The device of the weight."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Size of the numbers and scales in bytes, once packed."""
        return narrow_bytes(self.out_size, self.in_size, self.format)

    def rows(
        self,
        index: Tensor,  # int64 [N]
    ) -> NarrowWeight:
        """Return these outputs, in this order, in separate memory."""
        return self.derived(self.codes[index], self.scales[index])

    def to(self, device: str) -> NarrowWeight:
        """Return the weight on another device."""
        return self.derived(self.codes.to(device), self.scales.to(device))

    def derived(self, codes: Tensor, scales: Tensor) -> NarrowWeight:
        """Return a copy with other tensors, without checks. They must be derived from those of valid weights."""
        made: NarrowWeight = copy(self)
        vars(made).update(codes=codes, scales=scales)
        return made

    def dequantised(self) -> Tensor:
        """Return the weight as fp32 [out, in]. Each element is the exact product, rounded once."""
        scales = self.scales.repeat_interleave(self.format.group_size, 1)[:, : self.in_size]
        return self.format.table.to(self.device)[self.codes.int()] * scales


def powers_of_two(
    exponents: Tensor,  # uint8: of 2, with a bias of 127
) -> Tensor:
    """Return the scales: fp32, of the same shape. 255, which is not a valid exponent, becomes infinite."""
    wide = exponents.int()
    return torch.where(wide == 0, 2**22, wide << 23).to(torch.int32).view(torch.float32)  # 2 ** -127 is subnormal


def narrow_bytes(out_size: int, in_size: int, form: NarrowFormat) -> int:
    """Return the size of a weight in bytes, once packed. Scales have 32 bits, or 8 if they are powers of two."""
    groups = -(-in_size // form.group_size)
    return out_size * in_size * form.bits // 8 + out_size * groups * (4 if form.bits == 8 else 1)


@dataclass(frozen=True)
class NarrowLinear:
    """The product by torch's operators, on any device: the specification of all kernels, up to the order in a group."""

    weight: NarrowWeight
    bias: Tensor | None  # [out]
    out_dtype: torch.dtype

    def __call__(
        self,
        x: Tensor,  # [T, in]
    ) -> Tensor:
        """Return the projection: [T, out]."""
        weight, size = self.weight, self.weight.format.group_size
        out = torch.zeros(len(x), weight.out_size, device=x.device)
        if self.bias is not None:
            out += self.bias.float()
        table, wide = weight.format.table.to(x.device), x.float()
        step = max(1, ROWS_AT_ONCE // (weight.out_size * size))
        for group, first in enumerate(range(0, weight.in_size, size)):
            numbers = table[weight.codes[:, first : first + size].int()]
            for row in range(0, len(x), step):  # separate sums, whose order does not depend on a matrix product
                products = wide[row : row + step, None, first : first + size] * numbers
                out[row : row + step] += products.sum(2) * weight.scales[:, group]
        return out.to(self.out_dtype)
