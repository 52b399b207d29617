"""From the hidden states of a text to one vector: pooling and dense layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from quire.models.pooling_config import DenseConfig, PoolingConfig
from quire.models.quantisation.stacking import Weight, tensor
from quire.ops.activation import Activation
from quire.ops.weights.linear import Linear, Linears


@dataclass(frozen=True)
class Dense:
    """A dense layer after pooling, in fp32."""

    config: DenseConfig
    linear: Linear
    norm: tuple[Tensor, Tensor | None] | None = None

    @classmethod
    def of(cls, config: DenseConfig, weights: Mapping[str, Weight], name: str, linears: Linears) -> Dense:
        """Read a layer of that name."""
        weight = tensor(weights[f"{name}.weight"]).float()
        bias = tensor(weights[f"{name}.bias"]).float() if config.bias else None
        norm = None
        if config.norm_eps is not None:
            norm_bias = tensor(weights[f"{name}.norm.bias"]) if config.norm_bias else None
            norm = (tensor(weights[f"{name}.norm.weight"]), norm_bias)
        return cls(config, linears.linear(weight, bias), norm)

    def __call__(
        self,
        x: Tensor,  # fp32 [E, in]
    ) -> Tensor:
        """Return the layer's result: fp32 [E, out]."""
        x = self.linear(x)
        if self.config.function == "tanh":
            x = torch.tanh(x)
        elif self.config.function is not None:
            x = Activation(self.config.function, gated=False).of(x)
        if self.norm is None or self.config.norm_eps is None:
            return x
        return layer_norm(x, x.shape[1:], *self.norm, self.config.norm_eps)


class Pooler:
    """Computes the vectors of texts from their hidden states. A vector's bits depend on its text alone."""

    def __init__(self, config: PoolingConfig, dense: Sequence[Dense] = ()) -> None:
        self.config, self.dense = config, tuple(dense)

    def __call__(
        self,
        hidden: Tensor,  # [T, H]
        counts: Sequence[int],  # [E], rows of each text; if one token is pooled, maybe that one alone
    ) -> Tensor:
        """Return the vectors before normalisation: fp32 [E, P]."""
        x = self._pooled(hidden, torch.tensor(counts, device=hidden.device))
        for dense in self.dense:
            x = dense(x)
        return x

    def _pooled(self, hidden: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0)
        match self.config.mode:
            case "last":
                return hidden[ends - 1].float()
            case "cls":
                return hidden[ends - counts].float()
            case "max":
                return torch.segment_reduce(hidden.float(), "max", lengths=counts)
        rows = hidden.double()
        if self.config.mode == "weighted":
            number = torch.arange(len(rows), device=rows.device) - (ends - counts).repeat_interleave(counts) + 1
            total = _sums(rows * number[:, None], counts)
            return (total / (counts * (counts + 1) / 2)[:, None]).float()
        total = _sums(rows, counts)
        divisor = counts.double().sqrt() if self.config.mode == "mean_sqrt_len" else counts
        return (total / divisor[:, None]).float()


def _sums(rows: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of each text's rows: [T, H] -> [E, H]. Each column is summed row after row."""
    if not rows.is_cpu:  # index_add_ adds in any order there
        return torch.segment_reduce(rows, "sum", lengths=counts)
    texts = torch.arange(len(counts)).repeat_interleave(counts)
    return rows.new_zeros(len(counts), rows.shape[1]).index_add_(0, texts, rows)  # 8 times as fast as segment_reduce
