"""Quantised weights of every kind, and rows to multiply them with."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.weights.quantised import QuantisedWeight

# bits, group, zeros, order, whole rows
KINDS = {
    "int4-32": (4, 32, False, False, False),
    "int4-64-zeros": (4, 64, True, False, False),
    "int4-128": (4, 128, False, False, False),
    "int4-128-zeros-order": (4, 128, True, True, False),
    "int4-output": (4, 0, True, False, False),
    "int8-output": (8, 0, False, False, False),
    "int8-output-zeros": (8, 0, True, True, False),
    "int8-32-zeros": (8, 32, True, False, False),
    "int8-64": (8, 64, False, False, False),
    "int8-128": (8, 128, False, True, False),
    "int8-rows": (8, 0, False, False, True),
    "int4-rows": (4, 0, False, True, True),
}
# Scales in fp16: bits, inputs of a scale, minimums, order
BLOCKS = {
    "blocks8": (8, 32, False, False),
    "blocks5-order": (5, 32, False, True),
    "blocks4": (4, 32, False, False),
    "blocks4-minimums": (4, 32, True, False),
    "blocks5-minimums": (5, 32, True, False),
    "sub4": (4, 256, True, False),
    "sub5-order": (5, 256, True, True),
    "sub6": (6, 256, False, False),
}


def random_weight(kind: str, out_size: int, in_size: int, dtype: torch.dtype, seed: int = 0) -> QuantisedWeight:
    """Any integers, scales of any size, and zeros at both ends of their range. Blocks are whole: `in` may grow."""
    if kind in BLOCKS:
        return random_blocks(kind, out_size, in_size, dtype, seed)
    bits, group, has_zeros, has_order, whole_rows = KINDS[kind]
    gen = torch.Generator().manual_seed(seed + out_size * in_size)
    group = group or in_size
    groups = -(-in_size // group)
    return QuantisedWeight(
        torch.randint(0, 2**bits, (out_size, in_size), generator=gen, dtype=torch.uint8),
        torch.randn(out_size, groups, generator=gen)
        * torch.exp2(torch.randint(-9, -3, (out_size, groups), generator=gen)),
        torch.randint(0, 2**bits + 1, (out_size, groups), generator=gen).float() if has_zeros else None,
        bits,
        group,
        dtype,
        torch.randperm(in_size, generator=gen) if has_order else None,
        in_size if whole_rows else 128,
    )


def random_blocks(kind: str, out_size: int, in_size: int, dtype: torch.dtype, seed: int) -> QuantisedWeight:
    bits, group, has_minimums, has_order = BLOCKS[kind]
    in_size = -(-in_size // group) * group
    gen = torch.Generator().manual_seed(seed + out_size * in_size)

    def halves() -> Tensor:
        sizes = torch.exp2(torch.randint(-14, -3, (out_size, in_size // group), generator=gen))
        return (torch.randn(out_size, in_size // group, generator=gen) * sizes).half()

    def subs(low: int, high: int) -> Tensor:
        shape = (out_size, in_size // (16 if bits == 6 else 32))
        return torch.randint(low, high, shape, generator=gen, dtype=torch.int8)

    return QuantisedWeight(
        torch.randint(0, 2**bits, (out_size, in_size), generator=gen, dtype=torch.uint8),
        halves(),
        None,
        bits,
        group,
        dtype,
        torch.randperm(in_size, generator=gen) if has_order else None,
        32 if group == 32 else 128,
        halves() if has_minimums else None,
        None if group == 32 else subs(-128, 127),
        subs(0, 127) if group == 256 and has_minimums else None,
    )


def random_rows(rows: int, in_size: int, dtype: torch.dtype) -> Tensor:
    """Rows and groups of very different sizes, some of them zero."""
    gen = torch.Generator().manual_seed(rows + in_size)
    x = torch.randn(rows, in_size, generator=gen) * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=gen))
    x[:, in_size // 3 : in_size // 2] *= 1000
    x[2::5] = 0
    return x.to(dtype)


def as_bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)
