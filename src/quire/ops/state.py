"""Attention over a part of the keys as a value: its output and the weight of these keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from quire.errors import BadShape, BadValue, check_number
from quire.ops.checks.attention import check_state
from quire.ops.registry import load


@dataclass(frozen=True, eq=False)  # tensors do not compare as a whole
class AttentionState:
    """Attention over some keys: its output, and the logarithm of the sum of exponentials of its scores.

    States over disjoint sets of keys merge into the state over their union. Quire's operators return natural
    logarithms, FlashInfer's return logarithms to base 2. Merging the two as if they had one base would give results
    that are wrong by a few percent, without an error. So a state knows its base and refuses to merge with another one.

    Raises:
        BadShape, BadDtype: if `out` and `lse` do not match.
        BadValue: if they are on different devices, or for a base that is 1, below 1 or not finite.

    Example:
        >>> out, lse = torch.ones(3, 4, 64), torch.zeros(3, 4)
        >>> a, b = ops.AttentionState(out, lse), ops.AttentionState(3 * out, lse)
        >>> a.merge(b).out[0, 0, 0]
        tensor(2.)
    """

    out: Tensor  # [T, Hq, Dv]
    lse: Tensor  # fp32 [T, Hq] (float64 for a float64 output); -inf: the row has seen no key
    base: float = math.e  # of the logarithm

    def __post_init__(self) -> None:
        check_state("out", self.out, "lse", self.lse)
        _check_base(self.base)

    def merge(self, *others: AttentionState, backend: str = "auto") -> AttentionState:
        """Merge this state with others over disjoint sets of keys, from left to right.

        Args:
            others: states of the same shapes, dtypes and base.
            backend: name of the backend that merges, as in `load`.

        Returns:
            The state over the union of the keys, to the same base.

        Raises:
            BadValue: if the bases differ.
            BadShape, BadDtype: if the tensors do not match.
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
        """Convert the LSE to another base.

        Args:
            base: a number greater than 1.

        Returns:
            The same state with its LSE to `base`.

        Raises:
            BadValue: for a base that is 1, below 1 or not finite.
        """
        if base == self.base:
            return self
        _check_base(base)
        return AttentionState(self.out, self.lse * (math.log(self.base) / math.log(base)), base)

    def shifted(
        self,
        bias: Tensor,  # [T, Hq]
    ) -> AttentionState:
        """Return the state as if `bias` had been added to all scores of a row: the output is the same, the LSE is not.

        Raises:
            BadShape: if `bias` does not have the shape of the LSE.
        """
        lse_shape = tuple(self.lse.shape)
        if tuple(bias.shape) != lse_shape:
            raise BadShape(f"bias has shape {tuple(bias.shape)}; expected {lse_shape}, one number a row and head")
        return AttentionState(self.out, self.lse + bias.to(self.lse.dtype) / math.log(self.base), self.base)


def _check_base(base: float) -> None:
    check_number(BadValue, "base", base, 1.0)
    if base == 1:
        raise BadValue("base is 1; there is no logarithm to base 1")
