"""LoRA adapters of linears by the native kernels. A row's bits depend only on the row and its adapter.

Both matrices of an adapter are stored in the linear's dtype, packed. The first product is scaled and rounded to that
dtype; the second product is added to the linear's result in fp32, and the sum is rounded.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from ctypes import addressof, byref

import torch
from torch import Tensor

from quire.errors import BadShape, BadValue
from quire.ops import native
from quire.ops.memory import in_huge_pages
from quire.ops.weights.lora import LoraPart, LoraRows

BLOCK = 4 * 2**20  # bytes allocated for several matrices of an adapter


def check_slots(
    slots: Tensor,  # int32 [T]
    num_slots: int,
) -> None:
    """Raise BadValue for a row with an invalid slot, since the kernels do not check it."""
    if slots.numel() and not -1 <= int(slots.min()) <= int(slots.max()) < num_slots:
        raise BadValue(f"lora_slots are {slots.min()} to {slots.max()}; they must be -1..{num_slots - 1}")


class LoraMemory:
    """Memory of the adapters of one model. All memory of a slot is freed at once."""

    def __init__(self) -> None:
        self._blocks: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._left: dict[int, Tensor] = {}

    def take(self, slot: int, size: int) -> Tensor:
        """Allocate `size` bytes for a slot, aligned to a cache line."""
        size = -(-size // 64) * 64
        left = self._left.get(slot)
        if left is None or size > len(left):
            left = in_huge_pages((max(size, BLOCK),), torch.uint8)
            self._blocks[slot].append(left)
        self._left[slot] = left[size:]
        return left[:size]

    def free(self, slot: int) -> None:
        """Free the memory of a slot."""
        self._blocks.pop(slot, None)
        self._left.pop(slot, None)


class PackedLoraTable:
    """The adapters of one linear, packed for the kernel."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        dtype: torch.dtype,  # of native.DTYPES
        num_slots: int,
        most_rank: int,  # largest sum of the ranks of an adapter's parts, each rounded up to an even number
        memory: LoraMemory,
        library: native.Library,
    ) -> None:
        self.in_size, self.out_size, self.dtype = in_size, out_size, dtype
        self._memory, self._library = memory, library
        self.num_slots = num_slots
        self._slots = (native.LoraSlot * num_slots)()
        self._parts: dict[int, ctypes.Array[native.LoraPart]] = {}  # the slots point to these
        self._most_rank = most_rank

    def put(self, slot: int, parts: Sequence[LoraPart]) -> None:
        """Store the parts of an adapter in a free slot. Raises BadShape for parts that do not fit the linear."""
        for part in parts:
            size, rank = part.b.shape
            if part.a.shape != (rank, self.in_size) or not 0 <= part.first <= part.first + size <= self.out_size:
                raise BadShape(
                    f"an adapter has {tuple(part.a.shape)} and {tuple(part.b.shape)} from column {part.first} on; the "
                    f"linear is [{self.out_size}, {self.in_size}]"
                )
        if not parts:
            return
        own = (native.LoraPart * len(parts))()
        halves, first = [], 0
        for params, part in zip(own, parts, strict=True):
            rank = part.rank + part.rank % 2  # so that each part begins with a pair
            halves.append(torch.nn.functional.pad(part.a, (0, 0, 0, rank - part.rank)))
            b = self._packed(slot, torch.nn.functional.pad(part.b, (0, rank - part.rank)))
            params.b, params.first_rank, params.rank = b.data_ptr(), first, rank
            params.first, params.size, params.scale = part.first, len(part.b), part.scale
            first += rank
        if first > self._most_rank:
            raise BadShape(f"an adapter has rank {first} in all parts together; there is room for {self._most_rank}")
        self._parts[slot] = own
        a = self._packed(slot, torch.cat(halves))
        self._slots[slot] = native.LoraSlot(a.data_ptr(), addressof(own), first, len(parts))

    def clear(self, slot: int) -> None:
        """Free a slot."""
        self._slots[slot] = native.LoraSlot()
        self._parts.pop(slot, None)
        self._memory.free(slot)

    def add(self, x: Tensor, out: Tensor, rows: LoraRows) -> None:
        """Add the product of each row of x with its adapter to the row of `out`. Raises BadShape or BadValue."""
        fits = x.shape == (len(rows.slots), self.in_size) and out.shape == (len(x), self.out_size)
        if not fits or x.dtype is not self.dtype:
            raise BadShape(
                f"x is {x.dtype} {tuple(x.shape)} and out {tuple(out.shape)}; the linear is {self.dtype} "
                f"[{self.out_size}, {self.in_size}]"
            )
        check_slots(rows.slots, self.num_slots)
        params = self.params()
        room = torch.empty(len(x) * self.room)
        params.x, params.x_stride, params.out, params.out_stride = (
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
        )
        params.room = room.data_ptr()
        self._library("lora", byref(params), rows.slots.data_ptr(), len(x), native.DTYPES[self.dtype])

    @property
    def room(self) -> int:
        """Size of the kernel's working memory per row, in fp32 numbers."""
        return int(self._library("lora_room", self.in_size, self._most_rank, native.DTYPES[self.dtype]))

    def params(self) -> native.LoraParams:
        """Return the kernel's description of current and later adapters. The caller fills in the rows and the room."""
        return native.LoraParams(slots=addressof(self._slots), in_size=self.in_size, most_rank=self._most_rank)

    def _packed(self, slot: int, matrix: Tensor) -> Tensor:
        matrix = matrix.to(self.dtype).contiguous()
        number = native.DTYPES[self.dtype]
        packed = self._memory.take(slot, self._library("lora_bytes", *matrix.shape, number))
        self._library("lora_pack", matrix.data_ptr(), *matrix.shape, packed.data_ptr(), number)
        return packed
