"""Moving blocks between a device's pools and the host's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Swap(Protocol):
    """Copies blocks between pools on the device and pools on the host, layer by layer."""

    def copy(self, pairs: Mapping[int, tuple[Tensor, Tensor]], src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] of each layer's source to block dst[i] of its target, or begin to.

        pairs: source and target [N, ...] of each layer, one of them on the device.
        """

    def wait(self, layer: int) -> None:
        """Let what the caller does next with the layer's blocks come after their copies."""

    def close(self) -> None:
        """End all copies; the pools may go."""


class HostSwap:
    """Copies within the host's memory, done when `copy` returns."""

    def copy(self, pairs: Mapping[int, tuple[Tensor, Tensor]], src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy the blocks."""
        for source, target in pairs.values():
            target[torch.tensor(dst)] = source[torch.tensor(src)]

    def wait(self, layer: int) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is under way."""
