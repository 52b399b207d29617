"""Terms of attention's scores that depend on the distance between a row and a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.weights.linear import Linear


@dataclass(frozen=True, eq=False)
class Relative:
    """The terms of scores that depend on the distance between a row and a key, by the distance's number in 0..R - 1."""

    numbers: Tensor  # int64 [2 P - 1]; entry d + P - 1 is the number of the distance d = row - key
    bias: Tensor | None = None  # fp32 [Hq, R], added to scaled scores
    keys: Sequence[Linear] | None = None  # of each head: a query's products with the key of each distance, fp32 [T, R]
    queries: Sequence[Linear] | None = None  # of each head: a key's products with the query of each distance

    def of(
        self,
        head: int,
        q: Tensor,  # [T, D]
        k: Tensor,  # [T, D]
        numbers: Tensor,  # int64 [T, T]
        scale: float,
    ) -> Tensor:
        """Return these terms for the rows and keys of a sequence: fp32 [T, T], or [] without any."""
        terms = torch.zeros((), device=q.device)
        if self.keys is not None:
            terms = terms + self.keys[head](q).float().gather(1, numbers) * scale
        if self.queries is not None:
            terms = terms + self.queries[head](k).float().gather(1, numbers.T).T * scale
        return terms if self.bias is None else terms + self.bias[head][numbers]
