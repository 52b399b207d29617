"""Helpers of all launchers: the backend's name, the dtypes that it serves, and the device of a launch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from quire.errors import Unsupported

NAME = "triton"

FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # of rows and states

HERE: AbstractContextManager[None] = nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which kernels run on the device of x. Triton launches on the current device, not on x's."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(x.device)


def check_dtype(name: str, x: Tensor) -> None:
    """Raise Unsupported unless the backend supports rows of the dtype of x."""
    if x.dtype not in FLOATS:
        served = ", ".join(map(str, FLOATS))
        raise Unsupported(f"{name} is {x.dtype}; the {NAME} backend serves {served}")
