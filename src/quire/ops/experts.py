"""A layer of experts: each row is processed by k of E MLPs, chosen by a router (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.errors import BadShape
from quire.ops.activation import Activation
from quire.ops.choice import Choice
from quire.ops.collectives import Columns
from quire.ops.weights.linear import Linear


@dataclass(frozen=True)
class ExpertLayer:
    """A router and E MLPs of one kind; each row is processed by the k MLPs that the router prefers.

    Raises BadValue, BadShape or BadDtype if the lists and the choice do not have the same number of experts.
    """

    router: Linear  # H -> E
    mlp_in: Sequence[Linear]  # [E]: H -> 2 I, gates and ups, or without gates I
    mlp_out: Sequence[Linear]  # [E]: I -> H
    choice: Choice
    activation: Activation = Activation()  # noqa: RUF009  # frozen
    weighed: Literal["results", "inputs"] = "results"  # multiplied by a row's shares; inputs are rounded to their dtype
    inner: Columns | None = None  # of I, if divided among the ranks of a group; mlp_out then has a part of H

    def __post_init__(self) -> None:
        count = len(self.mlp_in)
        self.choice.check(count)
        if len(self.mlp_out) != count:
            raise BadShape(f"there are {count} mlp_in and {len(self.mlp_out)} mlp_out; they are pairs")


def weighted_experts(
    x: Tensor,  # [T, H]
    layer: ExpertLayer,
    choose: Callable[[Tensor, Choice], tuple[Tensor, Tensor]],
    activate: Callable[[Tensor, Activation], Tensor],
    seen: Tensor | None = None,  # [T, H]
) -> Tensor:
    """Compute `Backend.experts` with a backend's other operators."""
    if not len(x):
        return torch.empty_like(x)
    num_chosen = layer.choice.num_chosen
    chosen, shares = choose(layer.router(x if seen is None else seen).float(), layer.choice)
    by_expert, places = chosen.flatten().sort(stable=True)  # all T k choices
    ends = torch.searchsorted(by_expert, torch.arange(len(layer.mlp_in), device=x.device), right=True).tolist()
    gathered = x[places // num_chosen]
    if layer.weighed == "inputs":
        gathered = (gathered.float() * shares.flatten()[places, None]).to(x.dtype)
        shares = torch.ones_like(shares)
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]  # of each expert
    activated = activate(_by_parts(layer.mlp_in, gathered, parts), layer.activation)
    if layer.inner is not None:
        activated = layer.inner.gathered(activated)
    found = _by_parts(layer.mlp_out, activated, parts)
    results = torch.empty_like(found)
    results[places] = found
    by_choice = results.view(len(x), num_chosen, results.shape[1]).float()
    total = torch.zeros_like(by_choice[:, 0])
    for rank in range(num_chosen):
        total += by_choice[:, rank] * shares[:, rank, None]
    return total.to(x.dtype)


def _by_parts(linears: Sequence[Linear], x: Tensor, parts: Sequence[slice]) -> Tensor:
    """Apply each linear to its part of the rows, and concatenate the results."""
    return torch.cat([linear(x[part]) for linear, part in zip(linears, parts, strict=True) if part.start < part.stop])
