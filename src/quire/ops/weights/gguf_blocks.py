"""Exact conversion of a tensor's bytes in a GGUF file to a weight.

A row consists of blocks of 32 or 256 inputs, each with its integers and their scales; the formats are llama.cpp's
(ggml/src/ggml-common.h). Integers, scales, minimums and sub-scales become those of a `QuantisedWeight`, and MXFP4's
codes and exponents those of a `NarrowWeight`: nothing is rounded. If a weight is packed later, its blocks are kept
until then, since one integer per byte would take twice the memory. The native library reads blocks if it is available
(cpu/csrc/blocks.cpp), torch's operators otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape, BadValue, Unsupported
from quire.ops import native
from quire.ops.memory import mapped
from quire.ops.weights.narrow import E2M1, NarrowWeight, powers_of_two
from quire.ops.weights.quantised import ACTIVATION_GROUP, BLOCK, SUB_SIZES, SUPER_BLOCK, QuantisedWeight

MXFP4 = "MXFP4"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class BlockParts:
    """The contents of N blocks, one row per block."""

    values: Tensor  # uint8 [N, inputs]
    scales: Tensor  # fp16 [N, 1]
    minimums: Tensor | None = None  # fp16 [N, 1], added
    sub_scales: Tensor | None = None  # int8 [N, inputs / 16 or inputs / 32]
    sub_minimums: Tensor | None = None  # int8 [N, inputs / 32]


@dataclass(frozen=True)
class Format:
    """The storage format of one kind of blocks."""

    inputs: int
    nbytes: int
    bits: int
    read: Callable[[Tensor], BlockParts]  # takes uint8 [N, nbytes]
    floats: tuple[int, ...] = (0,)  # byte offsets of the scale, and of the minimum if there is one

    def room(self, count: int) -> BlockParts:
        """Allocate the parts of `count` blocks."""
        subs = self.inputs // SUB_SIZES[self.bits] if self.inputs == SUPER_BLOCK else 0

        def sub_scales() -> Tensor:
            return torch.empty(count, subs, dtype=torch.int8)

        return BlockParts(
            mapped((count, self.inputs), torch.uint8),
            torch.empty(count, 1, dtype=torch.float16),
            torch.empty(count, 1, dtype=torch.float16) if len(self.floats) > 1 else None,
            sub_scales() if subs else None,
            sub_scales() if subs and len(self.floats) > 1 else None,
        )


@dataclass(frozen=True, eq=False)  # tensors do not compare as a whole
class BlockWeight:
    """A weight of integers, as rows of blocks of a kind in FORMATS. Validated on construction.

    Raises Unsupported, BadShape, BadDtype or BadValue, naming the field.
    """

    kind: str
    blocks: tuple[Tensor, ...]  # uint8 [rows, bytes of a row] each, on the CPU; their rows are the outputs, in order
    in_size: int
    dtype: torch.dtype  # of x, and of the product
    order: Tensor | None = None  # int64 [in]: input i of the blocks belongs to x[:, order[i]]; None: to x[:, i]

    def __post_init__(self) -> None:
        for blocks in self.blocks:
            _check_blocks(self.kind, blocks, self.in_size)
            form = FORMATS[self.kind]
            each = blocks.view(len(blocks), -1, form.nbytes)
            for at in form.floats:
                unfit = each[:, :, at + 1] & 0x7C == 0x7C  # fp16's largest exponent: infinite or NaN
                if unfit.any():
                    row, block = unfit.nonzero()[0].tolist()
                    found = float(_half(each[row, block : block + 1, at : at + 2]))
                    raise BadValue(f"scales holds {found} at {[row, block]}; all must be finite")

    @property
    def out_size(self) -> int:
        """Number of outputs."""
        return sum(map(len, self.blocks))

    @property
    def is_cpu(self) -> bool:
        """True: blocks are always on the CPU."""
        return True

    @property
    def device(self) -> torch.device:
        """The device of the blocks, the CPU."""
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Size of the blocks in bytes."""
        return sum(blocks.nbytes for blocks in self.blocks)

    @property
    def addresses(self) -> Tensor:
        """Address of each row: int64 [out]."""
        each = ((blocks.data_ptr(), torch.arange(len(blocks)) * blocks.stride(0)) for blocks in self.blocks)
        return torch.cat([offsets + start for start, offsets in each])

    def rows(
        self,
        index: Tensor,  # int64 [N]
    ) -> QuantisedWeight:
        """Return these outputs, in this order, with one integer per byte."""
        starts = torch.tensor([len(blocks) for blocks in self.blocks]).cumsum(0)
        if len(self.blocks) == 1:
            return _quantised(self, self.blocks[0][index])
        part = torch.bucketize(index, starts, right=True)
        chosen = torch.empty(len(index), self.blocks[0].shape[1], dtype=torch.uint8)
        for i, blocks in enumerate(self.blocks):
            chosen[part == i] = blocks[index[part == i] - (starts[i] - len(blocks))]
        return _quantised(self, chosen)

    def whole(self) -> QuantisedWeight:
        """Return all outputs, with one integer per byte."""
        return _quantised(self, self.blocks[0] if len(self.blocks) == 1 else torch.cat(self.blocks))

    def dequantised(self) -> Tensor:
        """Return the weight as fp32 [out, in]. Each element is its exact value, rounded once."""
        return self.whole().dequantised()

    def to(self, device: str) -> BlockWeight | QuantisedWeight:
        """Return the weight on another device: as blocks on the CPU, otherwise as a QuantisedWeight."""
        return self if device == "cpu" else self.whole().to(device)

    def with_outputs(self, others: Sequence[BlockWeight]) -> BlockWeight:
        """Append the outputs of other weights of the same kind, sizes and order."""
        return replace(self, blocks=sum((other.blocks for other in others), self.blocks))


