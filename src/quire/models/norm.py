"""The two normalisations of decoders, and none, each also in the form that ends a residual branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.ops import Ops


class Norm(Protocol):
    """Normalises over the last dimension."""

    def __call__(
        self,
        x: Tensor,  # [..., H]
    ) -> Tensor:
        """The normalised x."""

    def of_sum(
        self,
        branch: Tensor,  # [T, H]
        residual: Tensor,  # [T, H], becomes residual + branch in place
    ) -> Tensor:
        """The normalised new residual."""


@dataclass(frozen=True)
class RMSNorm:
    """Scaled by the root of the mean square."""

    weight: Tensor  # [H]
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def of_sum(self, branch: Tensor, residual: Tensor) -> Tensor:
        return self.ops.add_rms_norm(branch, residual, self.weight, self.eps)


@dataclass(frozen=True)
class LayerNorm:
    """Centred, and scaled by the standard deviation."""

    weight: Tensor  # [H]
    bias: Tensor  # [H]
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def of_sum(self, branch: Tensor, residual: Tensor) -> Tensor:
        residual += branch
        return self(residual)


class NoNorm:
    """Leaves everything as it is."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def of_sum(self, branch: Tensor, residual: Tensor) -> Tensor:
        residual += branch
        return residual
