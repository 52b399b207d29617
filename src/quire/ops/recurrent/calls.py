"""The arguments of the recurrent operators that are the same in every step of a layer, one object for each operator."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from torch import Tensor

from quire.ops.recurrent.records import RecurrentSpec


class Convolution(NamedTuple):
    """The arguments of `convolve`."""

    weight: Tensor  # fp32 [W, K]
    bias: Tensor | None  # fp32 [W]
    activation: Literal["silu"] | None


class Recurrence(NamedTuple):
    """The arguments of `gated_delta`, which has no `skip`, or of `state_space`."""

    decay_rate: Tensor  # fp32 [Hv]
    dt_bias: Tensor  # fp32 [Hv]
    skip: Tensor | None = None  # fp32 [Hv]
    dt_limits: tuple[float, float] = (0.0, math.inf)
    beta_scale: float = 1.0

    def parts(
        self,
        x: Tensor,  # [T, 2 * Hk * Dk + Hv * Dv]: qkv of `gated_delta`, or xbc of `state_space`
        spec: RecurrentSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the queries and keys, [T, Hk * Dk], and of the values, [T, Hv * Dv]."""
        keys, values = spec.key_width, spec.value_width
        if self.skip is None:
            return x[:, :keys], x[:, keys : 2 * keys], x[:, 2 * keys :]
        return x[:, values + keys :], x[:, values : values + keys], x[:, :values]


ScanRule = Literal["delta", "selective", "lru"]


class Scan(NamedTuple):
    """The weights of `Backend.scan`, which describes the rules.

    Args:
        rule: "delta", "selective" or "lru".
        rate: fp32 [Hv] for "delta", else [Hv, Dk, Dv], at most 0.
        bias: fp32, added to the gates: [Hv * Dk] for "delta", [Hv * Dv] for "selective"; for "lru" [2, Hv * Dv], also
            that of the side.
        skip: fp32 [Hv * Dv], the share of the values that is added to the result.
        beta_scale: multiplies beta, for "delta".
        floor: the least log-decay, if negative, for "delta".
    """

    rule: ScanRule
    rate: Tensor
    bias: Tensor
    skip: Tensor | None = None
    beta_scale: float = 1.0
    floor: float = 0.0

    @staticmethod
    def widths(rule: ScanRule, spec: RecurrentSpec) -> tuple[int, int, int]:
        """Return the widths of x, of the gates and of the side."""
        keys, values = spec.key_width, spec.value_width
        if rule == "delta":
            return 2 * keys + values, spec.num_heads * spec.dim_k, spec.num_heads
        return values, values, 2 * keys if rule == "selective" else values


class GatedNorm(NamedTuple):
    """The arguments of `gated_norm`."""

    weight: Tensor  # [H]
    eps: float
    heads: int
    first: Literal["norm", "gate"]
