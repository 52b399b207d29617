"""Checks of single tensors and of how they lie next to each other, for every operator.

Only shapes, dtypes, devices and strides are looked at, which costs no pass over data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from quire.errors import BadDtype, BadShape, BadStride, BadValue, QuireError
from quire.ops import overlap
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
    """Raise BadShape, BadDtype, BadStride or BadValue unless the tensor is as described, its last stride 1.

    any_strides: the last one may be another.
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
    """Raise BadDtype unless it is a dtype that rows and states may have."""
    if tensor.dtype not in FLOATS:
        raise BadDtype(f"{name} has dtype {tensor.dtype}; it must be one of {', '.join(map(str, FLOATS))}")


def check_integers(name: str, tensor: torch.Tensor, dims: int) -> None:
    """Raise BadDtype or BadShape unless it is an int32 or int64 tensor of that many dimensions."""
    if not isinstance(tensor, torch.Tensor):
        raise BadDtype(f"{name} is a {type(tensor).__name__}; it must be an integer tensor")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise BadDtype(f"{name} has dtype {tensor.dtype}; it must be int32 or int64")
    if tensor.dim() != dims:
        raise BadShape(f"{name} has shape {tuple(tensor.shape)}; it must have {dims} dimension(s)")


def check_beside(x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise BadValue unless they lie on the device of x."""
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise BadValue(f"{name} is on {other.device}; expected {x.device}")


def check_written(
    written: Mapping[str, torch.Tensor],  # by name
    read: Mapping[str, torch.Tensor | None],  # by name
) -> None:
    """Raise BadStride where an element that is written stands for another one as well, of this tensor or another."""
    for name, tensor in written.items():
        if overlap.repeats(tensor):
            raise BadStride(
                f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; it is written, so its "
                f"elements must not share memory"
            )
    if found := overlap.first_shared(written, read):
        raise BadStride(f"{found[0]} shares memory with {found[1]}; it is written, so it needs memory of its own")


def begin_alike(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether each row of the one begins with the row of the other."""
    return k.data_ptr() == v.data_ptr() and used_strides(k)[:-1] == used_strides(v)[:-1]


def host_integers(name: str, tensor: torch.Tensor, dims: int) -> NDArray[np.integer]:
    """A step's metadata as numpy's view of it. Raises BadDtype, BadShape, or BadValue where it is not on the host."""
    check_integers(name, tensor, dims)
    if tensor.device.type != "cpu":
        raise BadValue(f"{name} is on {tensor.device}; metadata is read on the host, so give a CPU tensor")
    view: NDArray[np.integer] = tensor.numpy()
    return view


def to_host(name: str, tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """An integer tensor on the host, where it lies or copied there. Raises BadDtype or BadShape."""
    check_integers(name, tensor, dims)
    return tensor.cpu()


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Errors that come from within name arguments as the caller knows them: names[theirs] for theirs."""
    try:
        yield
    except QuireError as error:
        words = re.compile(r"\b(?:kv\.)?(" + "|".join(names) + r")\b")
        raise type(error)(words.sub(lambda found: names[found[1]], str(error))) from None
