"""Tables of adapters against float64, and the bits of a row whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import BadShape, BadValue
from quire.ops import native
from quire.ops.cpu.lora import LoraMemory, PackedLoraTable
from quire.ops.weights.linear import Linears
from quire.ops.weights.lora import LoraPart, LoraRows, LoraTable
from tests.ops.conftest import DEVICES

SLOTS = 5
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# in, then of each part its outputs and the rank of each adapter's; 0: the adapter has no such part.
SHAPES = [
    (1, [(1, [1, 0, 3])]),
    (17, [(33, [1, 7, 16])]),
    (64, [(48, [8, 8, 8]), (16, [8, 0, 2]), (16, [8, 5, 0])]),
    (130, [(95, [33, 1, 64]), (7, [3, 64, 0])]),
    (576, [(192, [16, 16, 4])]),
]
Make = Callable[[int, int, torch.dtype, int], LoraTable]


def packed(isa: str) -> Make:
    def make(in_size: int, out_size: int, dtype: torch.dtype, most_rank: int) -> LoraTable:
        return PackedLoraTable(in_size, out_size, dtype, SLOTS, most_rank, LoraMemory(), native.load(isa))

    return make


def plain(in_size: int, out_size: int, dtype: torch.dtype, most_rank: int) -> LoraTable:
    return Linears().lora(in_size, out_size, dtype, SLOTS, most_rank)


def tiled(in_size: int, out_size: int, dtype: torch.dtype, most_rank: int) -> LoraTable:
    """By the Triton backend's own products, on a GPU or in the interpreter."""
    from quire.ops.triton.linear import TiledLinears

    return TiledLinears().lora(in_size, out_size, dtype, SLOTS, most_rank)


OWN: dict[str, Make] = {}  # tables of our own kernels
if native.unavailable() is None:
    OWN = {isa: packed(isa) for isa in native.runnable(native.library_path())}
MAKES = {"plain": plain, **OWN}
if ops.unavailable("triton", DEVICES[-1]) is None:
    MAKES["tiled"] = tiled


def adapters(in_size: int, parts: list[tuple[int, list[int]]], dtype: torch.dtype) -> list[list[LoraPart]]:
    """Three, of random numbers."""
    found = []
    for i in range(3):
        own, first = [], 0
        for size, ranks in parts:
            if rank := ranks[i]:
                a, b = torch.randn(rank, in_size) / in_size**0.5, torch.randn(size, rank) / rank**0.5
                own.append(LoraPart(a.to(dtype), b.to(dtype), 0.25 * (i + 3), first))
            first += size
        found.append(own)
    return found


def expected(x: Tensor, out: Tensor, slots: Tensor, by_slot: dict[int, list[LoraPart]]) -> Tensor:
    """In float64."""
    x, found = x.cpu(), out.cpu().double()
    for row, slot in enumerate(slots.tolist()):
        for part in by_slot.get(slot, ()):
            added = part.scale * (x[row].double() @ part.a.double().T) @ part.b.double().T
            found[row, part.first : part.first + len(part.b)] += added
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.triton(cases=0)] * (name == "tiled")) for name in MAKES]
)
def test_rows_get_their_own_adapters(name: str) -> None:
    """All shapes, dtypes and mixtures; rows of none keep their bits, and NaN stays in its row."""
    torch.manual_seed(0)
    device = DEVICES[-1] if name == "tiled" else "cpu"
    shapes, counts = SHAPES, (1, 13, 40) if name in OWN else (1, 13)
    if name == "tiled" and device == "cpu":  # in the interpreter
        shapes, counts = SHAPES[1:3], (13,)
    for dtype, (in_size, parts), count in product(TOLERANCE, shapes, counts):
        out_size = sum(size for size, _ in parts)
        table = MAKES[name](in_size, out_size, dtype, sum(max(r + r % 2 for r in ranks) for _, ranks in parts))
        own = adapters(in_size, parts, dtype)
        by_slot = {4: own[0], 0: own[1], 2: own[2]}
        for slot, each in by_slot.items():
            table.put(slot, [replace(part, a=part.a.to(device), b=part.b.to(device)) for part in each])
        wide = torch.randn(count, in_size + 3).to(device, dtype)
        x, out = wide[:, 2:-1], torch.randn(count, out_size).to(device, dtype)
        slots = torch.randint(-1, SLOTS, (count,), dtype=torch.int32)
        slots[0] = 4
        before, truth = out.clone(), expected(x, out, slots, by_slot)
        if count > 1:
            slots[1] = 2
            x[1] = float("nan")
        table.add(x, out, LoraRows(slots))
        rows = [i for i in range(count) if i != 1]
        error = (out[rows].cpu().double() - truth[rows]).abs().max() / truth[rows].abs().max()
        assert error < TOLERANCE[dtype], (dtype, in_size, parts, count)
        untouched = [i for i in rows if int(slots[i]) not in by_slot]
        assert torch.equal(out[untouched], before[untouched])
        if name in OWN:  # each row's bits alone
            for i in rows:
                alone = before[i : i + 1].clone()
                table.add(x[i : i + 1], alone, LoraRows(slots[i : i + 1]))
                assert torch.equal(alone[0], out[i])
        table.clear(4)
        again = before.clone()
        table.add(x, again, LoraRows(torch.full((count,), 4, dtype=torch.int32)))
        assert torch.equal(again, before)


@pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")
def test_what_does_not_fit_is_refused() -> None:
    table = packed(native.default().isa)(8, 12, torch.float32, 4)
    with pytest.raises(BadShape, match=r"the linear is \[12, 8\]"):
        table.put(0, [LoraPart(torch.ones(2, 9), torch.ones(12, 2), 1.0, 0)])
    with pytest.raises(BadShape, match="from column 1 on"):
        table.put(0, [LoraPart(torch.ones(2, 8), torch.ones(12, 2), 1.0, 1)])
    with pytest.raises(BadShape, match="rank 6 in all parts together; there is room for 4"):
        table.put(0, [LoraPart(torch.ones(5, 8), torch.ones(12, 5), 1.0, 0)])
    x, out = torch.ones(2, 8), torch.ones(2, 12)
    with pytest.raises(BadValue, match=r"lora_slots are 0 to 5; they must be -1\.\.4"):
        table.add(x, out, LoraRows(torch.tensor([0, 5], dtype=torch.int32)))
    with pytest.raises(BadShape, match=r"x is torch\.float32 \(2, 8\)"):
        table.add(x, out, LoraRows(torch.tensor([0], dtype=torch.int32)))
