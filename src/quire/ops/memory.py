"""Host memory for large tensors: a cache's blocks, a model's weights."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 * 2**20  # bytes
SMALL = 128 * 2**10  # bytes; a mapping takes whole pages and a system call


def in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype, touched: int = 0) -> Tensor:
    """Return zeroed memory that starts at a huge page, and touch its first `touched` bytes so that they are resident.

    Huge pages need fewer TLB entries. If the system has none, ordinary pages are used.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = _mapping(size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    start = -whole.data_ptr() % HUGE_PAGE
    whole[start : start + min(size, touched)].zero_()
    return whole[start : start + size].view(dtype).view(shape)


def mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory that the system gets back as soon as no tensor refers to it, unless it is smaller than SMALL.

    The heap would keep it: a freed area lies between live allocations, and few later ones fit into it.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < SMALL:
        return torch.empty(shape, dtype=dtype)
    if size >= HUGE_PAGE:
        return in_huge_pages(shape, dtype)
    return torch.frombuffer(_mapping(size), dtype=dtype).view(shape)


def _mapping(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, size)
    # Private, since shared mappings get no huge pages by default.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
