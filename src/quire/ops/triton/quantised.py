"""Products with weights of integers, the bits that `quire.ops.quantised` defines.

Two kernels: one rounds rows of x to integers, the other multiplies them. What is rounded is rounded in the order of the
definition, and sums of integers are exact, so a tile's shape and the other rows do not show.

A weight is packed once. Numbers of 4 bits lie two a byte: within a run of inputs that is two parts of a dot product, a
byte's lower half belongs to the first part and its upper half to the second. Both become int8 by a mask and nothing
else, since shifts of single bytes are slow: the lower half is the value, the upper one, whose highest bit is turned, is
16 * (value - 8). Others lie one a byte, less what makes them fit an int8. What zeros add to a sum, and these offsets,
is a multiple of the sum of a part of x, which is made where x is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.errors import BadShape
from quire.ops import checks
from quire.ops.linear import Embedding, Linear, Linears, LinearWeight
from quire.ops.quantised import ACTIVATION_GROUP, PARTS, QuantisedEmbedding, QuantisedWeight
from quire.ops.triton.functions import int8_scale, to_int8
from quire.ops.triton.launch import FLOATS, on_device_of


@dataclass(frozen=True)
class IntegerTile:
    """Rows and outputs that a program computes, inputs of one turn of its loop, its warps and its pipeline."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


FEW_ROWS = IntegerTile(16, 32, 256, 4, 4)  # many programs, with many bytes of the weight on their way
SOME_ROWS = IntegerTile(64, 32, 128, 4, 3)
MANY_ROWS = IntegerTile(64, 128, 128, 4, 3)

RUN = 256  # inputs: rows of weights and of rounded x are as many, or a multiple
ROUNDED = 1024  # inputs of a row that a program rounds, where they have scales of their own
ROUNDED_WHOLE = 4096  # that it rounds at a time, where a row has one scale

SHARING = tl.constexpr(16)  # tiles of rows that share the weights in the L2 cache


# -------------------------------------------------------------------------------------------------- the kernels


