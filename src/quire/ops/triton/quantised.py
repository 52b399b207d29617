"""Products with weights of integers, with the bits that `quire.ops.weights.quantised` defines.

One kernel rounds rows of x to integers, another multiplies them. All rounding follows the order of the definition, and
sums of integers are exact, so the results do not depend on the shape of a tile or on the other rows.

A weight is packed once, see `packed`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.errors import BadShape
from quire.ops.checks.tensors import check_tensor
from quire.ops.triton.functions import int8_scale, to_int8
from quire.ops.triton.launch import FLOATS, on_device_of
from quire.ops.triton.packed import BLOCK, RUN, PackedWeight, has_sums, is_apart, is_whole, padded_size, part_size
from quire.ops.triton.sections import divides, launch_add_sections, section_of, sums_of
from quire.ops.triton.tiles import processors_of
from quire.ops.weights.linear import Embedding, Linear, Linears, LinearWeight
from quire.ops.weights.quantised import ACTIVATION_GROUP, PARTS, QuantisedEmbedding, QuantisedLinear, QuantisedWeight


@dataclass(frozen=True)
class IntegerTile:
    """Rows and outputs that a program computes, the parts of an iteration of its loop, and its warps."""

    rows: int
    outputs: int
    parts: int  # of inputs per iteration; at least those of a segment
    underway: int  # inputs that the pipeline loads while others are multiplied
    ahead: int  # prefetch distance of scales into the L2 cache in inputs, a multiple of an iteration's; 0: no prefetch
    warps: int


# For weights with few outputs, whose programs need many bytes in flight.
FEW_ROWS = IntegerTile(16, 32, 8, 1536, 2048, 4)
SOME_ROWS = IntegerTile(64, 32, 4, 768, 1024, 4)  # not on AMD's GPUs, whose compiler needs too many registers
# For weights with many outputs, where several programs run on a processor.
FEW_OF_WIDE = IntegerTile(16, 32, 4, 512, 1024, 2)
SOME_OF_WIDE = IntegerTile(32, 64, 4, 768, 1024, 4)
MANY_ROWS = IntegerTile(64, 128, 2, 256, 0, 8)

WIDE = 64  # outputs per processor of the device; measured with 31 and 217, on an H200

log = logging.getLogger("quire")

ON_AMD = torch.version.hip is not None

PROBED_OUTPUTS, PROBED_ROWS = 48, (3, 20, 64, 130)  # of a weight, when its kind is first loaded; rows for each tile

ROUNDED = 1024  # inputs of a row that a program rounds, if groups have separate scales
ROUNDED_WHOLE = 4096  # inputs that a program rounds at a time, if a row has one scale

# Whether inputs are summed in sections, which programs divide if outputs are few. Not timed on a GPU yet, see
# docs/gpu.md. The bits are then those of `QuantisedLinear.section`, for every number of rows.
DIVIDES = False
WARPS = 12  # of these products that run on one processor at a time

SHARING = tl.constexpr(16)  # tiles of rows that share the weights in the L2 cache


# -------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def round_part(
    x, order, values, scales, sums, room, size, padded, x_row, x_column,
    GROUP: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Round a tile of one row to integers. Store them, the scale of each GROUP, and the sum of each PART.

    WHOLE: the row is one group, and the program rounds all of it, tile by tile. APART: each part is stored twice, first
    with its upper half set to 0, then with its lower one.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    values += row * (2 * padded if APART else padded)
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
        if APART:
            is_upper = at % PART >= PART // 2
            of_part = at + at // PART * PART
            tl.store(values + of_part, tl.where(is_upper, 0, value), mask=at < padded)
            tl.store(values + of_part + PART, tl.where(is_upper, value, 0), mask=at < padded)
        else:
            tl.store(values + at, value, mask=at < padded)
        if not WHOLE:
            begins = first + tl.arange(0, TILE // GROUP) * GROUP
            tl.store(scales + (begins // GROUP).to(tl.int64) * room + row, scale, mask=begins < padded)
        elif first == 0:
            tl.store(scales + row + tl.arange(0, 1), scale)
        if sums is not None:
            part = first // PART + tl.arange(0, TILE // PART)
            total = tl.sum(tl.reshape(value.to(tl.int32), [TILE // PART, PART]), 1)
            tl.store(sums + part.to(tl.int64) * room + row, total, mask=part * PART < padded)


@triton.jit
def _read(x, order, first, size, x_column, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Load numbers of a row, in the order of the weight's inputs: fp32 [TILE / GROUP, GROUP]."""
    at = first + tl.reshape(tl.arange(0, TILE), [TILE // GROUP, GROUP])
    source = at.to(tl.int64)
    if order is not None:
        source = tl.load(order + at, mask=at < size, other=0)
    return tl.load(x + source * x_column, mask=at < size, other=0.0).to(tl.float32)


@triton.jit
def _largest(numbers):
    """Return the largest magnitude of each group, infinite if one number is not finite."""
    magnitude = tl.abs(numbers)
    return tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), 1)


