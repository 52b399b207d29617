"""Serialize the messages of rank 0 to the other ranks: JSON, then the numbers of tensors. They never contain code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from struct import Struct
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from quire.cache.groups import StatePools
from quire.models.batch import (
    Batch,
    DrawnRows,
    EmbedRows,
    GroupMoves,
    GroupTables,
    Pairs,
    PromptRows,
    RecurrentTables,
    SamplingRows,
)


class Pools(NamedTuple):
    """Numbers of blocks of a cache."""

    num_blocks: int
    num_host_blocks: int
    states: StatePools
    all_rows: bool = False  # steps compute the hidden states of all rows, which rank 0's draft head reads


HEAD = Struct("<Q")  # length of the JSON in bytes
ALIGNED = 8  # bytes: each tensor begins at a multiple
DTYPES = {str(dtype): dtype for dtype in (torch.int64, torch.int32, torch.float32, torch.float64, torch.uint8)}
KINDS: dict[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (
        *(Batch, DrawnRows, EmbedRows, GroupMoves, GroupTables, Pairs, PromptRows, RecurrentTables),
        *(Pools, StatePools),
    )
}


def pack_batch(batch: Batch) -> bytes:
    """Serialize the part of a batch that the other ranks need: they draw nothing."""
    return pack(replace(batch, sampling=cast(SamplingRows, None), logit_ids=[]))


def pack(value: Batch | Pools) -> bytes:
    """Serialize a value."""
    tensors: list[Tensor] = []
    tree = json.dumps(_plain(value, tensors)).encode()
    tree += b" " * (-(HEAD.size + len(tree)) % ALIGNED)
    parts = [HEAD.pack(len(tree)), tree]
    for tensor in tensors:
        raw = tensor.numpy().tobytes()
        parts += [raw, bytes(-len(raw) % ALIGNED)]
    return b"".join(parts)


def unpack(message: bytes) -> Any:
    """Return the value that `pack` serialized."""
    data = bytearray(message)
    [size] = HEAD.unpack_from(data)
    at = HEAD.size + size

    def made(plain: Any) -> Any:
        nonlocal at
        if not isinstance(plain, dict):
            return plain
        [(kind, content)] = plain.items()
        if kind == "list":
            return [made(one) for one in content]
        if kind == "tuple":
            return tuple(made(one) for one in content)
        if kind in KINDS:
            return KINDS[kind](*(made(one) for one in content))
        dtype, shape = DTYPES[kind], content
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        found = torch.frombuffer(data, dtype=dtype, count=count, offset=at).view(shape)
        at += -(-count * dtype.itemsize // ALIGNED) * ALIGNED
        return found

    return made(json.loads(data[HEAD.size : at]))


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """Convert a value to JSON's types. Appends its tensors, in the order in which `unpack` reads them."""
    if isinstance(value, Tensor):
        tensors.append(value.contiguous())
        return {str(value.dtype): list(value.shape)}
    if is_dataclass(value):
        return {type(value).__name__: [_plain(getattr(value, one.name), tensors) for one in fields(value)]}
    if isinstance(value, tuple):
        kind = type(value).__name__ if type(value) is not tuple else "tuple"
        return {kind: [_plain(one, tensors) for one in value]}
    if isinstance(value, list):
        return {"list": [_plain(one, tensors) for one in value]}
    return value
