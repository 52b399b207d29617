"""Exact checks whether tensors share memory. No memory is read, so tensors may be on a GPU.

Views of one packed tensor may interleave without sharing an element, for example q and k cut out of one projection. So
the checks compare elements, not ranges. Most calls end at the first comparison, of whole storages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

Sizes = tuple[int, ...]

MAX_WORK: Any = 100_000  # candidates that numpy tries; layouts that need more count as overlapping


def first_shared(
    written: Mapping[str, Tensor],  # by name
    read: Mapping[str, Tensor | None],  # by name; None is skipped
) -> tuple[str, str] | None:
    """Return the names of a written tensor and another tensor that shares an element with it, or None."""
    ours = [(name, x, _storage(x)) for name, x in written.items()]
    theirs = [(name, x, _storage(x)) for name, x in read.items() if x is not None]
    for i, (name, x, (begin, end)) in enumerate(ours):
        for other_name, other, (other_begin, other_end) in (*ours[i + 1 :], *theirs):
            if begin < other_end and other_begin < end and shares(x, other):
                return name, other_name
    return None


def apart(
    written: Iterable[Tensor],
    read: Iterable[Tensor],
) -> bool:
    """Return True if no written tensor's storage overlaps the storage of a read one. Elements are not compared."""
    theirs = [_storage(x) for x in read]
    return all(
        end <= other or other_end <= begin for begin, end in map(_storage, written) for other, other_end in theirs
    )


def shares(a: Tensor, b: Tensor) -> bool:
    """Return True if an element of a and one of b have a byte in common."""
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    distance = b.data_ptr() - a.data_ptr()
    return _shares(distance, a.shape, a.stride(), a.element_size(), b.shape, b.stride(), b.element_size())


def repeats(x: Tensor) -> bool:
    """Return True if two elements of x have the same address, as in an expanded tensor."""
    return not x.is_contiguous() and _repeats(x.shape, x.stride())


def _storage(x: Tensor) -> tuple[int, int]:
    """Return the addresses of the storage's begin and end, or 0 and 0 for a tensor without memory, as in a trace."""
    storage = x.untyped_storage()
    if storage.device.type == "meta":
        return 0, 0
    begin: int = storage.data_ptr()
    return begin, begin + storage.nbytes()


@lru_cache(maxsize=1024)
def _shares(
    distance: int, shape: Sizes, strides: Sizes, size: int, other_shape: Sizes, other_strides: Sizes, other_size: int
) -> bool:
    """Return True if two layouts share a byte. `distance` is between their first bytes; strides are in elements."""
    one = _Layout(max(0, -distance), shape, strides, size)
    other = _Layout(max(0, distance), other_shape, other_strides, other_size)
    return one.meets(other)


@lru_cache(maxsize=1024)
def _repeats(shape: Sizes, strides: Sizes) -> bool:
    if 0 in shape:
        return False
    dims = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    extent = 0  # distance from the first to the last element of the dimensions so far
    for stride, size in dims:
        if stride <= extent:
            break
        extent += stride * (size - 1)
    else:
        return False
    # Only distances matter, so of two elements that first differ in dimension i one may have index 0 in it.
    for i, (stride, size) in enumerate(dims):
        strides, sizes = zip(*dims[i:], strict=True)
        if _Layout(0, (1, *sizes[1:]), strides, 1).meets(_Layout(stride, (size - 1, *sizes[1:]), strides, 1)):
            return True
    return False


class _Layout:
    """An array interface for numpy without memory at its address. It must not be read."""

    def __init__(self, offset: int, shape: Sizes, strides: Sizes, size: int) -> None:
        dims = [(n, stride * size) for n, stride in zip(shape, strides, strict=True) if n > 1]
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (64 + offset, False),  # any address but 0
            "shape": tuple(n for n, _ in dims),
            "strides": tuple(stride for _, stride in dims),
        }

    def meets(self, other: _Layout) -> bool:
        try:
            return np.shares_memory(np.asarray(self), np.asarray(other), max_work=MAX_WORK)
        except RuntimeError:  # numpy.exceptions.TooHardError, which numpy 1.26 has elsewhere too
            return True
