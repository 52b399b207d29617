"""Attention over a part of the keys, as a value: what it found, and how much it weighs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import BadValue, check_number
from quire.ops import validate
from quire.ops.backends import load


@dataclass(frozen=True)
class AttentionState:
    """Attention over some keys: its output, and the logarithm of the sum of exponentials of its scores.

    States over disjoint sets of keys merge into the state over their union. Quire's operators give natural logarithms;
    FlashInfer's give them to base 2. Merged as if they were of one base, they are wrong by a few percent and nothing
    shows it: so a state says its base, and refuses another's.

    Raises BadShape, BadDtype or BadValue.
    """

    out: Tensor  # [T, Hq, Dv]
    lse: Tensor  # fp32 [T, Hq] (float64 for a float64 output); -inf: the row has seen nothing
    base: float = math.e

    def __post_init__(self) -> None:
        validate.check_state("out", self.out, "lse", self.lse)
        check_number(BadValue, "base", self.base, 0.0)
        if self.base <= 1:
            raise BadValue(f"base is {self.base}; the base of a logarithm here is greater than 1")

    def merge(self, *others: AttentionState, backend: str = "auto") -> AttentionState:
        """The state over the keys of all of them, merged from left to right.

        Raises BadValue where the bases differ, BadShape or BadDtype where the tensors do not match.
        """
        for i, other in enumerate(others):
            if other.base != self.base:
                raise BadValue(
                    f"the LSE of state {i + 1} is to base {other.base:.6g}, that of the first one to base "
                    f"{self.base:.6g}; bring them to one with in_base"
                )
        merge = load(backend, self.out.device.type).merge_states
        natural = self.in_base(math.e)
        out, lse = natural.out, natural.lse
        for other in others:
            out, lse = merge(out, lse, other.out, other.in_base(math.e).lse)
        return AttentionState(out, lse).in_base(self.base)

    def in_base(self, base: float) -> AttentionState:
        """The same state with its LSE to another base. Raises BadValue."""
        if base == self.base:
            return self
        check_number(BadValue, "base", base, 1.0)
        return AttentionState(self.out, self.lse * (math.log(self.base) / math.log(base)), base)

    def shifted(
        self,
        bias: Tensor,  # [T, Hq]
    ) -> AttentionState:
        """The state as if this had been added to all of a row's scores: its output is the same, its LSE is not."""
        natural = bias.to(self.lse.dtype) / math.log(self.base)
        return AttentionState(self.out, torch.where(self.lse == -torch.inf, self.lse, self.lse + natural), self.base)