@triton.jit
def _fetch(pointers):
    """Prefetch into the L2 cache.

    The pipeline only loads the operands of dot products. Without this, a program would wait for scales from memory in
    each iteration of its loop.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _fetch_first(part, output, has_output, num_outputs, begin, columns, COUNT: tl.constexpr):
    """Prefetch some outputs of COUNT columns of scales from `begin` on, or of all if there are fewer."""
    column = begin + tl.arange(0, COUNT)[:, None]
    pointers = part + column * num_outputs + output[None, :]
    _fetch(tl.where((column < columns) & has_output[None, :], pointers, part))


@triton.jit
def _load(pointers, ahead, has_output, near, AHEAD: tl.constexpr):
    """Load scales of the outputs, or other parts. Those at a distance of `ahead` are prefetched, unless AHEAD is 0."""
    if AHEAD > 0:
        _fetch(tl.where(has_output & near, pointers + ahead, pointers))
    return tl.load(pointers, mask=has_output, other=0)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_tile(
    values, scales, zeros, minimums, sub_scales, sub_minimums, bias, x, x_scales, x_sums, out, sums,
    num_rows, room, num_outputs, padded, section,
    PACKED: tl.constexpr, ZERO: tl.constexpr, SEGMENT: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr,
    SUB: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute one tile of x @ weight.T + bias.

    ZERO: subtracted if there are no zeros, from the value of packed numbers, otherwise from the stored number. SEGMENT:
    inputs of one integer sum; 0: all. GROUP, X_GROUP: inputs that share a scale; 0: all.
    section: inputs of a section, see `sections`; None: all. sums: fp32 [sections, num_rows, num_outputs], int32 if all
    inputs have one integer sum, where the sums of sections are stored, each by a program of the grid's second
    dimension; None: one program has all sections.
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
    block = output // BLOCK * (padded // (2 if PACKED else 1) * BLOCK) + output % BLOCK * PART
    value_tile = values + block[:, None] + k[None, :]
    x_tile = x + row[None, :] * (2 * padded if SUB == 16 else padded) + k[:, None]
    begin, end = 0, padded
    if sums is not None:
        begin = tl.program_id(1) * section
        end = tl.minimum(begin + section, padded)
    if AHEAD > 0 and GROUP > 0:
        _fetch_first(scales, output, has_output, num_outputs, begin // GROUP, end // GROUP, AHEAD // GROUP)
        if zeros is not None:
            _fetch_first(zeros, output, has_output, num_outputs, begin // GROUP, end // GROUP, AHEAD // GROUP)
        if minimums is not None:
            _fetch_first(minimums, output, has_output, num_outputs, begin // GROUP, end // GROUP, AHEAD // GROUP)
        if sub_scales is not None:
            _fetch_first(sub_scales, output, has_output, num_outputs, begin // SUB, end // SUB, AHEAD // SUB)
        if sub_minimums is not None:
            _fetch_first(sub_minimums, output, has_output, num_outputs, begin // SUB, end // SUB, AHEAD // SUB)
    result = tl.zeros([OUTPUTS, ROWS], tl.float32)
    whole = tl.zeros([OUTPUTS, ROWS], tl.float32)  # of the sections before
    total = tl.zeros([OUTPUTS, ROWS], tl.int32)
    low = tl.zeros([OUTPUTS, ROWS], tl.int32)
    where = row[None, :] * num_outputs + output[:, None]
    held = has_row[None, :] & has_output[:, None]
    for first in tl.range(begin, end, STEP):
        for i in tl.static_range(STEP // PART):
            at = (first + i * PART).to(tl.int64)
            if SEGMENT > 0 and i * PART % SEGMENT == 0:
                total = tl.zeros([OUTPUTS, ROWS], tl.int32)
                low = tl.zeros([OUTPUTS, ROWS], tl.int32)
            near = first + AHEAD < end  # the prefetched inputs are multiplied
            of_group = (at // GROUP * num_outputs if GROUP > 0 else 0) + output
            group_ahead = AHEAD // GROUP * num_outputs if GROUP > 0 else 0

            if not PACKED:
                a = tl.load(value_tile + at * BLOCK, mask=has_output[:, None], other=0)
            elif i % 2 == 0:
                both = tl.load(value_tile + at // 2 * BLOCK, mask=has_output[:, None], other=0)
                a = both & 15
            else:
                a = both & -16  # from the bytes of the previous part
            x_sum = tl.zeros([ROWS], tl.int32)
            if x_sums is not None:
                x_sum = tl.load(x_sums + at // PART * room + row)
            lacking = tl.zeros([OUTPUTS], tl.int32) + ((8 if PACKED and i % 2 == 1 else 0) - ZERO)
            if zeros is not None:
                lacking -= _load(zeros + of_group, group_ahead, has_output, near, AHEAD if GROUP > 0 else 0)
            offset = lacking[:, None] * x_sum[None, :]
            if SUB == 16:  # the part has two sub-groups, and x is stored with each of them set to 0
                for half in tl.static_range(2):
                    b = tl.load(x_tile + at * 2 + half * PART, mask=has_row[None, :], other=0)
                    of_sub = sub_scales + (at // 16 + half) * num_outputs + output
                    sub = _load(of_sub, AHEAD // 16 * num_outputs, has_output, near, AHEAD)
                    total += tl.dot(a, b, out_dtype=tl.int32) * sub.to(tl.int32)[:, None]
            else:
                b = tl.load(x_tile + at, mask=has_row[None, :], other=0)
                if PACKED and i % 2 == 1:
                    product = tl.dot(a, b, offset << 4, out_dtype=tl.int32) >> 4
                else:
                    product = tl.dot(a, b, offset, out_dtype=tl.int32)
                if SUB == 32:
                    of_sub = at // 32 * num_outputs + output
                    sub = _load(sub_scales + of_sub, AHEAD // 32 * num_outputs, has_output, near, AHEAD)
                    product *= sub.to(tl.int32)[:, None]
                total += product
            if sub_minimums is not None:
                of_sub = at // 32 * num_outputs + output
                sub = _load(sub_minimums + of_sub, AHEAD // 32 * num_outputs, has_output, near, AHEAD)
                low += sub.to(tl.int32)[:, None] * x_sum[None, :]
            elif minimums is not None:
                low += x_sum[None, :]

            if SEGMENT > 0 and (i + 1) * PART % SEGMENT == 0:
                x_scale = tl.load(x_scales + at // X_GROUP * room + row)
                if GROUP > 0:
                    scale = _load(scales + of_group, group_ahead, has_output, near, AHEAD).to(tl.float32)
                else:
                    scale = tl.full([OUTPUTS], 1.0, tl.float32)
                result = tl.fma(total.to(tl.float32), scale[:, None] * x_scale[None, :], result)
                if minimums is not None:
                    minimum = _load(minimums + of_group, group_ahead, has_output, near, AHEAD).to(tl.float32)
                    result = tl.fma(low.to(tl.float32), minimum[:, None] * x_scale[None, :], result)
        if section is not None and sums is None:  # noqa: SIM102 - decided when it is compiled
            if (first + STEP) % section == 0:
                whole += result
                result = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if sums is not None:
        sums += tl.program_id(1).to(tl.int64) * num_rows * num_outputs + where
        tl.store(sums, total if SEGMENT == 0 else result, mask=held)
    else:
        if section is not None:
            result += whole
        if SEGMENT == 0:
            x_scale = tl.load(x_scales + row)
            result = tl.fma(total.to(tl.float32), tl.broadcast_to(x_scale[None, :], [OUTPUTS, ROWS]), result)
        if GROUP == 0:
            result *= tl.load(scales + output, mask=has_output, other=0.0)[:, None]
        if bias is not None:
            result += tl.load(bias + output, mask=has_output, other=0.0)[:, None]
        tl.store(out + where, result.to(out.dtype.element_ty), mask=held)


# ------------------------------------------------------------------------------------------------- the products


@dataclass(frozen=True)
class RoundedRows:
    """Rows of x as integers. Scales and sums of neighbouring rows are contiguous, with room for whole tiles of them."""

    values: Tensor  # int8 [T, padded]; [T, 2 * padded] if a part has two sub-scales: halves of parts are separate
    scales: Tensor  # fp32 [groups, room]
    sums: Tensor | None  # int32 [parts, room]: of the integers of each part; None: not needed


def rounded_rows(
    x: Tensor,  # [T, in], on the weight's device
    kind: QuantisedWeight,
    tile: int,  # rows
) -> RoundedRows:
    """Round rows for the product with a kind of weight: the integers of `quire.ops.weights.quantised`."""
    (rows, size), padded = x.shape, padded_size(kind)
    room = triton.cdiv(rows, tile) * tile
    made = RoundedRows(
        torch.empty(rows, padded * (2 if is_apart(kind) else 1), dtype=torch.int8, device=x.device),
        torch.empty(
            1 if is_whole(kind) else padded // kind.activation_group, room, dtype=torch.float32, device=x.device
        ),
        torch.empty(padded // part_size(kind), room, dtype=torch.int32, device=x.device) if has_sums(kind) else None,
    )
    programs = 1 if is_whole(kind) else triton.cdiv(padded, ROUNDED)
    with on_device_of(x):
        round_part[(rows, programs)](
            x, kind.order, made.values, made.scales, made.sums, room, size, padded, *x.stride(),
            **rounding_constants(kind), **rounding_options(kind),
        )  # fmt: skip
    return made


def rounding_constants(kind: QuantisedWeight) -> dict[str, int | bool]:
    """Return the compile-time constants of the kernel that rounds."""
    whole = is_whole(kind)
    tile = ROUNDED_WHOLE if whole else ROUNDED
    group = tile if whole else kind.activation_group
    return {"GROUP": group, "PART": part_size(kind), "TILE": tile, "WHOLE": whole, "APART": is_apart(kind)}


def rounding_options(kind: QuantisedWeight) -> dict[str, int | bool]:
    """Return its compiler options. Rounding to an integer takes two operations, which must not be fused with others."""
    return {"num_warps": 8 if is_whole(kind) else 4, "enable_fp_fusion": False}


def integer_linear(
    x: Tensor,  # [T, in], of the weight's dtype
    weight: PackedWeight,
    bias: Tensor | None,  # fp32 [out]
    out_dtype: torch.dtype,
    tile: IntegerTile,
    section: int = 0,
    divided: bool = False,
) -> Tensor:
    """Compute x @ weight.T + bias in tiles of one shape, which does not affect the result: [T, out].

    section: the inputs of a section, as of `section_of_kind`; 0: all. divided: each section of a tile has a program,
    which does not affect the result either.

    Raises BadShape, BadDtype or BadValue.
    """
    if x.dim() != 2:
        raise BadShape(f"x has shape {tuple(x.shape)}; expected [T, in]")
    kind, rows = weight.kind, len(x)
    check_tensor("x", x, (rows, weight.in_size), weight.dtype, weight.device, any_strides=True)
    out = torch.empty(rows, weight.out_size, dtype=out_dtype, device=x.device)
    if rows:
        rounded = rounded_rows(x, kind, tile.rows)
        padded, whole = padded_size(kind), is_whole(kind)
        count = sections_of(kind, section) if divided else 1
        room = triton.cdiv(rows, tile.rows) * tile.rows
        sums = sums_of(count, out, torch.int32 if whole else torch.float32) if count > 1 else None
        with on_device_of(x):
            multiply_tile[(tiles_in(rows, weight.out_size, tile), count)](
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
                sums,
                rows,
                room,
                weight.out_size,
                padded,
                None if sums is None and (whole or not section) else section,
                **constants(kind, tile),
                AHEAD=tile.ahead if x.is_cuda and not ON_AMD else 0,
                **options(kind, tile, ON_AMD),
            )
            if sums is not None:
                launch_add_sections(
                    sums, rounded.scales if whole else None, weight.scales if kind.by_output else None, bias, out
                )
    return out


def constants(kind: QuantisedWeight, tile: IntegerTile) -> dict[str, int | bool]:
    """Return the compile-time constants of the kernel that multiplies."""
    packed, whole, segment = kind.bits == 4, is_whole(kind), segment_of(kind)
    return {
        "PACKED": packed,
        "ZERO": kind.zero if packed and kind.zeros is None else 0,
        "SEGMENT": segment,
        "GROUP": 0 if kind.by_output else kind.group_size,
        "X_GROUP": 0 if whole else kind.activation_group,
        "SUB": kind.sub_size,
        "PART": part_size(kind),
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "STEP": step_of(kind, tile),
    }


def options(kind: QuantisedWeight, tile: IntegerTile, on_amd: bool) -> dict[str, int | bool]:
    """Return its compiler options. The definition specifies every rounding, so no operations are fused."""
    # More stages do not fit the registers and the shared memory of AMD's GPUs.
    stages = 2 if on_amd else 1 + max(1, tile.underway // step_of(kind, tile))
    return {"num_warps": tile.warps, "num_stages": stages, "enable_fp_fusion": False}


def tiles_in(rows: int, outputs: int, tile: IntegerTile) -> int:
    """Return the number of tiles of a product."""
    return -(-rows // tile.rows) * -(-outputs // tile.outputs)


def section_of_kind(kind: QuantisedWeight) -> int:
    """Return the inputs of a section, whole steps of every tile; 0: all.

    AMD's GPUs have no tile for it.
    """
    return section_of(padded_size(kind), RUN) if DIVIDES and not ON_AMD else 0


def sections_of(kind: QuantisedWeight, section: int) -> int:
    """Return the number of sections."""
    return -(-padded_size(kind) // section) if section else 1


def segment_of(kind: QuantisedWeight) -> int:
    """Return the inputs of one integer sum in stored rows; 0: all."""
    return 0 if is_whole(kind) else ACTIVATION_GROUP if kind.by_output else kind.segment


def step_of(kind: QuantisedWeight, tile: IntegerTile) -> int:
    """Return the inputs of an iteration of the kernel's loop: whole segments."""
    return max(segment_of(kind), tile.parts * part_size(kind))


