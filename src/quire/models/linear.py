"""Linear layers behind one function."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Linear:
    """x @ weight.T + bias. Several projections of the same input are one Linear, their weights stacked."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    def __call__(
        self,
        x: Tensor,  # [T, in]
    ) -> Tensor:
        """The projection: [T, out]."""
        return F.linear(x, self.weight, self.bias)