@triton.jit(do_not_specialize=["num_rows"])
def round_part(
    x, order, values, scales, sums, num_rows, size, padded, x_row, x_column,
    GROUP: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A tile of one row as integers, the scale of each GROUP, and the sum of each PART of integers.

    WHOLE: the row is one group, and the program rounds all of it, tile by tile. Groups that lie past the row's end have
    the scale -0: what is added with it changes no sum, not even one that is -0.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    values += row * padded
    largest = tl.zeros([TILE // GROUP], tl.float32)
    if WHOLE:
        for first in range(0, size, TILE):
            largest = tl.maximum(largest, _largest(_read(x, order, first, size, x_column, GROUP, TILE)))
    begin = 0 if WHOLE else tl.program_id(1) * TILE
    end = padded if WHOLE else begin + TILE
    for first in range(begin, end, TILE):
        read = _read(x, order, first, size, x_column, GROUP, TILE)
        if not WHOLE:
            largest = _largest(read)
        factor, scale = int8_scale(largest)
        value = to_int8(tl.where((largest < float("inf"))[:, None], read, 0.0) * factor[:, None])
        at = first + tl.reshape(tl.arange(0, TILE), [TILE // GROUP, GROUP])
        tl.store(values + at, value, mask=at < padded)
        if not WHOLE:
            begins = first + tl.arange(0, TILE // GROUP) * GROUP
            scale = tl.where(begins < size, scale, -0.0)
            tl.store(scales + (begins // GROUP).to(tl.int64) * num_rows + row, scale, mask=begins < padded)
        elif first == 0:
            tl.store(scales + row + tl.arange(0, 1), scale)
        if sums is not None:
            part = first // PART + tl.arange(0, TILE // PART)
            total = tl.sum(tl.reshape(value.to(tl.int32), [TILE // PART, PART]), 1)
            tl.store(sums + part.to(tl.int64) * num_rows + row, total, mask=part * PART < padded)


@triton.jit
def _read(x, order, first, size, x_column, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Numbers of a row, in the order of the weight's inputs: fp32 [TILE / GROUP, GROUP]."""
    at = first + tl.reshape(tl.arange(0, TILE), [TILE // GROUP, GROUP])
    source = at.to(tl.int64)
    if order is not None:
        source = tl.load(order + at, mask=at < size, other=0)
    return tl.load(x + source * x_column, mask=at < size, other=0.0).to(tl.float32)


@triton.jit
def _largest(numbers):
    """The largest of each group in size, infinite where one is not finite."""
    magnitude = tl.abs(numbers)
    return tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), 1)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_tile(
    values, scales, zeros, minimums, sub_scales, sub_minimums, bias, x, x_scales, x_sums, out,
    num_rows, num_outputs, padded, value_row,
    PACKED: tl.constexpr, ZERO: tl.constexpr, SEGMENT: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr,
    SUB: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One tile of x @ weight.T + bias.

    ZERO: what is to be subtracted from values, where there are no zeros: of packed ones from the value, else from what
    is stored. SEGMENT: inputs of one integer sum; 0: all. GROUP, X_GROUP: inputs that share a scale; 0: all.
    """
    row_tiles = tl.cdiv(num_rows, ROWS)
    output_tiles = tl.cdiv(num_outputs, OUTPUTS)
    program = tl.program_id(0)
    row_tile, output_tile = tl.swizzle2d(
        program // output_tiles, program % output_tiles, row_tiles, output_tiles, SHARING
    )
    row = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = output_tile.to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    has_row = row < num_rows
    has_output = output < num_outputs
    k = tl.arange(0, PART)
    value_tile = values + output[:, None] * value_row + k[None, :]
    x_tile = x + row[None, :] * padded + k[:, None]
    result = tl.zeros([OUTPUTS, ROWS], tl.float32)
    total = tl.zeros([OUTPUTS, ROWS], tl.int32)
    low = tl.zeros([OUTPUTS, ROWS], tl.int32)
    for first in tl.range(0, padded, STEP):
        for i in tl.static_range(STEP // PART):
            at = (first + i * PART).to(tl.int64)
            if SEGMENT > 0 and i * PART % SEGMENT == 0:
                total = tl.zeros([OUTPUTS, ROWS], tl.int32)
                low = tl.zeros([OUTPUTS, ROWS], tl.int32)
            of_group = (at // GROUP * num_outputs if GROUP > 0 else 0) + output

            if not PACKED:
                a = tl.load(value_tile + at, mask=has_output[:, None], other=0)
            elif i % 2 == 0:
                both = tl.load(value_tile + at // 2, mask=has_output[:, None], other=0)
                a = both & 15
            else:
                a = both & -16  # of the part before
            b = tl.load(x_tile + at, mask=has_row[None, :], other=0)
            x_sum = tl.zeros([ROWS], tl.int32)
            if x_sums is not None:
                x_sum = tl.load(x_sums + at // PART * num_rows + row, mask=has_row, other=0)
            lacking = tl.zeros([OUTPUTS], tl.int32) + ((8 if PACKED and i % 2 == 1 else 0) - ZERO)
            if zeros is not None:
                lacking -= tl.load(zeros + of_group, mask=has_output, other=0)
            offset = lacking[:, None] * x_sum[None, :]
            if SUB == 16:  # the product of two sub-groups: of each without the other
                for half in tl.static_range(2):
                    own = a & tl.where(k // 16 == half, -1, 0).to(tl.int8)[None, :]
                    sub = tl.load(sub_scales + (at // 16 + half) * num_outputs + output, mask=has_output, other=0)
                    total += tl.dot(own, b, out_dtype=tl.int32) * sub.to(tl.int32)[:, None]
            else:
                if PACKED and i % 2 == 1:
                    product = tl.dot(a, b, offset << 4, out_dtype=tl.int32) >> 4
                else:
                    product = tl.dot(a, b, offset, out_dtype=tl.int32)
                if SUB == 32:
                    sub = tl.load(sub_scales + at // 32 * num_outputs + output, mask=has_output, other=0)
                    product *= sub.to(tl.int32)[:, None]
                total += product
            if sub_minimums is not None:
                sub = tl.load(sub_minimums + at // 32 * num_outputs + output, mask=has_output, other=0)
                low += sub.to(tl.int32)[:, None] * x_sum[None, :]
            elif minimums is not None:
                low += x_sum[None, :]

            if SEGMENT > 0 and (i + 1) * PART % SEGMENT == 0:
                x_scale = tl.load(x_scales + at // X_GROUP * num_rows + row, mask=has_row, other=0.0)
                if GROUP > 0:
                    scale = tl.load(scales + of_group, mask=has_output, other=0.0).to(tl.float32)
                else:
                    scale = tl.full([OUTPUTS], 1.0, tl.float32)
                result = tl.fma(total.to(tl.float32), scale[:, None] * x_scale[None, :], result)
                if minimums is not None:
                    minimum = tl.load(minimums + of_group, mask=has_output, other=0.0).to(tl.float32)
                    result = tl.fma(low.to(tl.float32), minimum[:, None] * x_scale[None, :], result)
    if SEGMENT == 0:
        x_scale = tl.load(x_scales + row, mask=has_row, other=0.0)
        result = tl.fma(total.to(tl.float32), tl.broadcast_to(x_scale[None, :], [OUTPUTS, ROWS]), result)
    if GROUP == 0:
        result *= tl.load(scales + output, mask=has_output, other=0.0)[:, None]
    if bias is not None:
        result += tl.load(bias + output, mask=has_output, other=0.0)[:, None]
    where = out + row[None, :] * num_outputs + output[:, None]
    tl.store(where, result.to(out.dtype.element_ty), mask=has_row[None, :] & has_output[:, None])


# -------------------------------------------------------------------------------------------------- the weights


@dataclass(frozen=True, eq=False)  # tensors do not compare as a whole
class PackedWeight:
    """A quantised weight as the kernel reads it."""

    kind: QuantisedWeight  # the same without outputs
    values: Tensor  # int8 [out, padded], or [out, padded / 2] of 4 bits
    scales: Tensor  # fp32 or fp16 [groups, out], as are all others: what neighbours read lies together
    zeros: Tensor | None = None  # int16: of 4 bits they are subtracted from values, else from what is stored
    minimums: Tensor | None = None  # fp16
    sub_scales: Tensor | None = None  # int8
    sub_minimums: Tensor | None = None  # int8

    @classmethod
    def of(cls, weight: QuantisedWeight) -> PackedWeight:
        """That weight, in memory of its own."""
        kind = weight.rows(torch.empty(0, dtype=torch.int64, device=weight.device))
        size = padded_size(kind)
        values = _padded(weight.values, size)
        if kind.bits == 4:
            lower, upper = values.view(len(values), -1, 2, part_size(kind)).unbind(2)
            values = (lower | (upper ^ 8) << 4).view(len(values), -1)
        else:
            values = values - _base(kind)  # modulo 256
        parts = {name: part for name in PARTS[1:] if (part := getattr(weight, name)) is not None}
        if "zeros" in parts:
            parts["zeros"] = (parts["zeros"] - _base(kind)).to(torch.int16)
        for name, part in parts.items():
            inputs = kind.sub_size if name in ("sub_scales", "sub_minimums") else kind.group_size
            parts[name] = (part if kind.by_output else _padded(part, size // inputs)).T.contiguous()
        return cls(kind, values.view(torch.int8), **parts)

    def rows(
        self,
        index: Tensor,  # int64 [N]
    ) -> QuantisedWeight:
        """These outputs, in this order, in memory of their own, unpacked."""
        kind = self.kind
        values = self.values[index].view(torch.uint8)
        if kind.bits == 4:
            runs = values.view(len(values), -1, part_size(kind))
            values = torch.stack([runs & 15, (runs >> 4) ^ 8], 2).flatten(1)
        else:
            values = values + _base(kind)
        parts = {"values": values[:, : kind.in_size]}
        for name in PARTS[1:]:
            if (part := getattr(self, name)) is not None:
                parts[name] = part.T[index, : getattr(kind, name).shape[1]]
        if "zeros" in parts:
            parts["zeros"] = parts["zeros"].float() + _base(kind)
        return kind.derived(**parts)

    @property
    def out_size(self) -> int:
        """Outputs."""
        return len(self.values)

    @property
    def in_size(self) -> int:
        """Inputs."""
        return self.kind.in_size

    @property
    def dtype(self) -> torch.dtype:
        """Of x."""
        return self.kind.dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.values.device


def padded_size(kind: QuantisedWeight) -> int:
    """Inputs of a row as it is stored: the last ones are multiplied with zeros."""
    return -(-kind.in_size // RUN) * RUN


def part_size(kind: QuantisedWeight) -> int:
    """Inputs of a dot product. Two parts lie in the same bytes; neither may span two groups, nor two sub-scales."""
    return 64 if (kind.by_output or kind.segment == 128) and not kind.sub_size else 32


def is_whole(kind: QuantisedWeight) -> bool:
    """Whether a row of x has one scale."""
    return kind.by_output and kind.activation_group != ACTIVATION_GROUP


def _base(kind: QuantisedWeight) -> int:
    """What is subtracted from values before they are stored."""
    return 0 if kind.bits == 4 else kind.zero


def _padded(
    part: Tensor,  # [out, n]
    size: int,
) -> Tensor:
    """The same with zeros after each row: [out, size]."""
    return torch.nn.functional.pad(part, (0, size - part.shape[1]))


# ------------------------------------------------------------------------------------------------- the products


@dataclass(frozen=True)
class RoundedRows:
    """Rows of x as integers. Scales and sums of neighbouring rows lie together."""

    values: Tensor  # int8 [T, padded]
    scales: Tensor  # fp32 [groups, T]
    sums: Tensor | None  # int32 [parts, T]: of the integers of each part; None: nothing asks for them


def rounded_rows(
    x: Tensor,  # [T, in], on the weight's device
    kind: QuantisedWeight,
) -> RoundedRows:
    """The rows as a weight of that kind is multiplied with them: the integers of `quire.ops.quantised`."""
    (rows, size), padded, part = x.shape, padded_size(kind), part_size(kind)
    whole = is_whole(kind)
    tile = ROUNDED_WHOLE if whole else ROUNDED
    group = tile if whole else kind.activation_group
    has_sums = kind.bits == 4 or kind.zeros is not None or kind.minimums is not None
    made = RoundedRows(
        torch.empty(rows, padded, dtype=torch.int8, device=x.device),
        torch.empty(1 if whole else padded // group, rows, dtype=torch.float32, device=x.device),
        torch.empty(padded // part, rows, dtype=torch.int32, device=x.device) if has_sums else None,
    )
    with on_device_of(x):
        round_part[(rows, 1 if whole else triton.cdiv(padded, tile))](
            x,
            kind.order,
            made.values,
            made.scales,
            made.sums,
            rows,
            size,
            padded,
            *x.stride(),
            group,
            part,
            tile,
            whole,
            num_warps=8 if whole else 4,
            enable_fp_fusion=False,  # a rounding to integers is two
        )
    return made


def integer_linear(
    x: Tensor,  # [T, in], of the weight's dtype
    weight: PackedWeight,
    bias: Tensor | None,  # fp32 [out]
    out_dtype: torch.dtype,
    tile: IntegerTile,
) -> Tensor:
    """x @ weight.T + bias, in tiles of that shape, which does not show: [T, out].

    Raises BadShape, BadDtype or BadValue.
    """
    kind, rows = weight.kind, len(x)
    if x.dim() != 2:
        raise BadShape(f"x has shape {tuple(x.shape)}; expected [T, in]")
    checks.check_tensor("x", x, (rows, weight.in_size), weight.dtype, weight.device, any_strides=True)
    out = torch.empty(rows, weight.out_size, dtype=out_dtype, device=x.device)
    if rows:
        rounded = rounded_rows(x, kind)
        grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(weight.out_size, tile.outputs),)
        with on_device_of(x):
            multiply_tile[grid](
                weight.values,
                weight.scales,
                weight.zeros,
                weight.minimums,
                weight.sub_scales,
                weight.sub_minimums,
                bias,
                rounded.values,
                rounded.scales,
                rounded.sums,
                out,
                rows,
                weight.out_size,
                padded_size(kind),
                weight.values.stride(0),
                **constants(kind, tile),
                num_warps=tile.warps,
                num_stages=tile.stages,
                enable_fp_fusion=False,  # what is rounded once is said by the definition
            )
    return out


def constants(kind: QuantisedWeight, tile: IntegerTile) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    packed, whole = kind.bits == 4, is_whole(kind)
    return {
        "PACKED": packed,
        "ZERO": kind.zero if packed and kind.zeros is None else 0,
        "SEGMENT": 0 if whole else ACTIVATION_GROUP if kind.by_output else kind.segment,
        "GROUP": 0 if kind.by_output else kind.group_size,
        "X_GROUP": 0 if whole else kind.activation_group,
        "SUB": kind.sub_size,
        "PART": part_size(kind),
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "STEP": tile.inputs,
    }


@dataclass(frozen=True)
class IntegerLinear:
    """The product with a quantised weight."""

    weight: PackedWeight
    bias: Tensor | None  # fp32 [out]
    out_dtype: torch.dtype

    def __call__(
        self,
        x: Tensor,  # [T, in], of the weight's dtype
    ) -> Tensor:
        """The projection: [T, out]."""
        tile = next((tile for tile in (FEW_ROWS, SOME_ROWS) if len(x) <= tile.rows), MANY_ROWS)
        return integer_linear(x, self.weight, self.bias, self.out_dtype, tile)


class IntegerLinears(Linears):
    """Our own products with quantised weights of the dtypes that kernels serve; all others are the framework's."""

    def linear(
        self,
        weight: LinearWeight,  # [out, in]
        bias: Tensor | None = None,  # [out]
    ) -> Linear:
        """The linear of that weight."""
        if not _serves(weight):
            return super().linear(weight, bias)
        return self._of(PackedWeight.of(weight), bias, weight.dtype)

    def head(
        self,
        weight: LinearWeight,  # [V, H]
        bias: Tensor | None = None,  # [V]
    ) -> Linear:
        """The linear that makes logits: in fp32 where the weight is quantised."""
        if not _serves(weight):
            return super().head(weight, bias)
        return self._of(PackedWeight.of(weight), bias, torch.float32)

    def embedding(
        self,
        weight: LinearWeight,  # [V, H]
    ) -> Embedding:
        """The embedding of a weight that nothing is multiplied with; a quantised one stays packed."""
        return QuantisedEmbedding(PackedWeight.of(weight)) if _serves(weight) else super().embedding(weight)

    def tied(
        self,
        weight: LinearWeight,  # [V, H]
    ) -> tuple[Embedding, Linear]:
        """The embedding and the linear that makes logits, of one packed weight."""
        if not _serves(weight):
            return super().tied(weight)
        packed = PackedWeight.of(weight)
        return QuantisedEmbedding(packed), self._of(packed, None, torch.float32)

    def _of(self, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype) -> IntegerLinear:
        if bias is not None:
            checks.check_tensor("bias", bias, (weight.out_size,), bias.dtype, weight.device, any_strides=True)
            bias = bias.float().contiguous()
        return IntegerLinear(weight, bias, out_dtype)


def _serves(weight: LinearWeight) -> TypeGuard[QuantisedWeight]:
    return isinstance(weight, QuantisedWeight) and weight.dtype in FLOATS
