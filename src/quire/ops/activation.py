"""The activation between the two linears of an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.errors import BadValue

Function: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared", "sigmoid"]
FUNCTIONS: tuple[Function, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared", "sigmoid")  # by number


@dataclass(frozen=True)
class Activation:
    """f(gate) * (up + offset) of a row that has gates, then ups; without a gate, f of the row.

    Raises BadValue for an unknown function, and for numbers that do not apply to it.
    """

    function: Function = "silu"
    gated: bool = True
    slope: float = 1.0  # silu is x * sigmoid(slope * x)
    limit: float | None = None  # gates are clamped to at most `limit`, ups to -limit..limit
    offset: float = 0.0  # added to each up

    def __post_init__(self) -> None:
        if self.function not in FUNCTIONS:
            raise BadValue(f"activation is {self.function!r}; it must be one of {', '.join(FUNCTIONS)}")
        if self.slope != 1.0 and self.function != "silu":
            raise BadValue(f"a slope of {self.slope} is silu's; the activation is {self.function!r}")
        if self.offset != 0.0 and not self.gated:
            raise BadValue(f"an offset of {self.offset} is for gated activations")
        if self.limit is not None and not self.limit > 0:
            raise BadValue(f"an activation's limit is {self.limit}; it must be positive")

    def out_size(self, size: int) -> int:
        """Return the size of an output row for an input row of `size` numbers."""
        return size // 2 if self.gated else size

    def of(self, x: Tensor) -> Tensor:
        """Apply the activation to rows [..., 2 I] or [..., I], in their dtype: [..., I]."""
        gate, up = x.chunk(2, -1) if self.gated else (x, None)
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
        gate = self._function(gate)
        if up is None:
            return gate
        if self.limit is not None:
            up = up.clamp(-self.limit, self.limit)
        return gate * (up + self.offset)

    def _function(self, x: Tensor) -> Tensor:
        match self.function:
            case "silu":
                return x * torch.sigmoid(self.slope * x)
            case "gelu":
                return F.gelu(x)
            case "gelu_tanh":
                return F.gelu(x, approximate="tanh")
            case "relu":
                return F.relu(x)
            case "relu_squared":
                return F.relu(x).square()
            case "sigmoid":
                return torch.sigmoid(x)
