"""Integer lists of a plan on the device: written to pinned memory, and sent in one copy."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.ops.triton.launch import on_device_of

ALIGNMENT = 64  # int32 numbers: kernels are compiled for aligned addresses, and again for others


class DeviceLists:
    """int32 lists by name, consecutive and at addresses that never change. Without a GPU both copies are the same.

    Kernels that read them are queued on the stream that was current when they were last written. The next step may use
    another stream.
    """

    def __init__(self, device: str, sizes: dict[str, int]) -> None:
        self._sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values()]
        self.on_gpu = device.startswith("cuda")
        self._host = torch.zeros(sum(self._sizes), dtype=torch.int32, pin_memory=self.on_gpu)
        self._device = torch.zeros_like(self._host, device=device) if self.on_gpu else self._host
        # Recorded after the last copy from the pinned memory.
        self._copied = torch.cuda.Event() if self.on_gpu else None
        self._stream: torch.cuda.Stream | None = None  # of the last step
        self.written: dict[str, NDArray[np.int32]] = {  # the source of `send`
            name: view.numpy() for name, view in zip(sizes, self._host.split(self._sizes), strict=True)
        }
        self.sent: dict[str, Tensor] = dict(zip(sizes, self._device.split(self._sizes), strict=True))

    def follow(self) -> None:
        """Make the current stream wait for that of the last step, whose kernels may still read the lists."""
        if self.on_gpu:
            current = torch.cuda.current_stream(self._device.device)
            if self._stream is not None and self._stream != current:
                current.wait_stream(self._stream)
            self._stream = current

    def open(self) -> None:
        """Prepare the lists for being written on the host."""
        self.follow()
        if self._copied is not None:
            self._copied.synchronize()  # otherwise the last step's copy could read this step's numbers

    def send(self, used: int) -> None:
        """Copy all lists to the device, but only `used` numbers of the last one."""
        if self._copied is not None:
            count = len(self._host) - self._sizes[-1] + used
            with on_device_of(self._device):
                self._device[:count].copy_(self._host[:count], non_blocking=True)
                self._copied.record()