def weight_of(
    kind: str,  # name of its type in GGUF, for example "Q4_K"
    blocks: Tensor,  # uint8 [out, bytes of a row]
    in_size: int,
    dtype: torch.dtype,  # of x, and of a weight that is not quantised
) -> Tensor | BlockWeight | NarrowWeight:
    """Return the weight [out, in], on the CPU.

    Raises Unsupported for a kind that is not served, BadShape if rows have another number of bytes, and the errors of
    BlockWeight and NarrowWeight.
    """
    if kind in FORMATS:
        return BlockWeight(kind, (blocks,), in_size, dtype)
    _check_blocks(kind, blocks, in_size)
    if kind in FLOATS:
        return _numbers(blocks, FLOATS[kind]).to(dtype)
    return _mxfp4(blocks, in_size, dtype)


def _check_blocks(kind: str, blocks: Tensor, in_size: int) -> None:
    if blocks.dtype is not torch.uint8:
        raise BadDtype(f"blocks is {blocks.dtype}; expected torch.uint8")
    expected = row_bytes(kind, in_size)
    if blocks.dim() != 2 or blocks.shape[1] != expected or blocks.numel() == 0:
        raise BadShape(
            f"blocks has shape {tuple(blocks.shape)}; {in_size} inputs of {kind} are [out, {expected}] bytes"
        )
    if blocks.stride(1) != 1:
        raise BadShape(f"blocks has strides {blocks.stride()}; the bytes of a row must be next to each other")


