"""Rounding of rows to 8-bit integers with a scale. Every backend gives the same bits as this definition.

    largest = max |x[i]|                                  in fp32, to which x is rounded first
    scale   = largest / 127
    q[i]    = round_to_even(x[i] * (127 / largest))       in -127..127

A row whose numbers are all smaller than SMALLEST becomes zeros with the scale 0. A row with an infinite or NaN number
becomes zeros with the scale NaN, so that every result computed from it is NaN. Each step is one rounding of fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 2.0**-100  # 127 / x is finite
LARGEST = 127.0  # of the integers


def quantised_rows(
    x: Tensor,  # [..., D], of any floating-point dtype
) -> tuple[Tensor, Tensor]:
    """Return the integers, int8 [..., D], and each row's scale, fp32 [...]. An empty row has the scale 0."""
    x = x.float()
    largest = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])  # NaN if the row has a NaN
    finite, tiny = largest.isfinite(), largest < SMALLEST
    most = torch.full_like(largest, LARGEST)  # a Python number would be inverted and multiplied: rounded twice
    factor = torch.where(finite & ~tiny, most / largest, 0.0)
    q = torch.where(finite[..., None], x * factor[..., None], 0.0).round().to(torch.int8)
    scale = torch.where(tiny, 0.0, largest / most).masked_fill(~finite, torch.nan)
    return q, scale
