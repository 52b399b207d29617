"""Decode of sequences with a common prefix: with the same first blocks, and with as many blocks for each.

Both calls have the same shapes, and the plan finds the shared blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire import ops
from quire_bench.kernels.attention import filled_cache, random_numbers


@dataclass(frozen=True, kw_only=True)
class CascadeShape:
    """Sequences of `shared` common tokens and `own` ones each, one query token a sequence, in bf16."""

    batch: int = 64  # S
    shared: int = 8192
    own: int = 256
    num_heads: int = 8  # Hq
    num_kv_heads: int = 8  # Hkv
    head_dim: int = 64  # D
    block_size: int = 16

    @property
    def group_size(self) -> int:
        """G: query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def bytes_saved(self) -> float:
        """Bytes of KV of sequences apart, over those of sequences that share."""
        return self.batch * (self.shared + self.own) / (self.shared + self.batch * self.own)

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of the shared part, and of what is each sequence's own."""
        return -(-self.shared // self.block_size), -(-self.own // self.block_size)

    def spec(self, num_blocks: int, **fields: Any) -> ops.AttentionSpec:
        """The attention over a cache of so many blocks. fields: others of the AttentionSpec."""
        return ops.AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            num_blocks=num_blocks,
            dtype=torch.bfloat16,
            **fields,
        )

    def q(self, device: str) -> torch.Tensor:
        """Random queries, [S, Hq, D]."""
        return random_numbers(self.batch, self.num_heads, self.head_dim, dtype=torch.bfloat16).to(device)


@dataclass(frozen=True)
class CascadeFigure:
    """The times of the two calls, and the ceilings meanwhile: medians."""

    shape: CascadeShape
    apart_seconds: float
    shared_seconds: float
    read: float  # GB/s of memory
    multiply: float  # GFLOP/s of a bf16 product

    @property
    def speedup(self) -> float:
        """The speed with shared blocks relative to that without."""
        return self.apart_seconds / self.shared_seconds

    @property
    def roof(self) -> float:
        """The largest possible speedup: in decode a byte of bf16 KV takes G operations."""
        return min(self.shape.bytes_saved, self.multiply / (self.shape.group_size * self.read))


def call(backend: ops.Backend, shape: CascadeShape, *, shares: bool, device: str = "cpu") -> Callable[[], torch.Tensor]:
    """Decode of all sequences; their first blocks are the same ones, or blocks with the same numbers in them."""
    common, own = shape.blocks
    copies = 1 if shares else shape.batch
    num_blocks = copies * common + shape.batch * own
    spec = shape.spec(num_blocks, device=device)
    order = torch.randperm(num_blocks, dtype=torch.int32)
    first = order[: copies * common].view(copies, common).expand(shape.batch, -1)
    tables = torch.cat([first, order[copies * common :].view(shape.batch, own)], dim=1)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32)
    lens = torch.full((shape.batch,), shape.shared + shape.own, dtype=torch.int32)
    plan = backend.plan(spec, starts, lens, tables)
    kv, q = filled_cache(spec), shape.q(device)
    out = torch.empty_like(q)
    return lambda: backend.attention(q, kv, plan, out=out)
