"""A layer of experts: each row goes through the few of many MLPs that its router prefers (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.linear import Linear
from quire.ops import Ops


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Which layers have experts in place of an MLP, and what these are: MLPs with silu, a gate and no biases."""

    layers: frozenset[int]
    count: int  # E
    per_token: int  # k, that each row goes through
    size: int  # I, of each of them
    renormalised: bool  # a row's shares are those among its own experts, not among all

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ModelError(f"{self.per_token} experts a token cannot be chosen of {self.count}")


@dataclass(frozen=True)
class Mlp:
    """The two linears of an MLP."""

    mlp_in: Linear  # H -> 2 I, or I without a gate
    mlp_out: Linear  # I -> H


@dataclass(frozen=True)
class Experts:
    """The router and the experts of one layer."""

    router: Linear  # H -> E
    experts: Sequence[Mlp]  # [E]
    per_token: int  # k
    renormalised: bool
    ops: Ops

    def __call__(
        self,
        x: Tensor,  # [T, H]
    ) -> Tensor:
        """What each row's experts say, each by its share: [T, H].

        Rows are gathered by expert, so that a weight is read once however many rows want it. How many those are has to
        be known on the host, which waits for a GPU here. The sum is formed in fp32, the preferred expert first, and a
        row's bits are those of its own experts.
        """
        chosen, shares = self.choose(x)
        by_expert, places = chosen.flatten().sort(stable=True)  # all T k choices
        ends = torch.searchsorted(by_expert, torch.arange(len(self.experts), device=x.device), right=True).tolist()
        gathered = x[places // self.per_token]
        results = torch.empty_like(gathered)
        start = 0
        for expert, end in zip(self.experts, ends, strict=True):
            if end > start:
                said = expert.mlp_out(self.ops.swiglu(expert.mlp_in(gathered[start:end])))
                results[places[start:end]] = said
            start = end
        by_choice = results.view(len(x), self.per_token, x.shape[1]).float()
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for rank in range(self.per_token):
            total += by_choice[:, rank] * shares[:, rank, None]
        return total.to(x.dtype)

    def choose(
        self,
        x: Tensor,  # [T, H]
    ) -> tuple[Tensor, Tensor]:
        """Each row's experts, int64 [T, k], the preferred one first, and their shares, fp32 [T, k].

        Of experts that a row likes equally, it prefers the first.
        """
        chosen, shares = self.ops.top_k_softmax(self.router(x).float(), self.per_token)
        if self.renormalised:
            total = torch.zeros_like(shares[:, 0])
            for rank in range(self.per_token):  # one after the other: a sum's order is the framework's matter
                total += shares[:, rank]
            shares = shares / total[:, None]
        return chosen, shares
