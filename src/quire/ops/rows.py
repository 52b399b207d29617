"""Strides in the form that kernels take: rows of H numbers, [outer, inner, H], with one stride for outer and inner."""

from __future__ import annotations

from torch import Tensor


def as_rows(
    x: Tensor,  # [..., H]
) -> Tensor:
    """Return x if an outer and an inner stride describe its rows, otherwise a contiguous copy."""
    strided = x.dim() <= 3 and (x.stride(-1) == 1 or x.shape[-1] == 1)
    return x if strided else x.contiguous()


def row_strides(
    x: Tensor,  # [..., H], from `as_rows`
) -> tuple[int, int, int]:
    """Return the outer stride, the inner size and the inner stride."""
    if x.dim() == 3:
        return x.stride(0), x.shape[1], x.stride(1)
    if x.dim() > 3:  # contiguous
        return x.shape[-1], 1, 0
    return x.stride(0), 1, 0


def count_rows(
    x: Tensor,  # [..., H]
) -> int:
    """Return the product of all sizes except the last one."""
    return x.shape[:-1].numel()


def used_strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides, 0 for dimensions of one element: torch may keep a value there that overflows an address."""
    return tuple(stride if size > 1 else 0 for stride, size in zip(x.stride(), x.shape, strict=True))
