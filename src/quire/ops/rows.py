"""Strides as kernels take them. Rows of H numbers: those of [outer, inner, H], with a stride for each of the two."""

from __future__ import annotations

from torch import Tensor


def as_rows(
    x: Tensor,  # [..., H]
) -> Tensor:
    """x itself if its strides can be expressed so, else a contiguous copy."""
    strided = x.dim() <= 3 and (x.stride(-1) == 1 or x.shape[-1] == 1)
    return x if strided else x.contiguous()


def row_strides(
    x: Tensor,  # [..., H], from `as_rows`
) -> tuple[int, int, int]:
    """Outer stride, inner size, inner stride."""
    if x.dim() == 3:
        return x.stride(0), x.shape[1], x.stride(1)
    if x.dim() > 3:  # contiguous
        return x.shape[-1], 1, 0
    return x.stride(0), 1, 0


def count_rows(
    x: Tensor,  # [..., H]
) -> int:
    """The product of all sizes but the last."""
    return x.shape[:-1].numel()


def used_strides(x: Tensor) -> tuple[int, ...]:
    """Its strides, 0 in a dimension of one element: what torch keeps there may lead out of all addresses."""
    return tuple(stride if size > 1 else 0 for stride, size in zip(x.stride(), x.shape, strict=True))
