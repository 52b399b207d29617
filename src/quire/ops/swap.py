"""Copies of blocks between pools on the device and pools on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Swap(Protocol):
    """Copies blocks between pools on the device and pools on the host, layer by layer."""

    def copy(self, pairs: Mapping[int, tuple[Tensor, Tensor]], src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] of each layer's source to block dst[i] of its target, or start to.

        `pairs` has the source and the target [N, ...] of each layer; one of them is on the device.
        """

    def wait(self, layer: int) -> None:
        """Order later accesses of the caller to the layer's blocks after their copies."""

    def close(self) -> None:
        """End all copies. The pools may be freed afterwards."""


class HostSwap:
    """Copies within the host's memory, complete when `copy` returns."""

    def copy(self, pairs: Mapping[int, tuple[Tensor, Tensor]], src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy the blocks."""
        for source, target in pairs.values():
            target[torch.tensor(dst)] = source[torch.tensor(src)]

    def wait(self, layer: int) -> None:
        """Return at once: no copy is pending."""

    def close(self) -> None:
        """Return at once: no copy is pending."""
