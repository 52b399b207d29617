"""A layer of experts: each row goes through the few of many MLPs that its router prefers (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.errors import BadShape, BadValue
from quire.ops.activation import Activation
from quire.ops.linear import Linear


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """How a row's experts, and their shares, follow from the router's logits. Raises BadValue for what cannot be.

    A row's scores are the softmax of its logits, or the sigmoid of each. It prefers the experts with the largest scores
    plus bias; with groups, among those of the groups whose best scores plus bias have the largest sum.
    """

    num_chosen: int  # k
    renormalised: bool  # a row's shares are its experts' scores over their sum, not the scores
    epsilon: float = 0.0  # added to that sum
    scores: Literal["softmax", "sigmoid"] = "softmax"
    bias: Tensor | None = None  # fp32 [E]
    groups: int = 1  # of neighbouring experts, as many in each
    groups_chosen: int = 1
    group_best: int = 2  # scores of each group that count for it
    factor: float = 1.0  # multiplies the shares
    scales: Tensor | None = None  # fp32 [E]: multiply the experts' shares

    def __post_init__(self) -> None:
        if self.num_chosen < 1:
            raise BadValue(f"{self.num_chosen} experts are to be chosen; it must be at least 1")
        if not 1 <= self.groups_chosen <= self.groups:
            raise BadValue(f"{self.groups_chosen} groups of experts of {self.groups} are to be chosen")

    @property
    def is_plain(self) -> bool:
        """Whether the experts with the largest logits are chosen, and their shares are those of the softmax."""
        return self.scores == "softmax" and self.bias is None and self.groups == 1


@dataclass(frozen=True)
class ExpertLayer:
    """A router, and E MLPs of one kind; each row goes through those k that the router prefers.

    Raises BadValue or BadShape for another number of experts than the lists have.
    """

    router: Linear  # H -> E
    mlp_in: Sequence[Linear]  # [E]: H -> 2 I, gates and ups, or without gates I
    mlp_out: Sequence[Linear]  # [E]: I -> H
    choice: Choice
    activation: Activation = Activation()  # noqa: RUF009  # frozen
    weighed: Literal["results", "inputs"] = "results"  # what a row's shares multiply; inputs are rounded to their dtype

    def __post_init__(self) -> None:
        count, choice = len(self.mlp_in), self.choice
        if choice.num_chosen > count:
            raise BadValue(f"{choice.num_chosen} experts of {count} are to be chosen; it must be 1..{count}")
        if len(self.mlp_out) != count:
            raise BadShape(f"there are {count} mlp_in and {len(self.mlp_out)} mlp_out; they are pairs")
        if count % choice.groups or choice.num_chosen > count // choice.groups * choice.groups_chosen:
            raise BadValue(
                f"{choice.num_chosen} of {count} experts in {choice.groups} groups are to be chosen, out of "
                f"{choice.groups_chosen} of these"
            )
        for name, x in (("bias", choice.bias), ("scales", choice.scales)):
            if x is not None and (x.shape != (count,) or x.dtype != torch.float32 or not x.is_contiguous()):
                raise BadShape(f"choice.{name} is {x.dtype} of shape {tuple(x.shape)}; expected fp32 ({count},)")


def weighted_experts(
    x: Tensor,  # [T, H]
    layer: ExpertLayer,
    choose: Callable[[Tensor, Choice], tuple[Tensor, Tensor]],
    activate: Callable[[Tensor, Activation], Tensor],
    seen: Tensor | None = None,  # [T, H]
) -> Tensor:
    """`Backend.experts` out of a backend's other operators."""
    num_chosen = layer.choice.num_chosen
    chosen, shares = choose(layer.router(x if seen is None else seen).float(), layer.choice)
    by_expert, places = chosen.flatten().sort(stable=True)  # all T k choices
    ends = torch.searchsorted(by_expert, torch.arange(len(layer.mlp_in), device=x.device), right=True).tolist()
    gathered = x[places // num_chosen]
    if layer.weighed == "inputs":
        gathered = (gathered.float() * shares.flatten()[places, None]).to(x.dtype)
        shares = torch.ones_like(shares)
    results = torch.empty_like(gathered)
    start = 0
    for mlp_in, mlp_out, end in zip(layer.mlp_in, layer.mlp_out, ends, strict=True):
        if end > start:
            results[places[start:end]] = mlp_out(activate(mlp_in(gathered[start:end]), layer.activation))
        start = end
    by_choice = results.view(len(x), num_chosen, x.shape[1]).float()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for rank in range(num_chosen):
        total += by_choice[:, rank] * shares[:, rank, None]
    return total.to(x.dtype)


def chosen_experts(
    logits: Tensor,  # fp32 [T, E]
    choice: Choice,
    top_k_softmax: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    top_k: Callable[[Tensor, int], Tensor],
) -> tuple[Tensor, Tensor]:
    """`Backend.choose` out of a backend's other operators."""
    if choice.is_plain:
        chosen, shares = top_k_softmax(logits, choice.num_chosen)
    else:
        scores = logits.softmax(-1) if choice.scores == "softmax" else logits.sigmoid()
        preferred = scores if choice.bias is None else scores + choice.bias
        if choice.groups > 1:
            preferred = _within_groups(preferred, choice, top_k)
        chosen = top_k(preferred, choice.num_chosen)
        shares = scores.gather(1, chosen)
    if choice.renormalised:
        total = torch.zeros_like(shares[:, 0])
        for rank in range(choice.num_chosen):  # one after the other: a sum's order is the framework's matter
            total += shares[:, rank]
        total += choice.epsilon
        shares = shares / total[:, None]
    shares = shares * choice.factor
    return chosen, shares if choice.scales is None else shares * choice.scales[chosen]


def _within_groups(
    preferred: Tensor,  # fp32 [T, E]
    choice: Choice,
    top_k: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """The same with -inf for experts of other groups than the chosen ones."""
    grouped = preferred.view(len(preferred), choice.groups, -1)
    best = grouped.topk(min(choice.group_best, grouped.shape[2]), -1).values.sum(-1)  # [T, groups]
    others = torch.ones_like(best, dtype=torch.bool).scatter_(1, top_k(best, choice.groups_chosen), False)
    return grouped.masked_fill(others[:, :, None], -torch.inf).view_as(preferred)
