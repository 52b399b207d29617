"""Weights of integers with scales, and the exact definition of their product with a row.

A weight is `(value - zero) * scale`, with one scale (and one zero) for each output and group of inputs. The formats of
GGUF have two more parts. A minimum is added to each weight of a group: `value * scale + minimum`. And a group of 256
may have integers for each 16 or 32 of its inputs, which multiply its scale and its minimum.

A row of x is rounded to integers too, with one scale for each activation group of inputs. Sums of products of integers
are exact, so they are the same in every order, on every instruction set, and for every number of rows. The order of all
other operations is defined here, and every kernel follows it to the bit:

    x_scale[a], x_value[i]: the inputs i of activation group a, rounded by the rule of quire.ops.weights.rounding
    sum[s]      = sum over the inputs i of segment s of (value[i] - zero[s]) * sub_scale[i] * x_value[i]   exact, int32
    low[s]      = sum over the inputs i of segment s of sub_minimum[i] * x_value[i]                        exact, int32

    one scale a group:    y = 0;  for s ascending:  y = fma(sum[s], x_scale * scale[s], y)
                                                    y = fma(low[s], x_scale * minimum[s], y)   if there are minimums
                          out = y + bias
    one scale an output:  y = 0;  for s ascending:  y = fma(sum[s], x_scale, y);             out = y * scale + bias

With sections, which are multiples of a segment, y begins at 0 in each, and these y are added in order before the result
is computed from their sum: `QuantisedLinear.section`. No kernel on a CPU has them.

A segment is the smaller one of the two kinds of groups, so that each has one scale of x and one of the weight. A sum is
rounded to fp32 before it is multiplied, and all other numbers are fp32. Missing sub-scales and sub-minimums are 1.

If a group of x has an infinite or NaN number, every result of its row is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from ctypes import byref
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape, BadValue, Unsupported
from quire.ops import native
from quire.ops.memory import mapped
from quire.ops.weights.rounding import quantised_rows

ACTIVATION_GROUP = 128  # inputs of x that share a scale, unless a weight specifies another number
GROUPS = (32, 64, 128)  # inputs of a weight that share a scale in fp32, unless all do
BLOCK = 32  # inputs that share a scale in fp16 without sub-scales; also the inputs of x that then share one
SUPER_BLOCK = 256  # inputs that share a scale in fp16 with sub-scales
SUB_SIZES = {4: 32, 5: 32, 6: 16}  # inputs that share a sub-scale, by bits
MOST_INPUTS = 65_536  # of a row with one scale: the sum of that many products fits an int32
BITS = (4, 8)  # of weights with scales in fp32
BLOCK_BITS = (4, 5, 8)  # of weights with one scale in fp16 per BLOCK
ROUNDED_AT_ONCE = 2**16  # elements of a weight: they fit a cache, and the heap keeps little memory
PARTS = ("values", "scales", "zeros", "minimums", "sub_scales", "sub_minimums")  # tensors with a row for each output


@dataclass(frozen=True, eq=False)  # tensors do not compare as a whole
class QuantisedWeight:
    """A weight of integers: (values - zeros) * scales, or with the parts of GGUF. Validated on construction.

    There are three kinds. The first has fp32 scales of groups or of outputs, and optionally zeros. The second has fp16
    scales of 32 inputs, and optionally minimums. The third has fp16 scales of 256 inputs, and either sub-scales of 32
    inputs, minimums and sub-minimums (4 and 5 bits), or sub-scales of 16 inputs (6 bits).

    Raises BadShape, BadDtype, BadValue or Unsupported, naming the field.
    """

    values: Tensor  # uint8 [out, in], below 2 ** bits
    scales: Tensor  # fp32 or fp16 [out, groups]: of each group of inputs, the last of which may have fewer
    zeros: Tensor | None  # fp32 [out, groups], whole numbers; None: 0 with minimums, else 2 ** (bits - 1)
    bits: int  # 4, 5, 6 or 8
    group_size: int  # inputs that share a scale; `in` or more: one scale per output
    dtype: torch.dtype  # of x, and of the product
    order: Tensor | None = None  # int64 [in]: values[:, i] belongs to x[:, order[i]]; None: to x[:, i]
    activation_group: int = ACTIVATION_GROUP  # inputs of x that share a scale: 32, 128 or `in`
    minimums: Tensor | None = None  # fp16 [out, groups]; None: no minimums
    sub_scales: Tensor | None = None  # int8 [out, in / 16 or in / 32]
    sub_minimums: Tensor | None = None  # int8 [out, in / 32], at least 0

    def __post_init__(self) -> None:
        if self.values.dim() != 2 or self.values.numel() == 0:
            raise BadShape(f"values has shape {tuple(self.values.shape)}; expected [out, in]")
        self._check_kind()
        groups = (self.out_size, -(-self.in_size // self.group_size))
        subs = (self.out_size, self.in_size // SUB_SIZES.get(self.bits, self.in_size))
        for name, shape, dtype in (
            ("values", tuple(self.values.shape), torch.uint8),
            ("scales", groups, self.scales.dtype),
            ("zeros", groups, torch.float32),
            ("minimums", groups, torch.float16),
            ("sub_scales", subs, torch.int8),
            ("sub_minimums", subs, torch.int8),
            ("order", (self.in_size,), torch.int64),
        ):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape != shape:
                raise BadShape(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
            if tensor.dtype is not dtype:
                raise BadDtype(f"{name} is {tensor.dtype}; expected {dtype}")
        self._check_numbers()

    def _check_kind(self) -> None:
        in_blocks = self.scales.dtype is torch.float16
        if self.scales.dtype not in (torch.float16, torch.float32):
            raise BadDtype(f"scales is {self.scales.dtype}; expected torch.float32, or torch.float16 for GGUF's blocks")
        bits = BITS if not in_blocks else BLOCK_BITS if self.sub_scales is None else tuple(SUB_SIZES)
        if self.bits not in bits:
            raise Unsupported(f"bits is {self.bits!r}; it must be one of {', '.join(map(str, bits))}")
        sizes = GROUPS if not in_blocks else (BLOCK,) if self.sub_scales is None else (SUPER_BLOCK,)
        if self.group_size not in sizes and not self.by_output:
            served = ", ".join(map(str, sizes))
            also = "" if in_blocks else f", or all {self.in_size} inputs"
            raise Unsupported(f"group_size is {self.group_size}; it must be one of {served}{also}")
        if in_blocks and self.in_size % self.group_size:
            raise BadShape(f"values has {self.in_size} inputs; blocks of {self.group_size} do not divide them")
        with_minimums = self.sub_scales is not None and self.bits != 6
        for name, given, why in (
            ("zeros", self.zeros is not None and in_blocks, "weights with scales in fp16 have none"),
            ("minimums", self.minimums is not None and not in_blocks, "weights with scales in fp32 have none"),
            ("minimums", self.minimums is not None and self.bits in (6, 8), f"weights of {self.bits} bits have none"),
            ("minimums", self.minimums is None and with_minimums, "weights of 4 and 5 bits with sub-scales have them"),
            ("sub_scales", self.sub_scales is not None and not in_blocks, "weights with scales in fp32 have none"),
            ("sub_minimums", (self.sub_minimums is not None) != with_minimums, "they go with sub-scales and minimums"),
        ):
            if given:
                raise Unsupported(f"{name} is {'None' if getattr(self, name) is None else 'given'}; {why}")
        self._check_activation_group()

    def _check_activation_group(self) -> None:
        group = BLOCK if self.scales.dtype is torch.float16 and self.sub_scales is None else ACTIVATION_GROUP
        if self.activation_group == group:
            return
        if self.activation_group != self.in_size:
            raise Unsupported(
                f"activation_group is {self.activation_group}; of such a weight it must be {group} or all "
                f"{self.in_size} inputs"
            )
        if self.zeros is not None or not self.by_output or self.in_size > MOST_INPUTS:
            raise Unsupported(
                f"a weight of {self.in_size} inputs in groups of {self.group_size} is for rows with one scale; such a "
                f"weight is symmetric, has one scale an output, and at most {MOST_INPUTS} inputs"
            )

    def _check_numbers(self) -> None:
        largest = int(self.values.max())
        if largest >= 2**self.bits:  # it would overflow into its neighbour when packed
            raise BadValue(f"values holds {largest}; of {self.bits} bits they lie in 0..{2**self.bits - 1}")
        for name, tensor in (("scales", self.scales), ("minimums", self.minimums)):
            if tensor is not None and not tensor.isfinite().all():
                raise BadValue(f"{name} holds {_first(tensor, ~tensor.isfinite())}; all must be finite")
        if self.zeros is not None:
            served = (self.zeros >= 0) & (self.zeros <= 2**self.bits) & (self.zeros == self.zeros.round())
            if not served.all():
                wrong = _first(self.zeros, ~served)
                raise BadValue(f"zeros holds {wrong}; of {self.bits} bits they are whole numbers in 0..{2**self.bits}")
        if self.sub_minimums is not None and int(self.sub_minimums.min()) < 0:
            raise BadValue(f"sub_minimums holds {_first(self.sub_minimums, self.sub_minimums < 0)}; all are at least 0")
        if self.order is not None and not torch.equal(
            self.order.sort().values, torch.arange(self.in_size, device=self.order.device)
        ):
            raise BadValue(f"order is no permutation of 0..{self.in_size - 1}")

    @property
    def out_size(self) -> int:
        """Number of outputs."""
        return self.values.shape[0]

    @property
    def in_size(self) -> int:
        """Number of inputs."""
        return self.values.shape[1]

    @property
    def by_output(self) -> bool:
        """True if an output has one scale, which multiplies the sum of all segments."""
        return self.group_size >= self.in_size and self.scales.dtype is torch.float32

    @property
    def segment(self) -> int:
        """Number of inputs whose products are summed as integers. The last segment may have fewer."""
        return min(self.group_size, self.activation_group)

    @property
    def sub_size(self) -> int:
        """Number of inputs that share a sub-scale, or 0 without sub-scales."""
        return 0 if self.sub_scales is None else SUB_SIZES[self.bits]

    @property
    def zero(self) -> int:
        """The value that represents 0, or the minimum, if there are no zeros."""
        return 0 if self.minimums is not None else 1 << (self.bits - 1)

    @property
    def is_cpu(self) -> bool:
        """True if the weight is on the CPU."""
        return self.values.is_cpu

    @property
    def device(self) -> torch.device:
        """The device of the weight."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Size in bytes once packed: integers of `bits` bits, and all other parts in their dtypes."""
        parts = (getattr(self, name) for name in PARTS[1:])
        return self.values.numel() * self.bits // 8 + sum(int(part.nbytes) for part in parts if part is not None)

    def rows(
        self,
        index: Tensor,  # int64 [N]
    ) -> QuantisedWeight:
        """Return these outputs, in this order, in separate memory."""
        return self._with_parts(lambda part: part[index])

    def to(self, device: str) -> QuantisedWeight:
        """Return the weight on another device."""
        order = None if self.order is None else self.order.to(device)
        return self._with_parts(lambda part: part.to(device)).derived(order=order)

    def derived(self, **changes: Tensor | None) -> QuantisedWeight:
        """Return a copy with other tensors, without checks. They must be derived from those of valid weights."""
        made: QuantisedWeight = copy(self)
        vars(made).update(changes)
        return made

    def dequantised(self) -> Tensor:
        """Return the weight as fp32 [out, in]. Each element is its exact value, rounded once."""
        scales = self.repeated(self.scales).float()
        if self.sub_scales is not None:
            scales = scales * self.repeated(self.sub_scales).float()
        zeros = self.zero if self.zeros is None else self.repeated(self.zeros)
        weight = (self.values.float() - zeros) * scales
        if self.minimums is not None:
            minimums = self.repeated(self.minimums).float()
            weight = weight + (
                minimums if self.sub_minimums is None else minimums * self.repeated(self.sub_minimums).float()
            )
        if self.order is None:
            return weight
        restored = torch.empty_like(weight)
        restored[:, self.order] = weight
        return restored

    def repeated(
        self,
        part: Tensor,  # [out, groups]: scales, zeros, minimums or their sub-groups
    ) -> Tensor:
        """Repeat a part for each input: [out, in]."""
        size = self.in_size if part.shape[1] == 1 else self.sub_size if part.dtype is torch.int8 else self.group_size
        return part.repeat_interleave(size, 1)[:, : self.in_size]

    def _with_parts(self, made: Callable[[Tensor], Tensor]) -> QuantisedWeight:
        parts = {name: getattr(self, name) for name in PARTS}
        return self.derived(**{name: made(part) for name, part in parts.items() if part is not None})


