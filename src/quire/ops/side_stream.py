"""Swapping on a GPU: blocks move on a stream of their own, beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from quire.errors import ConfigError

# Of src, dst and the device: what queues the copy of block src[i] of its first pool to block dst[i] of its second one.
Swapper: TypeAlias = Callable[[Sequence[int], Sequence[int], torch.device], Callable[[Tensor, Tensor], None]]


class SideStream:
    """Copies blocks between a GPU and pinned memory of the host, on a stream beside the one that computes.

    Why no block is read too early or written too early, although the books give it to its next owner at once:

    - The host's pool is touched by copies on this stream alone, which run in the order in which they were queued. So a
      block on the host may be written again as soon as it is free.
    - Copies begin when all that was queued on the current stream before them is done. So what is swapped out is what
      earlier steps wrote, and what is swapped in overwrites nothing that they still read.
    - Whoever touches a layer's blocks on the current stream gets them through `KVCache.layer`, which waits for the last
      copy of that layer. So nobody writes to a block that is still being swapped out, or reads one that is still being
      swapped in. An event that nobody has waited for is kept, over a step that failed too.
    """

    def __init__(self, device: torch.device, host: Sequence[Tensor], swapper: Swapper) -> None:
        """Pin the host's pool, until `close`: exactly this memory, where PyTorch's pinned allocations round up.

        Raises ConfigError where the system does not pin so much.
        """
        self._device = device
        self._host: list[Tensor] = []  # what is pinned
        self._swapper = swapper
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pending: dict[int, torch.cuda.Event] = {}  # by layer, after its last copy
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):  # else the current GPU gets a context for it
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
        """Wait for copies that are under way, and let the host's pool be memory like any other."""
        self._stream.synchronize()
        for tensor in self._host:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]

    def copy(self, pairs: Mapping[int, tuple[Tensor, Tensor]], src: Sequence[int], dst: Sequence[int]) -> None:
        """Queue the copies of these blocks, layer after layer. pairs: source and target [N, ...] of each layer."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            swap = self._swapper(src, dst, self._device)
            for layer, (source, target) in pairs.items():
                swap(source, target)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
                self._pending[layer] = event

    def wait(self, layer: int) -> None:
        """Let the current stream wait for the layer's copies."""
        event = self._pending.pop(layer, None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
