"""What every launcher of the backend needs: its name, the dtypes it serves, and the device to launch on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from quire.errors import Unsupported

NAME = "triton"

FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # of rows and states

HERE: AbstractContextManager[None] = nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Within it, kernels are launched on the device of x: they go to the current one, wherever their tensors lie."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(x.device)


def check_dtype(name: str, x: Tensor) -> None:
    """Raise Unsupported unless the backend computes with rows of that dtype."""
    if x.dtype not in FLOATS:
        served = ", ".join(map(str, FLOATS))
        raise Unsupported(f"{name} is {x.dtype}; the {NAME} backend serves {served}")