def tiles_of(weight: PackedWeight | QuantisedWeight) -> tuple[IntegerTile, ...]:
    """Return the tiles for a weight on its device, in order of rows. A row has the same bits with each of them."""
    if ON_AMD:
        return FEW_ROWS, MANY_ROWS
    if weight.out_size < WIDE * processors_of(str(weight.device)):
        return FEW_ROWS, SOME_ROWS, MANY_ROWS
    return FEW_OF_WIDE, SOME_OF_WIDE, SOME_ROWS, MANY_ROWS


@dataclass(frozen=True)
class IntegerLinear:
    """The product with a quantised weight."""

    weight: PackedWeight
    bias: Tensor | None  # fp32 [out]
    out_dtype: torch.dtype
    tiles: tuple[IntegerTile, ...]  # in order of rows
    section: int = 0  # inputs of a section, see `section_of_kind`

    def __call__(
        self,
        x: Tensor,  # [T, in], of the weight's dtype
    ) -> Tensor:
        """Return the projection: [T, out]."""
        tile, weight, divided = tile_of(self.tiles, len(x)), self.weight, False
        if self.section:
            slots = WARPS // tile.warps * processors_of(str(weight.device))
            tiles = tiles_in(len(x), weight.out_size, tile)
            divided = divides(tiles, sections_of(weight.kind, self.section), slots)
        return integer_linear(x, weight, self.bias, self.out_dtype, tile, self.section, divided)


