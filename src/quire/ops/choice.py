"""The choice of a row's experts and their shares from the router's logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.errors import BadValue, check_integer
from quire.ops.checks.tensors import check_tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """The rule that chooses a row's experts and their shares from the router's logits.

    A row's scores are the softmax of its logits, or the sigmoid of each. The row prefers the experts with the largest
    scores plus bias; with groups, among the experts of the groups whose best scores plus bias have the largest sum.

    Raises BadValue for an invalid field.
    """

    num_chosen: int  # k
    renormalised: bool  # a row's shares are its experts' scores divided by their sum, not the scores
    epsilon: float = 0.0  # added to that sum
    scores: Literal["softmax", "sigmoid"] = "softmax"
    bias: Tensor | None = None  # fp32 [E]
    groups: int = 1  # of neighbouring experts, of equal size
    groups_chosen: int = 1
    group_best: int = 2  # number of best scores of a group that are summed
    factor: float = 1.0  # multiplies the shares
    scales: Tensor | None = None  # fp32 [E]: multiply the experts' shares

    def __post_init__(self) -> None:
        if self.num_chosen < 1:
            raise BadValue(f"{self.num_chosen} experts are to be chosen; it must be at least 1")
        if not 1 <= self.groups_chosen <= self.groups:
            raise BadValue(f"{self.groups_chosen} groups of experts of {self.groups} are to be chosen")
        if self.scores not in ("softmax", "sigmoid"):
            raise BadValue(f"choice.scores is {self.scores!r}; it must be 'softmax' or 'sigmoid'")
        check_integer(BadValue, "choice.group_best", self.group_best, 1)

    def check(self, num_experts: int) -> None:
        """Raise BadValue, BadShape or BadDtype unless the rule fits `num_experts` experts."""
        if self.num_chosen > num_experts:
            raise BadValue(f"{self.num_chosen} experts of {num_experts} are to be chosen; it must be 1..{num_experts}")
        if num_experts % self.groups or self.num_chosen > num_experts // self.groups * self.groups_chosen:
            raise BadValue(
                f"{self.num_chosen} of {num_experts} experts in {self.groups} groups are to be chosen, out of "
                f"{self.groups_chosen} of these"
            )
        for name, x in (("choice.bias", self.bias), ("choice.scales", self.scales)):
            if x is not None:
                check_tensor(name, x, (num_experts,), torch.float32, x.device, any_strides=True)

    @property
    def is_plain(self) -> bool:
        """True if the experts with the largest logits are chosen, with their shares of the softmax."""
        return self.scores == "softmax" and self.bias is None and self.groups == 1


def chosen_experts(
    logits: Tensor,  # fp32 [T, E]
    choice: Choice,
    top_k_softmax: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    top_k: Callable[[Tensor, int], Tensor],
) -> tuple[Tensor, Tensor]:
    """Compute `Backend.choose` with a backend's other operators."""
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
        for rank in range(choice.num_chosen):  # one by one: the order of torch's sum is not specified
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
    """Return `preferred` with -inf for the experts of groups that are not chosen."""
    grouped = preferred.view(len(preferred), choice.groups, -1)
    best = torch.zeros_like(grouped[:, :, 0])  # [T, groups]
    for scores in grouped.topk(min(choice.group_best, grouped.shape[2]), -1).values.unbind(-1):
        best += scores  # one by one, as above
    others = torch.ones_like(best, dtype=torch.bool).scatter_(1, top_k(best, choice.groups_chosen), False)
    return grouped.masked_fill(others[:, :, None], -torch.inf).view_as(preferred)
