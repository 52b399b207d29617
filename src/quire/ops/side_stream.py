"""Swapping on a GPU: blocks are copied on a separate stream, in parallel with the computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from quire.errors import ConfigError

# Takes src, dst and the device. Returns a function that queues the copy of block src[i] of its first pool to block
# dst[i] of its second pool.
Swapper: TypeAlias = Callable[[Sequence[int], Sequence[int], torch.device], Callable[[Tensor, Tensor], None]]


class SideStream:
    """Copies blocks between a GPU and pinned memory of the host, on a stream separate from the computation.

    The block tables assign a block to its next owner at once, before its copy is complete. This is safe because:

    - Only copies on this stream access the host's pool, and they run in the order in which they were queued. So a block
      on the host may be written again once it is free.
    - Copies start after all work that was queued on the current stream before them. So a block is swapped out with the
      values of earlier steps, and one that is swapped in overwrites nothing that they still read.
    - Code that accesses a layer's blocks on the current stream gets them from `KVCache.layer`, which waits for the last
      copy of that layer. So no block is written during its copy to the host, or read during its copy from there. An
      event that was not waited for is kept, also after a failed step.
    """

    def __init__(self, device: torch.device, host: Sequence[Tensor], swapper: Swapper) -> None:
        """Pin the host's pool until `close`: exactly this memory, as PyTorch's pinned allocations would round up.

        Raises ConfigError if the system cannot pin that much memory.
        """
        self._device = device
        self._host: list[Tensor] = []  # the pinned tensors
        self._swapper = swapper
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pending: dict[int, torch.cuda.Event] = {}  # by layer, after its last copy
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):  # otherwise a context would be created on the current GPU
            for tensor in host:
                error = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
                if error:
                    self.close()
                    raise ConfigError(
                        f"the host's pool of {sum(x.nbytes for x in host):,} bytes cannot be pinned (CUDA error "
                        f"{error}); give a smaller swap_space"
                    )
                self._host.append(tensor)

    def close(self) -> None:
        """Wait for pending copies, and unpin the host's pool."""
        self._stream.synchronize()
        for tensor in self._host:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]

    def copy(self, pairs: Mapping[int, tuple[Tensor, Tensor]], src: Sequence[int], dst: Sequence[int]) -> None:
        """Queue the copies of blocks, layer by layer. `pairs` has the source and the target [N, ...] of each layer."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            swap = self._swapper(src, dst, self._device)
            for layer, (source, target) in pairs.items():
                swap(source, target)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
                self._pending[layer] = event

    def wait(self, layer: int) -> None:
        """Make the current stream wait for the layer's copies."""
        event = self._pending.pop(layer, None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