def tile_of(tiles: tuple[IntegerTile, ...], rows: int) -> IntegerTile:
    """Return the tile for that many rows, of those of a weight."""
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])


class IntegerLinears(Linears):
    """Quire's products with quantised weights of the dtypes that its kernels serve, and torch's for all others.

    The bits of the products are defined, so each kind of weight is compared with torch's operators when its first
    weight is loaded. If the compiled kernel is wrong, torch's operators are used and a warning is logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self._right: dict[tuple[object, ...], bool] = {}

    def _own(self, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype) -> Linear | None:
        return self._of(PackedWeight.of(weight), bias, out_dtype) if self._serves(weight) else None

    def embedding(
        self,
        weight: LinearWeight,  # [V, H]
    ) -> Embedding:
        """Return the embedding of a weight that is not used in a product. A quantised one stays packed."""
        return QuantisedEmbedding(PackedWeight.of(weight)) if self._serves(weight) else super().embedding(weight)

    def tied(
        self,
        weight: LinearWeight,  # [V, H]
    ) -> tuple[Embedding, Linear]:
        """Return the embedding and the linear that computes logits, which share one packed weight."""
        if not self._serves(weight):
            return super().tied(weight)
        packed = PackedWeight.of(weight)
        return QuantisedEmbedding(packed), self._of(packed, None, torch.float32)

    def _of(self, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype) -> IntegerLinear:
        if bias is not None:
            check_tensor("bias", bias, (weight.out_size,), bias.dtype, weight.device, any_strides=True)
            bias = bias.float().contiguous()
        return IntegerLinear(weight, bias, out_dtype, tiles_of(weight), section_of_kind(weight.kind))

    def _serves(self, weight: LinearWeight) -> TypeGuard[QuantisedWeight]:
        if not isinstance(weight, QuantisedWeight) or weight.dtype not in FLOATS:
            return False
        parts = (getattr(weight, part) for part in PARTS[1:])
        kind = (weight.bits, weight.by_output or weight.group_size, weight.activation_group, weight.dtype)
        key = (*kind, tiles_of(weight), weight.order is None, *(part if part is None else part.dtype for part in parts))
        if key not in self._right:
            self._right[key] = is_right(weight)
            if not self._right[key]:
                log.warning(
                    "the kernel of %d-bit weights gives wrong sums here; torch's slow operators serve them", weight.bits
                )
        return self._right[key]


def is_right(weight: QuantisedWeight) -> bool:
    """Return True if every tile gives the results of torch's operators for the first outputs of a weight.

    With sections, also if each of them has a program.
    """
    some = weight.rows(torch.arange(min(PROBED_OUTPUTS, weight.out_size), device=weight.device))
    packed, tiles = PackedWeight.of(some), tiles_of(weight)
    section = section_of_kind(packed.kind)
    theirs = QuantisedLinear(some, None, torch.float32, 0 if is_whole(some) else section)
    x = torch.randn(max(PROBED_ROWS), weight.in_size, device=weight.device).to(weight.dtype)
    for rows in PROBED_ROWS:
        want = theirs(x[:rows])
        for divided in (False, True) if section else (False,):
            got = integer_linear(x[:rows], packed, None, torch.float32, tile_of(tiles, rows), section, divided)
            if not bool(((got == want) | (got.isnan() & want.isnan())).all()):
                return False
    return True
