"""Token ids to hidden states: rows of the embedding, wherever its one copy stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.ops.cpu.linear import PackedLinear


class Embedding(Protocol):
    """A row of the embedding for each token."""

    def __call__(
        self,
        token_ids: Tensor,  # int64 [T]
    ) -> Tensor:
        """The rows, in memory of their own: [T, H]."""


@dataclass(frozen=True)
class PlainEmbedding:
    """Rows of a matrix."""

    weight: Tensor  # [V, H]; of a wider dtype where the output projection needs it so
    dtype: torch.dtype  # of the rows

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids].to(self.dtype)


@dataclass(frozen=True)
class PackedEmbedding:
    """Rows read back out of the weight of the output projection."""

    head: PackedLinear

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.head.weight_rows(token_ids)
