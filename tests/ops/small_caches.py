"""Small paged caches for tests that bring their own block tables."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops import dense


def random_cache(
    shape: tuple[int, ...], tables: list[list[int]], lens: list[int], dtype: torch.dtype, device: str, seed: int
) -> Tensor:
    """A cache [N, Hkv, B, D] with random numbers where the sequences own slots, and NaN elsewhere."""
    gen = torch.Generator().manual_seed(seed)
    cache = torch.full(shape, torch.nan, dtype=dtype)
    block_size = shape[2]
    for table, n in zip(tables, lens, strict=True):
        for t in range(n):
            cache[table[t // block_size], :, t % block_size] = torch.randn(shape[1], shape[3], generator=gen).to(dtype)
    return cache.to(device)


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype).to(device)


def check(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: list[list[int]],
    lens: list[int],
    starts: list[int],
    alibi_slopes: Tensor | None = None,  # [Hq] or [S, Hq]
    **options: object,
) -> None:
    """Compare with dense attention over what each table gathers."""
    parts = []
    for s, (table, n) in enumerate(zip(tables, lens, strict=True)):
        k, v = dense.gather(k_cache, table, n), dense.gather(v_cache, table, n)
        slopes = alibi_slopes[s] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        parts.append(dense.attend(q[starts[s] : starts[s + 1]], k, v, alibi_slopes=slopes, **options))
    dense.concat(parts).check(out, None, q.dtype)


def tables_of(lens: list[int], block_size: int, width: int) -> tuple[list[list[int]], int]:
    """Block tables with ids from the top of a pool downward, -1 after; and the size of the pool."""
    free = list(range(sum(-(-n // block_size) for n in lens) + 2))
    tables = []
    for n in lens:
        own = [free.pop() for _ in range(-(-n // block_size))]
        tables.append(own + [-1] * (width - len(own)))
    return tables, free[-1] + 1 + sum(-(-n // block_size) for n in lens)
