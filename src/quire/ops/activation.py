"""What stands between the two linears of an MLP."""

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
    """f(gate) * (up + offset) of a row that holds gates, then ups; without a gate f of the row.

    Raises BadValue for a function that is not known, and for numbers that mean nothing.
    """

    function: Function = "silu"
    gated: bool = True
    slope: float = 1.0  # silu is x * sigmoid(slope * x)
    limit: float | None = None  # gates are at most this; ups lie within its two sides
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
        """Numbers of a row that come out of so many."""
        return size // 2 if self.gated else size

    def of(self, x: Tensor) -> Tensor:
        """The activation of rows [..., 2 I] or [..., I], computed in their dtype: [..., I]."""
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
