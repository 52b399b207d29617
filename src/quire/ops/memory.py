"""Host memory for what is large: a cache's blocks, a model's weights."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 * 2**20  # bytes
SMALL = 128 * 2**10  # bytes; a mapping takes whole pages and a call of the system


def in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype, touched: int = 0) -> Tensor:
    """Memory of zeros that starts at a huge page, its first `touched` bytes already given by the system.

    Addresses in huge pages are found faster. Where the system offers none, its ordinary ones serve.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = _mapping(size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
    start = -whole.data_ptr() % HUGE_PAGE
    whole[start : start + min(size, touched)].zero_()
    return whole[start : start + size].view(dtype).view(shape)


def mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that goes back to the system as soon as no tensor holds it, unless it is SMALL.

    The heap would keep it: what is freed there lies between things that stay, and fits little of what comes later.
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
    # Private: what processes may share gets no huge pages by default.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
