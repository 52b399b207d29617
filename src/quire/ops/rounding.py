"""How rows become 8-bit integers with a scale: defined here, and followed to the bit by every backend.

    largest = max |x[i]|                                  in fp32, to which x is rounded first
    scale   = largest / 127
    q[i]    = round_to_even(x[i] * (127 / largest))       in -127..127

A row whose numbers are all smaller than SMALLEST becomes zeros with the scale 0. One with an infinite or NaN number
becomes zeros with the scale NaN: whatever is computed with it shows that. Each step is one rounding of fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 2.0**-100  # 127 / x is a number
LARGEST = 127.0  # of the integers


def quantised_rows(
    x: Tensor,  # [..., D], of any floating-point dtype
) -> tuple[Tensor, Tensor]:
    """The integers, int8 [..., D], and each row's scale, fp32 [...]. A row without numbers has the scale 0."""
    x = x.float()
    largest = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])  # NaN where there is one
    finite, tiny = largest.isfinite(), largest < SMALLEST
    most = torch.full_like(largest, LARGEST)  # torch multiplies with the inverse of a number, which is rounded twice
    factor = torch.where(finite & ~tiny, most / largest, 0.0)
    q = torch.where(finite[..., None], x * factor[..., None], 0.0).round().to(torch.int8)
    scale = torch.where(tiny, 0.0, largest / most).masked_fill(~finite, torch.nan)
    return q, scale
