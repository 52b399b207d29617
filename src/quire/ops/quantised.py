"""Weights of integers with scales, and what their product with a row is, to the bit.

A weight is `(value - zero) * scale`, with one scale (and one zero) for each output and group of inputs. A row of x
becomes integers too, with one scale for each ACTIVATION_GROUP inputs, or for the whole row. Sums of products of
integers are exact, so they are the same in every order, on every instruction set, and for every number of rows. What
is rounded is rounded in one order, which this module defines and every kernel follows:

    x_scale[a], x_value[i]: the inputs i of activation group a, rounded by the rule of quire.ops.rounding
    sum[s]      = sum over the inputs i of segment s of (value[i] - zero[s]) * x_value[i]      exact, int32

    one scale a group:    y = 0;  for s ascending:  y = fma(sum[s], x_scale * scale[s], y);  out = y + bias
    one scale an output:  y = 0;  for s ascending:  y = fma(sum[s], x_scale, y);             out = y * scale + bias

A segment is the smaller one of the two kinds of groups, so that each has one scale of x and one of the weight. Where a
whole row of x has one scale, it is all of the row: y = float(sum) * x_scale. All of this is fp32.

A group of x that holds an infinite or NaN number makes every result of its row NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape, BadValue, Unsupported
from quire.ops.memory import mapped
from quire.ops.rounding import quantised_rows

ACTIVATION_GROUP = 128  # inputs of x that share a scale
GROUPS = (32, 64, 128)  # inputs of a weight that share a scale, unless all do
MOST_INPUTS = 65_536  # of a row with one scale: the sum of so many products fits an int32
BITS = (4, 8)
ROUNDED_AT_ONCE = 2**16  # numbers of a weight: they stay in a cache, and the heap keeps little of them


@dataclass(frozen=True, eq=False)  # tensors do not compare as a whole
class QuantisedWeight:
    """A weight of integers: (values - zeros) * scales. Validated on construction.

    Raises BadShape, BadDtype, BadValue or Unsupported, naming the field.
    """

    values: Tensor  # uint8 [out, in], below 2 ** bits
    scales: Tensor  # fp32 [out, groups]: of each group of inputs, the last of which may have fewer; or [out, 1]
    zeros: Tensor | None  # fp32 [out, groups], whole numbers; None: 2 ** (bits - 1), the weight is symmetric
    bits: int  # 4 or 8
    group_size: int  # inputs that share a scale: 32, 64 or 128, or all of them
    dtype: torch.dtype  # of x, and of the product
    order: Tensor | None = None  # int64 [in]: values[:, i] belongs to x[:, order[i]]; None: to x[:, i]
    whole_rows: bool = False  # a row of x has one scale, else one for each ACTIVATION_GROUP inputs

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise Unsupported(f"bits is {self.bits!r}; it must be one of {', '.join(map(str, BITS))}")
        if self.values.dim() != 2 or self.values.numel() == 0:
            raise BadShape(f"values has shape {tuple(self.values.shape)}; expected [out, in]")
        if not self.by_output and self.group_size not in GROUPS:
            served = ", ".join(map(str, GROUPS))
            raise Unsupported(
                f"group_size is {self.group_size}; it must be one of {served}, or all {self.in_size} inputs"
            )
        groups = (self.out_size, -(-self.in_size // self.group_size))
        for name, tensor, shape, dtype in (
            ("values", self.values, self.values.shape, torch.uint8),
            ("scales", self.scales, groups, torch.float32),
            ("zeros", self.zeros, groups, torch.float32),
            ("order", self.order, (self.in_size,), torch.int64),
        ):
            if tensor is None:
                continue
            if tensor.shape != shape:
                raise BadShape(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}")
            if tensor.dtype is not dtype:
                raise BadDtype(f"{name} is {tensor.dtype}; expected {dtype}")
        largest = int(self.values.max())
        if largest >= 2**self.bits:  # it would spill into its neighbour when it is packed
            raise BadValue(f"values holds {largest}; of {self.bits} bits they lie in 0..{2**self.bits - 1}")
        if not self.scales.isfinite().all():
            raise BadValue(f"scales holds {_first(self.scales, ~self.scales.isfinite())}; all must be finite")
        if self.zeros is not None:
            served = (self.zeros >= 0) & (self.zeros <= 2**self.bits) & (self.zeros == self.zeros.round())
            if not served.all():
                wrong = _first(self.zeros, ~served)
                raise BadValue(f"zeros holds {wrong}; of {self.bits} bits they are whole numbers in 0..{2**self.bits}")
        if self.whole_rows and (self.zeros is not None or not self.by_output or self.in_size > MOST_INPUTS):
            raise Unsupported(
                f"a weight of {self.in_size} inputs in groups of {self.group_size} is for rows with one scale; such a "
                f"weight is symmetric, has one scale an output, and at most {MOST_INPUTS} inputs"
            )
        if self.order is not None and not torch.equal(
            self.order.sort().values, torch.arange(self.in_size, device=self.order.device)
        ):
            raise BadValue(f"order is no permutation of 0..{self.in_size - 1}")

    @property
    def out_size(self) -> int:
        """Outputs."""
        return self.values.shape[0]

    @property
    def in_size(self) -> int:
        """Inputs."""
        return self.values.shape[1]

    @property
    def by_output(self) -> bool:
        """Whether an output has one scale."""
        return self.group_size >= self.in_size

    @property
    def segment(self) -> int:
        """Inputs whose products make one integer sum, the last one may have fewer."""
        return self.in_size if self.whole_rows else min(self.group_size, ACTIVATION_GROUP)

    @property
    def is_cpu(self) -> bool:
        """Whether it lies on the CPU."""
        return self.values.is_cpu

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers: integers of so many bits, scales and zeros in fp32."""
        return number_bytes(self.out_size, self.in_size, self.bits, self.group_size, self.zeros is not None)

    def rows(
        self,
        index: Tensor,  # int64 [N]
    ) -> QuantisedWeight:
        """These outputs, in this order, in memory of their own."""
        zeros = None if self.zeros is None else self.zeros[index]
        return replace(self, values=self.values[index], scales=self.scales[index], zeros=zeros)

    def to(self, device: str) -> QuantisedWeight:
        """The same on that device."""
        zeros, order = (None if tensor is None else tensor.to(device) for tensor in (self.zeros, self.order))
        return replace(self, values=self.values.to(device), scales=self.scales.to(device), zeros=zeros, order=order)

    def dequantised(self) -> Tensor:
        """The weight's numbers: fp32 [out, in]. Each is rounded once, from the exact product."""
        zeros = torch.full_like(self.scales, 2 ** (self.bits - 1)) if self.zeros is None else self.zeros
        size = min(self.group_size, self.in_size)
        repeated = [x.repeat_interleave(size, 1)[:, : self.in_size] for x in (zeros, self.scales)]
        weight = (self.values.float() - repeated[0]) * repeated[1]
        if self.order is None:
            return weight
        restored = torch.empty_like(weight)
        restored[:, self.order] = weight
        return restored


