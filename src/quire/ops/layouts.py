"""Conversions between the paged-cache layouts of different libraries. No bit of a number changes, NaN included.

| layout | K | V | used by |
|---|---|---|---|
| HND | `[N, Hkv, B, D]` | `[N, Hkv, B, D]` | Quire; FlashInfer's "HND" |
| NHD | `[N, B, Hkv, D]` | `[N, B, Hkv, D]` | flash-attn, transformers, FlashInfer's "NHD" |
| packed | `[N, Hkv, D/x, B, x]` | `[N, Hkv, D, B]` | vLLM's first kernels; x = 16 bytes of numbers |

`PagedKV` takes any strides as long as the last one is 1, so an NHD cache needs no conversion:
`PagedKV(k.transpose(1, 2), ...)` is a view of it. Packed caches have to be converted once.

Every conversion returns a contiguous copy and raises BadShape for an argument of another shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import BadShape

VECTOR_BYTES = 16  # read by one thread of vLLM's kernel at a time


def nhd_from_hnd(
    cache: Tensor,  # [N, Hkv, B, D]
) -> Tensor:
    """Convert an HND cache to NHD.

    Returns:
        A contiguous copy, [N, B, Hkv, D].

    Raises:
        BadShape: if `cache` does not have 4 dimensions.
    """
    return _copy(_dims("cache", cache, 4, "[N, Hkv, B, D]").transpose(1, 2))


def hnd_from_nhd(
    cache: Tensor,  # [N, B, Hkv, D]
) -> Tensor:
    """Convert an NHD cache to HND.

    Returns:
        A contiguous copy, [N, Hkv, B, D].

    Raises:
        BadShape: if `cache` does not have 4 dimensions.
    """
    return _copy(_dims("cache", cache, 4, "[N, B, Hkv, D]").transpose(1, 2))


def pack_keys(
    k: Tensor,  # [N, Hkv, B, D]
) -> Tensor:
    """Convert K from HND to vLLM's packed layout.

    Returns:
        A contiguous copy, [N, Hkv, D/x, B, x], where x is the number of elements in 16 bytes.

    Raises:
        BadShape: if `k` does not have 4 dimensions, or x does not divide D.

    Example:
        >>> ops.layouts.pack_keys(torch.zeros(12, 2, 16, 64)).shape
        torch.Size([12, 2, 16, 16, 4])
    """
    _dims("k", k, 4, "[N, Hkv, B, D]")
    x = vector_size(k)
    if k.shape[3] % x:
        raise BadShape(f"k has a head_dim of {k.shape[3]}; the packed layout needs a multiple of x = {x} for {k.dtype}")
    num_blocks, num_kv_heads, block_size, head_dim = k.shape
    parts = k.reshape(num_blocks, num_kv_heads, block_size, head_dim // x, x)
    return _copy(parts.permute(0, 1, 3, 2, 4))


def unpack_keys(
    k: Tensor,  # [N, Hkv, D/x, B, x]
) -> Tensor:
    """Convert K from vLLM's packed layout to HND.

    Returns:
        A contiguous copy, [N, Hkv, B, D].

    Raises:
        BadShape: if `k` does not have 5 dimensions, or its last one is not the number of elements in 16 bytes.
    """
    _dims("k", k, 5, "[N, Hkv, D/x, B, x]")
    if k.shape[4] != vector_size(k):
        raise BadShape(f"k has x = {k.shape[4]}, its last dimension; for {k.dtype} x is {vector_size(k)}")
    return _copy(k.permute(0, 1, 3, 2, 4)).flatten(3)


def pack_values(
    v: Tensor,  # [N, Hkv, B, D]
) -> Tensor:
    """Convert V from HND to vLLM's packed layout.

    Returns:
        A contiguous copy, [N, Hkv, D, B].

    Raises:
        BadShape: if `v` does not have 4 dimensions.
    """
    return _copy(_dims("v", v, 4, "[N, Hkv, B, D]").transpose(2, 3))


def unpack_values(
    v: Tensor,  # [N, Hkv, D, B]
) -> Tensor:
    """Convert V from vLLM's packed layout to HND.

    Returns:
        A contiguous copy, [N, Hkv, B, D].

    Raises:
        BadShape: if `v` does not have 4 dimensions.
    """
    return _copy(_dims("v", v, 4, "[N, Hkv, D, B]").transpose(2, 3))


def vector_size(cache: Tensor) -> int:
    """Return x of the packed layout, the number of elements in 16 bytes."""
    return VECTOR_BYTES // cache.element_size()


def _copy(x: Tensor) -> Tensor:
    """Return a contiguous copy, also of a tensor that is contiguous already."""
    return x.clone(memory_format=torch.contiguous_format)


def _dims(name: str, x: Tensor, dims: int, shape: str) -> Tensor:
    if x.dim() != dims:
        raise BadShape(f"{name} has shape {tuple(x.shape)}; expected {shape}")
    return x
