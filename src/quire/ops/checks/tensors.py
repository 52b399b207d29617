"""Checks of single tensors and of overlapping memory, for every operator.

The checks read shapes, dtypes, devices and strides, and never the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses import FakeTensor

from quire.errors import BadDtype, BadShape, BadStride, BadValue, QuireError
from quire.ops.checks import overlap
from quire.ops.rows import used_strides

INT32_MAX = 2**31 - 1
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of rows and states


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    any_strides: bool = False,
) -> None:
    """Raise BadShape, BadDtype, BadStride or BadValue unless the tensor is as described and its last stride is 1.

    With `any_strides` the last stride may be any.
    """
    if tensor.shape != shape:
        raise BadShape(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
    if tensor.dtype != dtype:
        raise BadDtype(f"{name} has dtype {tensor.dtype}; expected {dtype}")
    here = tensor.device
    if here != device and (here.type != device.type or device.index is not None):
        raise BadValue(f"{name} is on {tensor.device}; expected {device}")
    if not any_strides and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise BadStride(f"{name} has strides {tensor.stride()}; the last one must be 1")


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Raise BadDtype unless the dtype is one of FLOATS."""
    if tensor.dtype not in FLOATS:
        raise BadDtype(f"{name} has dtype {tensor.dtype}; it must be one of {', '.join(map(str, FLOATS))}")


def check_integers(name: str, tensor: torch.Tensor, dims: int) -> None:
    """Raise BadDtype or BadShape unless the tensor is int32 or int64 and has `dims` dimensions."""
    if not isinstance(tensor, torch.Tensor):
        raise BadDtype(f"{name} is a {type(tensor).__name__}; it must be an integer tensor")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise BadDtype(f"{name} has dtype {tensor.dtype}; it must be int32 or int64")
    if tensor.dim() != dims:
        raise BadShape(f"{name} has shape {tuple(tensor.shape)}; it must have {dims} dimension(s)")


def check_beside(x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise BadValue unless all tensors are on the device of x."""
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise BadValue(f"{name} is on {other.device}; expected {x.device}")


def check_written(
    written: Mapping[str, torch.Tensor],  # by name
    read: Mapping[str, torch.Tensor | None],  # by name
) -> None:
    """Raise BadStride if a written element shares memory with another element, of the same tensor or of another."""
    for name, tensor in written.items():
        if overlap.repeats(tensor):
            raise BadStride(
                f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; it is written, so its "
                f"elements must not share memory"
            )
    if found := overlap.first_shared(written, read):
        raise BadStride(f"{found[0]} shares memory with {found[1]}; it is written, so it needs separate memory")


def has_values(tensor: torch.Tensor) -> bool:
    """Return False for a tensor of a graph that torch is tracing: it has a shape and no values."""
    return not isinstance(tensor, FakeTensor)


def begin_alike(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return True if each row of k begins with the row of v, or the reverse, in the same memory."""
    return k.data_ptr() == v.data_ptr() and used_strides(k)[:-1] == used_strides(v)[:-1]


def host_integers(name: str, tensor: torch.Tensor, dims: int) -> NDArray[np.integer]:
    """Return a numpy view of a step's metadata. Raises BadDtype, BadShape, or BadValue if it is not on the host."""
    check_integers(name, tensor, dims)
    if tensor.device.type != "cpu":
        raise BadValue(f"{name} is on {tensor.device}; metadata is read on the host, so give a CPU tensor")
    view: NDArray[np.integer] = tensor.numpy()
    return view


def to_host(name: str, tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """Return the integer tensor, copied to the host if it is not there. Raises BadDtype or BadShape."""
    check_integers(name, tensor, dims)
    return tensor.cpu()


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Rename arguments in the messages of errors raised within: `internal=external` replaces one name by the other."""
    try:
        yield
    except QuireError as error:
        words = re.compile(r"\b(?:kv\.)?(" + "|".join(names) + r")\b")
        raise type(error)(words.sub(lambda found: names[found[1]], str(error))) from None
