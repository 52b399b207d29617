"""Between host and device without waiting: small tensors travel together, by way of pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, of each tensor within what travels together


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """These host tensors on the device, in one copy that the host does not wait for; on a CPU they themselves.

    The host may change them at once: what is on its way is a copy.
    """
    if device.type == "cpu":
        return list(tensors)
    staged = staging(sum(_aligned(tensor.nbytes) for tensor in tensors), torch.uint8, device)
    for home, tensor in zip(views(staged, tensors), tensors, strict=True):
        home.copy_(tensor)
    return views(staged.to(device, non_blocking=True), tensors)


def staging(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory [size], to be filled and then copied to the device with non_blocking: pinned where that is a GPU.

    PyTorch gives pinned memory out again only when the copies out of it are done, so nobody needs to hold on to it, and
    a step that ends before its copies do can harm nobody.
    """
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def receive(
    tensor: Tensor,  # any shape, on the device
) -> Tensor:
    """Its numbers in host memory of their own, which are there when all that was queued by now is done."""
    home = staging(tensor.numel(), tensor.dtype, tensor.device).view(tensor.shape)
    return home.copy_(tensor, non_blocking=True)


def all_queued(device: torch.device) -> Callable[[], None]:
    """A function that waits until all is done that is queued by now; a CPU queues nothing."""
    if device.type != "cuda":
        return lambda: None
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    return done.synchronize


def views(
    packed: Tensor,  # uint8 [bytes]
    like: Sequence[Tensor],
) -> list[Tensor]:
    """Views of `packed`, one after the other, with the dtypes and shapes of those tensors."""
    parts, start = [], 0
    for tensor in like:
        parts.append(packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor.nbytes)
    return parts


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
