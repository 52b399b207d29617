"""Attention over a part of the keys, as a value: what it found, and how much it weighs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from quire.errors import BadShape, BadValue, check_number
from quire.ops import validate
from quire.ops.backend import load


@dataclass(frozen=True, eq=False)  # tensors do not compare as a whole
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
        _check_base(self.base)

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
        _check_base(base)
        return AttentionState(self.out, self.lse * (math.log(self.base) / math.log(base)), base)

    def shifted(
        self,
        bias: Tensor,  # [T, Hq]
    ) -> AttentionState:
        """The state as if this had been added to all of a row's scores: its output is the same, its LSE is not.

        Raises BadShape.
        """
        lse_shape = tuple(self.lse.shape)
        if tuple(bias.shape) != lse_shape:
            raise BadShape(f"bias has shape {tuple(bias.shape)}; expected {lse_shape}, one number a row and head")
        return AttentionState(self.out, self.lse + bias.to(self.lse.dtype) / math.log(self.base), self.base)


def _check_base(base: float) -> None:
    check_number(BadValue, "base", base, 1.0)
    if base == 1:
        raise BadValue("base is 1; there is no logarithm to base 1")
