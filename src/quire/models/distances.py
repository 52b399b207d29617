"""Relative positions: the numbers of distances, and each layer's keys, queries and biases for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from quire.models.decoder_config import AttentionConfig, RelativeConfig
from quire.models.quantisation.stacking import Weight, tensor
from quire.ops.relative import Relative
from quire.ops.weights.linear import Linear, Linears


class Distances:
    """The relative positions that all layers of a model share."""

    def __init__(
        self,
        config: RelativeConfig,
        norm_eps: float,
        weights: Mapping[str, Weight],
        linears: Linears,
        longest: int,
        dtype: torch.dtype,
    ) -> None:
        """Read the embeddings of distances. longest: tokens of the longest sequence."""
        self.config, self._linears = config, linears
        self._bias: Tensor | None = None
        self._embedded = torch.empty(0)
        if self.config.bias:
            self._bias = tensor(weights["relative_bias"]).float().T.contiguous()  # [Hq, R]
        if self.config.keys or self.config.queries:
            embedded = tensor(weights["distances"])  # [R, H]
            if self.config.normed:
                weight, bias = (tensor(weights[f"distances_norm.{kind}"]) for kind in ("weight", "bias"))
                embedded = layer_norm(embedded.float(), weight.shape, weight, bias, norm_eps)
            self._embedded = embedded.to(dtype)
        device = self._embedded.device if self._bias is None else self._bias.device
        self._numbers = numbers_of(self.config, torch.arange(1 - longest, longest)).to(device)

    def of_layer(self, name: str, attention: AttentionConfig, linear: Callable[[str], Linear]) -> Relative:
        """Return the terms of a layer's scores. linear: makes its linear of a name."""
        made: dict[str, list[Linear]] = {}
        q_size = attention.q_size
        wanted = {"queries": self.config.queries, "keys": self.config.keys}
        for kind in (kind for kind, holds in wanted.items() if holds):
            if self.config.shared:
                first = 0 if kind == "queries" else q_size
                projected = linear(f"{name}qkv")(self._embedded)[:, first : first + q_size]
            else:
                projected = linear(f"{name}distance_{kind}")(self._embedded)
            by_head = projected.unflatten(1, (attention.num_heads, -1)).unbind(1)  # type: ignore[no-untyped-call]
            made[kind] = [self._linears.head(one.contiguous()) for one in by_head]
        return Relative(self._numbers, self._bias, **made)


def numbers_of(
    config: RelativeConfig,
    distances: Tensor,  # int64 [P]: row - key
) -> Tensor:
    """Return the number of each distance, in 0..R - 1: int64 [P]."""
    half = config.size // 2
    match config.buckets:
        case None:
            return (distances + half).clamp(0, config.size - 1)
        case "log, halves":  # one half for keys after the row; exact up to a quarter, then logarithmic (T5)
            exact, size = half // 2, distances.abs()
            wide = torch.log(size.clamp(min=1).float() / exact) / math.log(config.most / exact) * (half - exact)
            far = (exact + wide.long()).clamp(max=half - 1)
            return torch.where(size < exact, size, far) + half * (distances < 0)
        case "log, symmetric":  # exact up to a quarter to each side, then logarithmic (DeBERTa)
            exact = half // 2
            size = distances.abs().clamp(min=exact - 1).float()
            whole = torch.log(torch.tensor((config.most - 1) / exact))
            wide = torch.ceil(torch.log(size / exact) / whole * (exact - 1)) + exact
            far = torch.where(distances.abs() <= exact, distances.float(), wide * distances.sign()).long()
            return (far + half).clamp(0, config.size - 1)
