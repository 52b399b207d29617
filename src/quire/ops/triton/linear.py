"""A batch-invariant linear layer, with one order of summation for every number of rows.

An element of the result is one sum over the inputs, in fp32, in ascending steps of the tile's depth, or one of each
section in this way, see `sections`; never are sums added by atomics. So a row's bits do not depend on the number of
rows. They also do not depend on the shape of the tile, provided that the hardware multiplies both shapes in the same
steps; callers verify this first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.errors import BadShape, BadStride
from quire.ops.checks.tensors import check_beside, check_tensor
from quire.ops.triton.launch import check_dtype, on_device_of
from quire.ops.triton.quantised import IntegerLinears
from quire.ops.triton.sections import divides, launch_add_sections, section_of, sums_of
from quire.ops.triton.tiles import chip_of, processors_of
from quire.ops.weights.linear import Linear, LinearWeight, rows_are_independent


@dataclass(frozen=True)
class LinearTile:
    """Rows and columns of the result that a program computes, inputs per step, warps, and pipeline stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def resident(self) -> int:
        """Programs that run on one processor at a time, limited by the shared memory for 16-bit numbers."""
        return max(1, SHARED // (2 * self.stages * self.depth * (self.rows + self.columns)))


# By chip, as named by `tiles.chip_of`; Hopper's were the fastest of those measured on an H100. The matrix instructions
# for many rows need at least 64.
FEW_ROWS = LinearTile(64, 32, 64, 4, 5)
MANY_ROWS = LinearTile(128, 128, 64, 8, 3)
FEW_ON_HOPPER = LinearTile(64, 64, 128, 4, 5)
MANY_ON_HOPPER = LinearTile(256, 128, 64, 8, 4)  # of `described_tile`
IN_SECTIONS_ON_HOPPER = LinearTile(128, 128, 64, 8, 4)  # the same with sections: there are registers for two sums
SHARED = 160 * 2**10  # bytes of a processor's shared memory that tiles take
DIVIDES = False  # whether inputs are summed in sections; not timed on a GPU yet, see docs/gpu.md
DEEPEST = 128  # inputs: sections are whole steps of every tile
FP32_DEPTH = 16  # a larger depth would exceed the registers

SMALL = 256  # rows: up to this number the product takes as long as reading the weight

GROUP = tl.constexpr(8)  # tiles of rows that share the weights in the L2 cache


@triton.jit
def _first(num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first row and column of this program's tile."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    of_group = GROUP * tl.cdiv(num_columns, COLUMNS)
    program = tl.program_id(0)
    first_tile = program // of_group * GROUP
    group = tl.minimum(row_tiles - first_tile, GROUP)
    return (first_tile + program % of_group % group) * ROWS, program % of_group // group * COLUMNS


@triton.jit
def _finish(
    total, bias, out, first_row, first_column, num_rows, num_columns,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the bias to a tile and store it."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    has_row = first_row + row < num_rows
    has_column = first_column + column < num_columns
    if BIAS:
        total += tl.load(bias + first_column + column, mask=has_column, other=0.0).to(tl.float32)[None, :]
    out += first_row.to(tl.int64) * num_columns + first_column
    at = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def linear_tile(
    x, weight, bias, out, sums, num_rows, num_columns, size, section, x_row, weight_row,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of x @ weight.T + bias.

    section: inputs of a section, see `sections`; None: all. sums: fp32 [sections, num_rows, num_columns], where sums of
    sections are stored, each by a program of the grid's second dimension; None: one program has all sections.
    """
    first_row, first_column = _first(num_rows, num_columns, ROWS, COLUMNS)
    x += first_row.to(tl.int64) * x_row
    weight += first_column.to(tl.int64) * weight_row
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_tile = x + row.to(tl.int64)[:, None] * x_row + k[None, :]
    weight_tile = weight + column.to(tl.int64)[None, :] * weight_row + k[:, None]
    has_row = first_row + row < num_rows
    has_column = first_column + column < num_columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    whole = tl.zeros([ROWS, COLUMNS], tl.float32)  # of the sections before
    begin, end = 0, size
    if sums is not None:
        begin = tl.program_id(1) * section
        end = tl.minimum(begin + section, size)
        x_tile += begin
        weight_tile += begin
    for first in range(begin, end, DEPTH):
        held = first + k < end
        a = tl.load(x_tile, mask=has_row[:, None] & held[None, :], other=0.0)
        b = tl.load(weight_tile, mask=held[:, None] & has_column[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        x_tile += DEPTH
        weight_tile += DEPTH
        if section is not None and sums is None:  # noqa: SIM102 - decided when it is compiled
            if (first + DEPTH) % section == 0:  # no inner loop: it would empty the pipeline that loads weights
                whole += total
                total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if sums is not None:
        out = sums + tl.program_id(1).to(tl.int64) * num_rows * num_columns
    elif section is not None:
        total += whole
    _finish(total, bias, out, first_row, first_column, num_rows, num_columns, BIAS, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["num_rows"])
def described_tile(
    x, weight, bias, out, num_rows, num_columns, size, section,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute one tile like `linear_tile`, from tensor descriptors of x and weight. Elements outside are read as 0."""
    first_row, first_column = _first(num_rows, num_columns, ROWS, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if section is None:
        for first in range(0, size, DEPTH):
            a = x.load([first_row, first])
            b = weight.load([first_column, first])
            total = tl.dot(a, b.T, total, input_precision="ieee")
    else:
        for begin in range(0, size, section):
            of_section = tl.zeros([ROWS, COLUMNS], tl.float32)
            for first in range(begin, tl.minimum(begin + section, size), DEPTH):
                a = x.load([first_row, first])
                b = weight.load([first_column, first])
                of_section = tl.dot(a, b.T, of_section, input_precision="ieee")
            total += of_section
    _finish(total, bias, out, first_row, first_column, num_rows, num_columns, BIAS, ROWS, COLUMNS)


def linear(
    x: Tensor,  # [T, in]
    weight: Tensor,  # [out, in], of the dtype of x
    bias: Tensor | None,  # [out]
    tile: LinearTile,
    section: int = 0,
    divided: bool = False,
) -> Tensor:
    """Compute x @ weight.T + bias in tiles of one shape: [T, out]. A row's bits depend on the row alone.

    section: the inputs of a section, a multiple of DEEPEST; 0: all. divided: each section of a tile has a program,
    which does not affect the result.

    Raises BadShape, BadDtype, BadStride, BadValue or Unsupported.
    """
    _check(x, weight, bias)
    (rows, size), columns = x.shape, weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if out.numel():
        with on_device_of(x):
            count = triton.cdiv(size, section) if section and divided else 1
            sums = sums_of(count, out) if count > 1 else None
            linear_tile[(_tiles(x, weight, tile), count)](
                x,
                weight,
                x if bias is None else bias.contiguous(),
                out,
                sums,
                rows,
                columns,
                size,
                section or None,
                x.stride(0),
                weight.stride(0),
                bias is not None and sums is None,
                tile.rows,
                tile.columns,
                FP32_DEPTH if x.dtype is torch.float32 else tile.depth,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
            if sums is not None:
                launch_add_sections(sums, None, None, None if bias is None else bias.contiguous(), out)
    return out


def _tiles(x: Tensor, weight: Tensor, tile: LinearTile) -> int:
    return -(-len(x) // tile.rows) * -(-len(weight) // tile.columns)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2:
        raise BadShape(f"x has shape {tuple(x.shape)}; expected [T, in]")
    if weight.dim() != 2:
        raise BadShape(f"weight has shape {tuple(weight.shape)}; expected [out, in]")
    check_dtype("x", x)
    size, columns = x.shape[1], weight.shape[0]
    if x.stride(1) != 1 and size > 1:
        raise BadStride(f"x has strides {x.stride()}; the last one must be 1")
    check_tensor("weight", weight, (columns, size), x.dtype, x.device)
    if bias is not None and bias.shape != (columns,):
        raise BadShape(f"bias has shape {tuple(bias.shape)}; expected ({columns},)")
    check_beside(x, bias=bias)


def describable(x: Tensor) -> bool:
    """Return True if the hardware can copy tiles of a matrix: 16-bit numbers, with rows at multiples of 16 bytes."""
    at = x.data_ptr() % 16 == 0 and x.stride(1) == 1 and x.stride(0) % 8 == 0
    return x.dtype.itemsize == 2 and x.numel() > 0 and at


@dataclass(frozen=True)
class TiledLinear:
    """Quire's product, in tiles of one shape."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    tile: LinearTile
    section: int = 0  # inputs of a section; 0: all

    def __call__(
        self,
        x: Tensor,  # [T, in]
    ) -> Tensor:
        """Return the projection: [T, out]."""
        divided = False
        if self.section and x.dim() == 2:
            slots = self.tile.resident * processors_of(str(x.device))
            divided = divides(_tiles(x, self.weight, self.tile), triton.cdiv(x.shape[1], self.section), slots)
        return linear(x, self.weight, self.bias, self.tile, self.section, divided)


@dataclass(frozen=True)
class DescribedLinear:
    """Quire's product of many rows on Hopper. `few` is used if the hardware cannot copy x."""

    weight: Tensor  # [out, in], describable
    bias: Tensor | None  # [out]
    few: TiledLinear
    tile: LinearTile = field(init=False)
    _weight: TensorDescriptor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tile", IN_SECTIONS_ON_HOPPER if self.few.section else MANY_ON_HOPPER)
        described = TensorDescriptor.from_tensor(self.weight, [self.tile.columns, self.tile.depth])
        object.__setattr__(self, "_weight", described)

    def __call__(
        self,
        x: Tensor,  # [T, in]
    ) -> Tensor:
        """Return the projection: [T, out]."""
        weight, bias, tile = self.weight, self.bias, self.tile
        if x.dim() != 2 or x.numel() == 0 or not describable(x):
            return self.few(x)
        _check(x, weight, bias)
        out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        with on_device_of(x):
            described_tile[(_tiles(x, weight, tile),)](
                TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
                self._weight,
                x if bias is None else bias.contiguous(),
                out,
                *out.shape,
                x.shape[1],
                self.few.section or None,
                bias is not None,
                tile.rows,
                tile.columns,
                tile.depth,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
        return out


@dataclass(frozen=True)
class TwoLinears:
    """Two implementations of a product with the same bits, for few and for many rows."""

    few: Linear
    many: Linear

    def __call__(
        self,
        x: Tensor,  # [T, in]
    ) -> Tensor:
        """Return the projection: [T, out]."""
        return (self.few if len(x) <= SMALL else self.many)(x)


class TiledLinears(IntegerLinears):
    """Quire's products with all weights, since torch uses different kernels for different numbers of rows."""

    def linear(
        self,
        weight: LinearWeight,  # [out, in]
        bias: Tensor | None = None,  # [out]
    ) -> Linear:
        """Return the linear of a weight."""
        if not isinstance(weight, Tensor):
            return super().linear(weight, bias)
        few, many = _products(weight, bias)
        # One shape of tile gives a row the same bits in every position. A probe verifies that two shapes do, with
        # random weights, since all results of zeros would match.
        key = (*weight.shape, weight.dtype, bias is None, type(many))
        if key not in self._proved:
            probe = torch.empty_like(weight).normal_()
            few_probe, many_probe = _products(probe, bias)
            self._proved[key] = type(many_probe) is type(many) and rows_are_independent(many_probe, few_probe, probe)
        return TwoLinears(few, many) if self._proved[key] else few


def _products(weight: Tensor, bias: Tensor | None) -> tuple[TiledLinear, Linear]:
    """Return the products of few and of many rows on the weight's device."""
    section = section_of(weight.shape[1], DEEPEST) if DIVIDES else 0
    if not (weight.is_cuda and chip_of(str(weight.device)) == "sm90"):
        return TiledLinear(weight, bias, FEW_ROWS, section), TiledLinear(weight, bias, MANY_ROWS, section)
    few = TiledLinear(weight, bias, FEW_ON_HOPPER, section)
    many = DescribedLinear(weight, bias, few) if describable(weight) else TiledLinear(weight, bias, MANY_ROWS, section)
    return few, many
