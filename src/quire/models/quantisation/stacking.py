"""Stacking several projections of the same input into one weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.ops.memory import mapped
from quire.ops.weights.gguf_blocks import BlockWeight
from quire.ops.weights.linear import LinearWeight
from quire.ops.weights.narrow import NarrowWeight
from quire.ops.weights.quantised import PARTS, QuantisedWeight


@dataclass(frozen=True)
class StackedWeight:
    """Parts that cannot be one weight, as they differ in kind, in their groups, or in the order of their inputs."""

    parts: tuple[LinearWeight, ...]  # [out, in] each


Weight: TypeAlias = LinearWeight | StackedWeight


def tensor(weight: Weight) -> Tensor:
    """Return a weight that must be a plain tensor. Raises ModelError if it is quantised."""
    if not isinstance(weight, Tensor):
        raise ModelError(f"a norm, a bias or an embedding is a {type(weight).__name__}; only a tensor is served there")
    return weight


def matrix(weight: Weight) -> LinearWeight:
    """Return a weight that must be a single matrix. Raises ModelError if it consists of different parts."""
    if isinstance(weight, StackedWeight):
        kinds = ", ".join(map(_described, weight.parts))
        raise ModelError(
            f"the parts of one weight are stored in different ways ({kinds}), which is served outside of experts only"
        )
    return weight


def stacked(parts: Sequence[LinearWeight]) -> LinearWeight | StackedWeight:
    """Concatenate the outputs of all parts, at least one of which is quantised."""
    if len(parts) == 1:
        return parts[0]
    blocks = [part for part in parts if isinstance(part, BlockWeight)]
    if blocks:
        alike = len(blocks) == len(parts) and all(_agree(blocks[0], part) for part in blocks)
        return blocks[0].with_outputs(blocks[1:]) if alike else StackedWeight(tuple(parts))
    narrow = [part for part in parts if isinstance(part, NarrowWeight)]
    if narrow:
        return _narrow(narrow) if len(narrow) == len(parts) else StackedWeight(tuple(parts))
    whole = [part for part in parts if isinstance(part, QuantisedWeight)]
    first = whole[0]
    if len(whole) < len(parts) or not all(_agree(first, part) for part in whole):
        return StackedWeight(tuple(parts))
    values = mapped((sum(part.out_size for part in whole), first.in_size), torch.uint8)
    torch.cat([part.values for part in whole], out=values)
    zeros = None
    if any(part.zeros is not None for part in whole):
        zeros = torch.cat([_zeros(part) for part in whole])
    made: dict[str, Tensor | None] = {"values": values, "zeros": zeros}
    for name in PARTS:
        if name not in made and getattr(first, name) is not None:
            made[name] = torch.cat([getattr(part, name) for part in whole])
    return first.derived(**made)


def _narrow(parts: Sequence[NarrowWeight]) -> NarrowWeight:
    """Concatenate the outputs of NarrowWeights."""
    codes = mapped((sum(part.out_size for part in parts), parts[0].in_size), torch.uint8)
    torch.cat([part.codes for part in parts], out=codes)
    return parts[0].derived(codes, torch.cat([part.scales for part in parts]))


def _agree(a: QuantisedWeight | BlockWeight, b: QuantisedWeight | BlockWeight) -> bool:
    if _kind(a) != _kind(b):
        return False
    if a.order is None or b.order is None:
        return a.order is b.order
    return torch.equal(a.order, b.order)


def _kind(weight: QuantisedWeight | BlockWeight) -> tuple[object, ...]:
    """Return the properties that must be equal in all parts of one weight."""
    if isinstance(weight, BlockWeight):
        return (weight.kind,)
    has_minimums, dtype = weight.minimums is not None, weight.scales.dtype
    return weight.bits, weight.group_size, weight.activation_group, weight.sub_size, has_minimums, dtype


def _zeros(weight: QuantisedWeight) -> Tensor:
    """Return the zeros, also of a symmetric weight: fp32 [out, groups]."""
    return torch.full_like(weight.scales, 2 ** (weight.bits - 1)) if weight.zeros is None else weight.zeros


def _described(part: LinearWeight) -> str:
    if isinstance(part, Tensor):
        return "not quantised"
    if isinstance(part, NarrowWeight):
        return part.format.name
    order = "" if part.order is None else ", in a separate order"
    if isinstance(part, BlockWeight):
        return f"{part.kind}{order}"
    return f"int{part.bits} in groups of {part.group_size} of {part.in_size} inputs{order}"
