"""oneDNN's product of bf16 with a weight that it packed before, which ours are compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def lacking() -> str | None:
    """Return the reason why this machine has no such product, or None if it has one."""
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    if not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return f"torch {torch.__version__} has no prepacked product"
    return None if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "oneDNN has no bf16 product for this CPU"


def prepacked(
    weight: Tensor,  # bf16 [out, in]
    rows: int,  # for which it is packed
) -> Callable[[Tensor], Tensor]:
    """The linear of that weight: bf16 [rows, in] -> bf16 [rows, out]."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def product(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")  # type: ignore[no-any-return]

    return product