def number_bytes(out_size: int, in_size: int, bits: int, group_size: int, has_zeros: bool) -> int:
    """Bytes of the numbers of such a weight: integers of so many bits, scales and zeros in fp32."""
    groups = -(-in_size // group_size)
    return out_size * in_size * bits // 8 + out_size * groups * torch.float32.itemsize * (2 if has_zeros else 1)


def quantised(
    weight: Tensor,  # [out, in]
    bits: int,
    group_size: int,  # inputs that share a scale; at least `in`: all of them
    dtype: torch.dtype,  # of x
) -> QuantisedWeight:
    """The weight rounded to the nearest integers, symmetric: 8 bits to -127..127, 4 bits to -8..7.

    Raises BadValue for a weight that is not finite, and what QuantisedWeight raises.
    """
    out_size, in_size = weight.shape
    groups = -(-in_size // group_size)
    if weight.is_cpu:
        values = mapped((out_size, in_size), torch.uint8)
    else:
        values = torch.empty(out_size, in_size, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(out_size, groups, dtype=torch.float32, device=weight.device)
    step = max(1, ROUNDED_AT_ONCE // in_size)
    for first in range(0, out_size, step):
        rows = weight[first : first + step].float()
        values[first : first + step], scales[first : first + step] = _rounded(rows, bits, min(group_size, in_size))
    if not scales.isfinite().all():
        raise BadValue(f"the weight holds {_first(weight, ~weight.isfinite())}; only finite numbers can be quantised")
    return QuantisedWeight(values, scales, None, bits, group_size, dtype)


def _rounded(
    rows: Tensor,  # fp32 [R, in]
    bits: int,
    size: int,  # inputs that share a scale, at most `in`
) -> tuple[Tensor, Tensor]:
    """Their values [R, in] and scales [R, groups]."""
    in_size, half = rows.shape[1], 2 ** (bits - 1)
    grouped = torch.nn.functional.pad(rows, (0, -in_size % size)).view(len(rows), -1, size)
    low, high = grouped.aminmax(dim=2)
    if bits == 8:
        scales = torch.maximum(high, -low) / (half - 1)
    else:  # the largest number becomes -8, so that all 16 values serve
        scales = torch.where(high > -low, high, low) / -half
    steps = torch.where(scales == 0, 1, scales)[..., None]
    whole = (grouped / steps).round_().clamp_(-half, half - 1).add_(half)
    return whole.view(len(rows), -1)[:, :in_size], scales


# --------------------------------------------------------------------------------------------------- products


@dataclass(frozen=True)
class QuantisedLinear:
    """The product by torch's operators, on any device: what every kernel computes."""

    weight: QuantisedWeight
    bias: Tensor | None  # [out]
    out_dtype: torch.dtype

    def __call__(
        self,
        x: Tensor,  # [T, in]
    ) -> Tensor:
        """The projection: [T, out]."""
        weight = self.weight
        if weight.order is not None:
            x = x[:, weight.order]
        values, scales = rounded_groups(x, weight.in_size if weight.whole_rows else ACTIVATION_GROUP)
        out = torch.zeros(len(x), weight.out_size, device=x.device)
        for i, begin in enumerate(range(0, weight.in_size, weight.segment)):
            total = _exact_sums(values, weight, begin, begin + weight.segment).float()
            x_scale = scales[:, 0 if weight.whole_rows else begin // ACTIVATION_GROUP, None]
            if weight.by_output:
                out = total * x_scale if weight.whole_rows else fma(total, x_scale, out)
            else:
                out = fma(total, x_scale * weight.scales[:, i], out)
        if weight.by_output:
            out = out * weight.scales[:, 0]
        return (out if self.bias is None else out + self.bias.float()).to(self.out_dtype)


@dataclass(frozen=True)
class QuantisedEmbedding:
    """Rows of a quantised matrix."""

    weight: QuantisedWeight  # [V, H]

    def __call__(
        self,
        token_ids: Tensor,  # int64 [T]
    ) -> Tensor:
        """The rows: [T, H]."""
        if len(token_ids) == 0:
            return torch.empty(0, self.weight.in_size, dtype=self.weight.dtype, device=self.weight.device)
        return self.weight.rows(token_ids).dequantised().to(self.weight.dtype)


def rounded_groups(
    x: Tensor,  # [T, in]
    group_size: int,
) -> tuple[Tensor, Tensor]:
    """Integers, int8 [T, in], and scales, fp32 [T, groups], as `quire.ops.rounding` has them."""
    rows, in_size = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -in_size % group_size))
    values, scales = quantised_rows(padded.view(rows, -1, group_size))
    return values.view(rows, -1)[:, :in_size], scales


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of fp32 numbers, rounded once.

    The product of two is exact in float64. Of the sum there only the rounding is kept off the middle between two fp32
    numbers: to odd (Boldo and Melquiond 2008), so that the second rounding is as if it were the first one.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product  # Knuth's exact error of a sum
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    away = (error > 0) == (total > 0)  # the exact sum lies farther from zero than its rounding
    odd = torch.where(error.isfinite() & (error != 0) & (bits & 1 == 0), torch.where(away, bits + 1, bits - 1), bits)
    return odd.view(torch.float64).float()


def _exact_sums(values: Tensor, weight: QuantisedWeight, begin: int, end: int) -> Tensor:
    """Of these inputs, [T, out]. A sum of whole numbers is exact as long as it is below 2 ** 53."""
    zero: float | Tensor = 2.0 ** (weight.bits - 1)
    if weight.zeros is not None:
        zero = weight.zeros[:, begin // weight.group_size, None].double()
    return values[:, begin:end].double() @ (weight.values[:, begin:end].double() - zero).T


def _first(tensor: Tensor, wrong: Tensor) -> str:
    place = wrong.nonzero()[0].tolist()
    return f"{float(tensor[tuple(place)])} at {place}"
