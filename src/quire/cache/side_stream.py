"""Swapping on a GPU: blocks move on a stream of their own, beside the computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch


class Run(NamedTuple):
    """Blocks that follow each other in both pools: src, src + 1, ... go to dst, dst + 1, ..."""

    src: int
    dst: int
    length: int


def runs(src: Sequence[int], dst: Sequence[int]) -> list[Run]:
    """The pairs of block ids, in their order, consecutive ones put together."""
    found: list[Run] = []
    for a, b in zip(src, dst, strict=True):
        last = found[-1] if found else None
        if last is not None and (a, b) == (last.src + last.length, last.dst + last.length):
            found[-1] = last._replace(length=last.length + 1)
        else:
            found.append(Run(a, b, 1))
    return found


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

    def __init__(self, device: torch.device, host: Sequence[torch.Tensor]) -> None:
        """Pin the host's pool, until `close`: exactly this memory, where PyTorch's pinned allocations round up."""
        self._device = device
        self._host = host
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pending: dict[int, torch.cuda.Event] = {}  # by layer, after its last copy
        for tensor in host:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)))

    def close(self) -> None:
        """Wait for copies that are under way, and let the host's pool be memory like any other."""
        self._stream.synchronize()
        for tensor in self._host:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]

    def copy(self, pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]], blocks: Sequence[Run]) -> None:
        """Queue the copies of these blocks, layer after layer. pairs: source and target [N, ...] of each layer."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for layer, (source, target) in pairs.items():
                for src, dst, length in blocks:
                    target[dst : dst + length].copy_(source[src : src + length], non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
                self._pending[layer] = event

    def wait(self, layer: int) -> None:
        """Let the current stream wait for the layer's copies."""
        event = self._pending.pop(layer, None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
