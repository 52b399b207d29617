"""Products whose inputs are summed in a few sections, which programs can divide without a change of bits.

A section's sum begins at 0 and adds its inputs in order, and the sums of all sections are added in order. Sections
depend on the number of inputs alone. A program computes a tile with one more accumulator; if tiles are too few to fill
the device, each section of a tile has a program, and `add_sections` adds their sums. The bits are the same, so the
number of rows may decide.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SECTIONS = 4  # at most; a multiple fills no device better, and each costs a sum of every element
COLUMNS = 128  # of a program that adds sums


def section_of(size: int, unit: int) -> int:
    """Return the inputs of a section, a multiple of `unit`. The last section may have fewer."""
    units = -(-size // unit)
    return unit * -(-units // SECTIONS)


def divides(tiles: int, sections: int, slots: int) -> bool:
    """Return True if a program for each section of each tile is faster, where `slots` programs run at a time.

    That is, if all sections take fewer turns, of a section's time each, than the sections of one tile.
    """
    return tiles * sections <= slots * (sections - 1)


@triton.jit(do_not_specialize=["num_rows"])
def add_sections(
    sums, x_scales, scales, bias, out, sections, num_rows, num_columns, COLUMNS: tl.constexpr
):  # fmt: skip
    """Add the sums of all sections in order, for some columns of one row, and scale them.

    sums: fp32 or int32 [sections, num_rows, num_columns]. x_scales: of rows; scales: of columns. All but sums and out
    may be None.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    held = column < num_columns
    at = row * num_columns + column
    total = tl.zeros([COLUMNS], sums.dtype.element_ty)
    for s in tl.range(0, sections, loop_unroll_factor=4):
        total += tl.load(sums + s * num_rows.to(tl.int64) * num_columns + at, mask=held, other=0)
    result = total.to(tl.float32)
    if x_scales is not None:
        scale = tl.zeros([COLUMNS], tl.float32) + tl.load(x_scales + row)
        result = tl.fma(result, scale, tl.zeros([COLUMNS], tl.float32))
    if scales is not None:
        result *= tl.load(scales + column, mask=held, other=0.0)
    if bias is not None:
        result += tl.load(bias + column, mask=held, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=held)


def launch_add_sections(
    sums: Tensor,  # fp32 or int32 [sections, T, out]
    x_scales: Tensor | None,  # fp32 [T or more]
    scales: Tensor | None,  # fp32 [out]
    bias: Tensor | None,  # [out]
    out: Tensor,  # [T, out]
) -> None:
    """Add the sums of all sections to a product."""
    rows, columns = out.shape
    add_sections[(rows, triton.cdiv(columns, COLUMNS))](
        sums, x_scales, scales, bias, out, len(sums), rows, columns, COLUMNS, num_warps=4, enable_fp_fusion=False
    )


def sums_of(sections: int, out: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return memory for the sums of all sections of a product."""
    return torch.empty(sections, *out.shape, dtype=dtype, device=out.device)
