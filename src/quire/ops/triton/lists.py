"""What a plan knows of a step, on the device: integers written to pinned memory and sent there in one copy."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.ops.triton.launch import on_device_of

ALIGNMENT = 64  # int32 numbers: kernels are compiled for aligned addresses, and again for others


class DeviceLists:
    """int32 lists by name, one after the other at addresses that never change. On the host the two copies are one.

    What reads them is queued on the stream that was current when they were last written; the next step may have
    another one.
    """

    def __init__(self, device: str, sizes: dict[str, int]) -> None:
        self._sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values()]
        self.on_gpu = device.startswith("cuda")
        self._host = torch.zeros(sum(self._sizes), dtype=torch.int32, pin_memory=self.on_gpu)
        self._device = torch.zeros_like(self._host, device=device) if self.on_gpu else self._host
        # After the last copy out of the pinned memory.
        self._copied = torch.cuda.Event() if self.on_gpu else None
        self._stream: torch.cuda.Stream | None = None  # of the last step
        self.written: dict[str, NDArray[np.int32]] = {  # what `send` sends
            name: view.numpy() for name, view in zip(sizes, self._host.split(self._sizes), strict=True)
        }
        self.sent: dict[str, Tensor] = dict(zip(sizes, self._device.split(self._sizes), strict=True))

    def follow(self) -> None:
        """Let the current stream wait for the one of the last step, whose kernels may still read the lists."""
        if self.on_gpu:
            current = torch.cuda.current_stream(self._device.device)
            if self._stream is not None and self._stream != current:
                current.wait_stream(self._stream)
            self._stream = current

    def open(self) -> None:
        """Before the lists are written on the host."""
        self.follow()
        if self._copied is not None:
            self._copied.synchronize()  # else the last step's copy would read this step's numbers

    def send(self, used: int) -> None:
        """Copy all lists to the device, of the last one `used` numbers."""
        if self._copied is not None:
            count = len(self._host) - self._sizes[-1] + used
            with on_device_of(self._device):
                self._device[:count].copy_(self._host[:count], non_blocking=True)
                self._copied.record()