def number_bytes(out_size: int, in_size: int, bits: int, group_size: int, has_zeros: bool) -> int:
    """Return the size of a weight in bytes: integers of `bits` bits, scales and zeros in fp32."""
    groups = -(-in_size // group_size)
    return out_size * in_size * bits // 8 + out_size * groups * torch.float32.itemsize * (2 if has_zeros else 1)


def quantised(
    weight: Tensor,  # [out, in]
    bits: int,
    group_size: int,  # inputs that share a scale; `in` or more: all of them
    dtype: torch.dtype,  # of x
) -> QuantisedWeight:
    """Round a weight to the nearest integers, symmetrically: 8 bits to -127..127, 4 bits to -8..7.

    Raises BadShape for an empty weight, BadValue for one that is not finite, and the errors of QuantisedWeight.
    """
    if weight.dim() != 2 or weight.numel() == 0:
        raise BadShape(f"weight has shape {tuple(weight.shape)}; expected [out, in], not empty")
    size = min(group_size, weight.shape[1])
    rounded = _rounded_natively if weight.is_cpu and not native.unavailable() else _rounded_by_torch
    values, scales = rounded(weight, bits, size)
    if not scales.isfinite().all():
        bad = ~weight.float().isfinite()
        raise BadValue(f"the weight holds {_first(weight, bad)}; only finite numbers of fp32 can be quantised")
    return QuantisedWeight(values, scales, None, bits, group_size, dtype)


def _room(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Allocate the values [out, in] and scales [out, groups] of a weight."""
    out_size, in_size = weight.shape
    scales = torch.empty(out_size, -(-in_size // size), dtype=torch.float32, device=weight.device)
    if weight.is_cpu:
        return mapped((out_size, in_size), torch.uint8), scales
    return torch.empty(out_size, in_size, dtype=torch.uint8, device=weight.device), scales


def _rounded_natively(
    weight: Tensor,  # [out, in]
    bits: int,
    size: int,  # inputs that share a scale, at most `in`
) -> tuple[Tensor, Tensor]:
    """Return values and scales, computed in one native call: torch's threads would synchronise in many small ones."""
    if weight.dtype not in native.DTYPES:
        weight = weight.float()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    values, scales = _room(weight, size)
    library = native.default()
    params = native.RoundParams(
        *(tensor.data_ptr() for tensor in (weight, values, scales)),
        *(weight.stride(0), *weight.shape, size),
        *(native.DTYPES[weight.dtype], bits, torch.get_num_threads()),
    )
    library.round_weight(library.parallel_for, byref(params))
    return values, scales


def _rounded_by_torch(
    weight: Tensor,  # [out, in]
    bits: int,
    size: int,  # inputs that share a scale, at most `in`
) -> tuple[Tensor, Tensor]:
    """Return values and scales, computed by torch on any device."""
    values, scales = _room(weight, size)
    step = max(1, ROUNDED_AT_ONCE // weight.shape[1])
    for first in range(0, len(weight), step):
        rows = weight[first : first + step].float()
        values[first : first + step], scales[first : first + step] = _rounded(rows, bits, size)
    return values, scales


def _rounded(
    rows: Tensor,  # fp32 [R, in]
    bits: int,
    size: int,  # inputs that share a scale, at most `in`
) -> tuple[Tensor, Tensor]:
    """Return the values [R, in] and scales [R, groups] of rows."""
    in_size, half = rows.shape[1], 2 ** (bits - 1)
    grouped = torch.nn.functional.pad(rows, (0, -in_size % size)).view(len(rows), -1, size)
    low, high = grouped.aminmax(dim=2)
    if bits == 8:
        scales = torch.maximum(high, -low) / (half - 1)
    else:  # the largest number becomes -8, so that all 16 values are used
        scales = torch.where(high > -low, high, low) / -half
    scales += 0.0  # -0 becomes 0
    steps = torch.where(scales == 0, 1, scales)[..., None]
    whole = (grouped / steps).round_().clamp_(-half, half - 1).add_(half)
    return whole.view(len(rows), -1)[:, :in_size], scales


# --------------------------------------------------------------------------------------------------- products


@dataclass(frozen=True)
class QuantisedLinear:
    """The product by torch's operators, on any device: the specification of every kernel."""

    weight: QuantisedWeight
    bias: Tensor | None  # [out]
    out_dtype: torch.dtype
    section: int = 0  # inputs whose products are added before those of others; 0: all

    def __call__(
        self,
        x: Tensor,  # [T, in]
    ) -> Tensor:
        """Return the projection: [T, out]."""
        weight = self.weight
        if weight.order is not None:
            x = x[:, weight.order]
        values, x_scales = rounded_groups(x, weight.activation_group)
        multipliers = weight.values.double() - _wide(weight, weight.zeros, weight.zero)
        multipliers = multipliers * _wide(weight, weight.sub_scales, 1)
        added = _wide(weight, weight.sub_minimums, 1).expand(weight.out_size, weight.in_size)
        out = before = torch.zeros(len(x), weight.out_size, device=x.device)
        for begin in range(0, weight.in_size, weight.segment):
            if self.section and begin and begin % self.section == 0:
                before, out = before + out, torch.zeros_like(out)
            inputs, group = slice(begin, begin + weight.segment), begin // weight.group_size
            x_value, x_scale = values[:, inputs].double(), x_scales[:, begin // weight.activation_group, None]
            # A float64 sum of integers is exact below 2 ** 53.
            total = (x_value @ multipliers[:, inputs].T).float()
            out = fma(total, x_scale if weight.by_output else x_scale * weight.scales[:, group].float(), out)
            if weight.minimums is not None:
                low = (x_value @ added[:, inputs].T).float()
                out = fma(low, x_scale * weight.minimums[:, group].float(), out)
        if self.section:
            out = before + out
        if weight.by_output:
            out = out * weight.scales[:, 0]
        return (out if self.bias is None else out + self.bias.float()).to(self.out_dtype)


class QuantisedRows(Protocol):
    """Rows of a quantised weight, packed or not."""

    @property
    def in_size(self) -> int:
        """Number of inputs."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of x."""

    @property
    def device(self) -> torch.device:
        """The device of the weight."""

    def rows(
        self,
        index: Tensor,  # int64 [N]
    ) -> QuantisedWeight:
        """Return these outputs, in this order."""


@dataclass(frozen=True)
class QuantisedEmbedding:
    """Rows of a quantised matrix."""

    weight: QuantisedRows  # [V, H]

    def __call__(
        self,
        token_ids: Tensor,  # int64 [T]
    ) -> Tensor:
        """Return the rows: [T, H]."""
        if len(token_ids) == 0:
            return torch.empty(0, self.weight.in_size, dtype=self.weight.dtype, device=self.weight.device)
        return self.weight.rows(token_ids).dequantised().to(self.weight.dtype)


def rounded_groups(
    x: Tensor,  # [T, in]
    group_size: int,
) -> tuple[Tensor, Tensor]:
    """Round groups of x by the rule of `rounding`: integers, int8 [T, in], and scales, fp32 [T, groups]."""
    rows, in_size = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -in_size % group_size))
    values, scales = quantised_rows(padded.view(rows, padded.shape[1] // group_size, group_size))
    return values.view(padded.shape)[:, :in_size], scales


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute a * b + c of fp32 numbers, rounded once.

    The product is exact in float64. The sum is rounded to odd there (Boldo and Melquiond 2008), so that it never falls
    on the middle between two fp32 numbers, and the second rounding gives the result of a single one.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product  # Knuth's exact error of a sum
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    away = (error > 0) == (total > 0)  # the exact sum is farther from zero than its rounding
    odd = torch.where(error.isfinite() & (error != 0) & (bits & 1 == 0), torch.where(away, bits + 1, bits - 1), bits)
    return odd.view(torch.float64).float()


def _wide(weight: QuantisedWeight, part: Tensor | None, default: int) -> Tensor:
    """Return a part repeated for each input, float64 [out, in], or [1, 1] with the default if there is no such part."""
    if part is None:
        return torch.full((1, 1), default, dtype=torch.float64, device=weight.device)
    return weight.repeated(part).double()


def _first(tensor: Tensor, wrong: Tensor) -> str:
    place = wrong.nonzero()[0].tolist()
    return f"{float(tensor[tuple(place)])} at {place}"
