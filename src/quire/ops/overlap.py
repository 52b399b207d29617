"""Whether tensors lie in the same memory, element by element. No memory is read, so a GPU's tensors serve as well.

Views of one packed tensor may interleave without sharing an element: q and k cut out of one projection do. So the
answer is exact. Most calls end at the first comparison, of whole storages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

Sizes = tuple[int, ...]

MAX_WORK: Any = 100_000  # candidates that numpy tries; layouts that need more are taken to overlap


def first_shared(
    written: Mapping[str, Tensor],  # by name
    read: Mapping[str, Tensor | None],  # by name; None is passed over
) -> tuple[str, str] | None:
    """A tensor that is written, and another one that has an element in the same memory: their names, or None."""
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
    """Whether each of the one lies in another storage than each of the other. Does not look at elements."""
    theirs = [_storage(x) for x in read]
    return all(
        end <= other or other_end <= begin for begin, end in map(_storage, written) for other, other_end in theirs
    )


def shares(a: Tensor, b: Tensor) -> bool:
    """Whether an element of a and one of b have a byte in common."""
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    distance = b.data_ptr() - a.data_ptr()
    return _shares(distance, a.shape, a.stride(), a.element_size(), b.shape, b.stride(), b.element_size())


def repeats(x: Tensor) -> bool:
    """Whether two elements of x lie in the same place, as those of an expanded tensor do."""
    return not x.is_contiguous() and _repeats(x.shape, x.stride())


def _storage(x: Tensor) -> tuple[int, int]:
    """Where its storage begins and ends; nowhere for a tensor without memory, as torch has while it traces."""
    storage = x.untyped_storage()
    if storage.device.type == "meta":
        return 0, 0
    begin: int = storage.data_ptr()
    return begin, begin + storage.nbytes()


@lru_cache(maxsize=1024)
def _shares(
    distance: int, shape: Sizes, strides: Sizes, size: int, other_shape: Sizes, other_strides: Sizes, other_size: int
) -> bool:
    """`distance`: from the first byte of the one to the first byte of the other. Strides in elements."""
    one = _Layout(max(0, -distance), shape, strides, size)
    other = _Layout(max(0, distance), other_shape, other_strides, other_size)
    return one.meets(other)


@lru_cache(maxsize=1024)
def _repeats(shape: Sizes, strides: Sizes) -> bool:
    if 0 in shape:
        return False
    dims = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    extent = 0  # from the first to the last element of the dimensions so far
    for stride, size in dims:
        if stride <= extent:
            break
        extent += stride * (size - 1)
    else:
        return False
    # Two elements that differ in dimension i, and in none before it, lie as far apart as one of index 0 and another.
    for i, (stride, size) in enumerate(dims):
        strides, sizes = zip(*dims[i:], strict=True)
        if _Layout(0, (1, *sizes[1:]), strides, 1).meets(_Layout(stride, (size - 1, *sizes[1:]), strides, 1)):
            return True
    return False


class _Layout:
    """What numpy takes for an array, though there is no memory at its address; nothing may read it."""

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
