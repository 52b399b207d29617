"""Transfers between host and device without waiting: small tensors are packed together in pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, of each tensor in a packed buffer


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors to the device in one transfer, without waiting; on a CPU return the same tensors.

    The host may change the tensors at once, since the transfer reads a copy.
    """
    if device.type == "cpu":
        return list(tensors)
    staged = staging(sum(_aligned(tensor.nbytes) for tensor in tensors), torch.uint8, device)
    for home, tensor in zip(views(staged, tensors), tensors, strict=True):
        home.copy_(tensor)
    return views(staged.to(device, non_blocking=True), tensors)


def staging(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory [size] to fill and then copy to the device with non_blocking; for a GPU it is pinned.

    PyTorch reuses pinned memory only after the copies from it are done, so the caller need not keep a reference, and a
    step that ends before its copies do causes no harm.
    """
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def receive(
    tensor: Tensor,  # any shape, on the device
) -> Tensor:
    """Return a host copy of the tensor, valid once all currently queued work is done."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    home = staging(tensor.numel(), tensor.dtype, tensor.device).view(tensor.shape)
    return home.copy_(tensor, non_blocking=True)


def all_queued(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until all currently queued work is done; a CPU queues nothing."""
    if device.type != "cuda":
        return lambda: None
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    return done.synchronize


def views(
    packed: Tensor,  # uint8 [bytes]
    like: Sequence[Tensor],
) -> list[Tensor]:
    """Return consecutive views of `packed` with the dtypes and shapes of the tensors in `like`."""
    parts, start = [], 0
    for tensor in like:
        parts.append(packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor.nbytes)
    return parts


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
