"""Linear layers of a model of 8 billion parameters: the framework's, those that keep a row's bits, and quantised ones.

Calls go round copies of a weight that are larger together than the GPU's cache, so that each reads its weight from
memory, as in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from quire.ops.weights.gguf_blocks import FORMATS, BlockWeight
from quire.ops.weights.linear import Linear, Linears, LinearWeight
from quire.ops.weights.quantised import quantised
from quire_bench.gpu.common import Bench, Call, Contestant, race

ROWS = (1, 32, 512, 8192)
SIZES = ((4096, 28672), (14336, 4096))  # inputs and outputs: gate and up in one, and down
CACHED = 2**28  # bytes: more than a GPU caches
BLOCKS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")


def linears(
    bench: Bench, sizes: Sequence[tuple[int, int]] = SIZES, rows: Sequence[int] = ROWS, blocks: Sequence[str] = BLOCKS
) -> None:
    """Stage: operations a second of each linear, and its share of the framework's."""
    own = bench.backend.linears(bench.device)
    kinds: dict[str, tuple[Linears, Callable[[int, int], LinearWeight]]] = {
        "torch": (Linears(), lambda i, o: _random(bench, i, o)),
        "quire, int8": (own, lambda i, o: quantised(_random(bench, i, o), 8, i, torch.bfloat16)),
        "quire, int4, groups of 128": (own, lambda i, o: quantised(_random(bench, i, o), 4, 128, torch.bfloat16)),
        **{f"quire, {kind}": (own, partial(_blocks, bench, kind)) for kind in blocks},
    }
    if bench.backend.limits.reproducible:
        kinds["quire, reproducible"] = (
            bench.backend.linears(bench.device, reproducible=True),
            lambda i, o: _random(bench, i, o),
        )
    for inside, outside in ((256, 48),) if bench.settings.tiny else sizes:
        served: dict[str, list[Linear]] = {}
        for name, (packer, make) in kinds.items():
            try:
                weight = make(inside, outside)
                copies = 1 if bench.settings.tiny else -(-CACHED // _packed_bytes(weight))
                # Packing copies a quantised weight.
                served[name] = [
                    packer.linear(weight.clone() if isinstance(weight, Tensor) else weight) for _ in range(copies)
                ]
            except Exception as error:  # the others are still timed
                bench.failed(f"{inside} x {outside}", name, error)
        for count in (3,) if bench.settings.tiny else rows:
            x, work = torch.randn(count, inside, device=bench.device).bfloat16(), 2.0 * count * inside * outside
            contestants = {
                name: Contestant(partial(_calls, copies, x), work, "TFLOP/s") for name, copies in served.items()
            }
            race(bench, f"{count} x {inside} x {outside}", contestants, "torch", rounds=3)
        bench.forget()


def _random(bench: Bench, inside: int, outside: int) -> Tensor:
    return torch.randn(outside, inside, device=bench.device).bfloat16()


def _blocks(bench: Bench, kind: str, inside: int, outside: int) -> LinearWeight:
    """Random blocks of that kind of GGUF, whose scales are finite."""
    form = FORMATS[kind]
    blocks = torch.randint(0, 256, (outside, inside // form.inputs, form.nbytes), dtype=torch.uint8)
    for at in form.floats:
        blocks[:, :, at + 1] &= 0x3B
    return BlockWeight(kind, (blocks.flatten(1),), inside, torch.bfloat16).to(bench.device)


def _packed_bytes(weight: LinearWeight) -> int:
    """At least the bytes of its numbers."""
    return weight.nbytes if isinstance(weight, Tensor) else weight.out_size * weight.in_size // 2


def _calls(copies: list[Linear], x: Tensor) -> Call:
    turn = cycle(copies)
    return lambda: next(turn)(x)