def _quantised(
    weight: BlockWeight,
    blocks: Tensor,  # uint8 [N, bytes of a row]
) -> QuantisedWeight:
    """Convert rows of blocks of the weight."""
    form = FORMATS[weight.kind]
    parts = (_read_by_torch if native.unavailable() else _read_natively)(weight.kind, blocks)

    def by_row(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.view(len(blocks), -1)

    return QuantisedWeight(
        parts.values.view(len(blocks), weight.in_size),
        parts.scales.view(len(blocks), -1),
        None,
        form.bits,
        form.inputs,
        weight.dtype,
        order=weight.order,
        activation_group=BLOCK if form.inputs == BLOCK else ACTIVATION_GROUP,
        minimums=by_row(parts.minimums),
        sub_scales=by_row(parts.sub_scales),
        sub_minimums=by_row(parts.sub_minimums),
    )


def _read_natively(kind: str, blocks: Tensor) -> BlockParts:
    form, library = FORMATS[kind], native.default()
    count = blocks.shape[1] // form.nbytes  # of a row
    parts = form.room(len(blocks) * count)
    places = (None if part is None else part.data_ptr() for part in vars(parts).values())
    number, in_size = list(FORMATS).index(kind), count * form.inputs
    library.read_blocks(
        library.parallel_for, number, blocks.data_ptr(), blocks.stride(0), len(blocks), in_size, *places
    )
    return parts


def _read_by_torch(kind: str, blocks: Tensor) -> BlockParts:
    return FORMATS[kind].read(blocks.reshape(-1, FORMATS[kind].nbytes))


def row_bytes(kind: str, in_size: int) -> int:
    """Return the bytes of a row. Raises Unsupported for a kind that is not served, BadShape for an incomplete block."""
    if kind not in SIZES:
        raise Unsupported(f"weights of the type {kind} are not served; {', '.join(SIZES)} are")
    inputs, nbytes = SIZES[kind]
    if in_size % inputs:
        raise BadShape(f"{kind} has blocks of {inputs} inputs, which do not divide {in_size}")
    return in_size // inputs * nbytes


def _mxfp4(blocks: Tensor, in_size: int, dtype: torch.dtype) -> NarrowWeight:
    """Convert blocks of an exponent and 32 numbers of 4 bits."""
    each = blocks.reshape(len(blocks), -1, SIZES[MXFP4][1])
    return NarrowWeight(_halves(each[..., 1:]).view(-1, in_size), powers_of_two(each[..., 0]), E2M1, dtype)


def _numbers(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret a copy of bytes [rows, n] as numbers of a dtype."""
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)


def _half(stored: Tensor) -> Tensor:
    """Reinterpret two bytes as an fp16 number: [N, 2] to [N, 1]."""
    return _numbers(stored, torch.float16)


def _halves(stored: Tensor) -> Tensor:
    """Return the lower four bits of all bytes of a row, then the upper ones: [..., n] to [..., 2 n]."""
    return torch.cat([stored & 15, stored >> 4], -1)


def _bits_of(stored: Tensor) -> Tensor:
    """Return 32 bits, from the lowest one up: [N, 4] to [N, 32]."""
    return (stored[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _q8_0(blocks: Tensor) -> BlockParts:
    return BlockParts(blocks[:, 2:] ^ 128, _half(blocks[:, :2]))


def _q4_0(blocks: Tensor) -> BlockParts:
    return BlockParts(_halves(blocks[:, 2:]), _half(blocks[:, :2]))


def _q4_1(blocks: Tensor) -> BlockParts:
    return BlockParts(_halves(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q5_0(blocks: Tensor) -> BlockParts:
    return BlockParts(_halves(blocks[:, 6:]) | _bits_of(blocks[:, 2:6]) << 4, _half(blocks[:, :2]))


def _q5_1(blocks: Tensor) -> BlockParts:
    return BlockParts(
        _halves(blocks[:, 8:]) | _bits_of(blocks[:, 4:8]) << 4, _half(blocks[:, :2]), _half(blocks[:, 2:4])
    )


def _q4_k(blocks: Tensor) -> BlockParts:
    # Each 32 bytes have 64 inputs.
    values = _halves(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return BlockParts(values, _half(blocks[:, :2]), -_half(blocks[:, 2:4]), *_sub_scales(blocks[:, 4:16]))


def _q5_k(blocks: Tensor) -> BlockParts:
    # Bit i of byte k is the highest one of input 32 i + k.
    values = _halves(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1)
    highest = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return BlockParts(
        values | highest.flatten(1) << 4, _half(blocks[:, :2]), -_half(blocks[:, 2:4]), *_sub_scales(blocks[:, 4:16])
    )


def _sub_scales(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minimums of 6 bits: [N, 12] to int8 [N, 8] each.

    The first four of each have a byte. The last four have four bits in the third word, and the two unused bits of those
    bytes.
    """
    scales, minimums, low = stored[:, :4], stored[:, 4:8], stored[:, 8:]
    made = (
        torch.cat([scales & 63, low & 15 | scales >> 6 << 4], 1),
        torch.cat([minimums & 63, low >> 4 | minimums >> 6 << 4], 1),
    )
    return made[0].view(torch.int8), made[1].view(torch.int8)


def _q6_k(blocks: Tensor) -> BlockParts:
    # Each 128 inputs have 64 bytes of lower bits, with 64 inputs in the lower halves, and 32 bytes of upper bits.
    low = _halves(blocks[:, :128].reshape(-1, 2, 64))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).flatten(2)
    sub_scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return BlockParts((low | high << 4).flatten(1), _half(blocks[:, 208:210]), sub_scales=sub_scales)


FORMATS = {  # in the order of cpu/csrc/blocks.cpp
    "Q8_0": Format(BLOCK, 34, 8, _q8_0),
    "Q4_0": Format(BLOCK, 18, 4, _q4_0),
    "Q4_1": Format(BLOCK, 20, 4, _q4_1, (0, 2)),
    "Q5_0": Format(BLOCK, 22, 5, _q5_0),
    "Q5_1": Format(BLOCK, 24, 5, _q5_1, (0, 2)),
    "Q4_K": Format(SUPER_BLOCK, 144, 4, _q4_k, (0, 2)),
    "Q5_K": Format(SUPER_BLOCK, 176, 5, _q5_k, (0, 2)),
    "Q6_K": Format(SUPER_BLOCK, 210, 6, _q6_k, (208,)),
}
SIZES = {kind: (1, dtype.itemsize) for kind, dtype in FLOATS.items()}  # inputs and bytes of a block
SIZES |= {kind: (form.inputs, form.nbytes) for kind, form in FORMATS.items()} | {MXFP4: (E2M1.group_size, 17)}
