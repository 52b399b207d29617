"""A layer of experts: each row goes through the few of many MLPs that its router prefers (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import BadShape, BadValue
from quire.ops.linear import Linear


@dataclass(frozen=True)
class ExpertLayer:
    """A router, and E MLPs of silu and a gate; each row goes through those k that the router prefers.

    Raises BadValue or BadShape for another number of experts than the lists have.
    """

    router: Linear  # H -> E
    mlp_in: Sequence[Linear]  # [E]: H -> 2 I, gates and ups
    mlp_out: Sequence[Linear]  # [E]: I -> H
    num_chosen: int  # k
    renormalised: bool  # a row's shares are those among its own experts, not among all

    def __post_init__(self) -> None:
        count = len(self.mlp_in)
        if not 1 <= self.num_chosen <= count:
            raise BadValue(f"{self.num_chosen} experts of {count} are to be chosen; it must be 1..{count}")
        if len(self.mlp_out) != count:
            raise BadShape(f"there are {count} mlp_in and {len(self.mlp_out)} mlp_out; they are pairs")


def weighted_experts(
    x: Tensor,  # [T, H]
    layer: ExpertLayer,
    top_k_softmax: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    swiglu: Callable[[Tensor], Tensor],
) -> Tensor:
    """`Backend.experts` out of a backend's other operators."""
    chosen, shares = choose(x, layer, top_k_softmax)
    by_expert, places = chosen.flatten().sort(stable=True)  # all T k choices
    ends = torch.searchsorted(by_expert, torch.arange(len(layer.mlp_in), device=x.device), right=True).tolist()
    gathered = x[places // layer.num_chosen]
    results = torch.empty_like(gathered)
    start = 0
    for mlp_in, mlp_out, end in zip(layer.mlp_in, layer.mlp_out, ends, strict=True):
        if end > start:
            results[places[start:end]] = mlp_out(swiglu(mlp_in(gathered[start:end])))
        start = end
    by_choice = results.view(len(x), layer.num_chosen, x.shape[1]).float()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for rank in range(layer.num_chosen):
        total += by_choice[:, rank] * shares[:, rank, None]
    return total.to(x.dtype)


def choose(
    x: Tensor,  # [T, H]
    layer: ExpertLayer,
    top_k_softmax: Callable[[Tensor, int], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Each row's experts, int64 [T, k], the most probable one first, and their shares, fp32 [T, k].

    Of experts that are equally probable, the first one comes first.
    """
    chosen, shares = top_k_softmax(layer.router(x).float(), layer.num_chosen)
    if layer.renormalised:
        total = torch.zeros_like(shares[:, 0])
        for rank in range(layer.num_chosen):  # one after the other: a sum's order is the framework's matter
            total += shares[:, rank]
        shares = shares / total[:, None]
    return chosen, shares
