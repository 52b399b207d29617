"""Elementwise functions in fp32 that Triton lacks or computes too inaccurately. NaN stays NaN."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.weights import rounding

LN2_HIGH = tl.constexpr(0.693359375)  # exact in few bits
LN2_LOW = tl.constexpr(-2.12194440e-4)  # ln 2 - LN2_HIGH
LOG2_E = tl.constexpr(1.4426950408889634)
SMALLEST = tl.constexpr(rounding.SMALLEST)
LARGEST = tl.constexpr(rounding.LARGEST)


@triton.jit
def exp(x):
    """Compute e^x within a few units of the last place, where the error of tl.exp grows to |x| units.

    x is n ln 2 + r with an integer n (Cody & Waite 1980), so that no large number is rounded.
    """
    x = tl.where(x < -110.0, -110.0, tl.where(x > 110.0, 110.0, x))  # the results of these are 0 and infinity
    n = tl.floor(x * LOG2_E + 0.5)
    r = tl.fma(n, -LN2_LOW, tl.fma(n, -LN2_HIGH, x))
    half = tl.floor(n * 0.5)  # 2^n may overflow although e^x does not
    return tl.exp2(r * LOG2_E) * tl.exp2(half) * tl.exp2(n - half)


@triton.jit
def sigmoid(x):
    """Compute 1 / (1 + e^-x)."""
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def softplus(x):
    """Compute log(1 + e^x) accurately also for small results: the rounding error of 1 + y is divided out again."""
    y = exp(-tl.abs(x))
    rounded = 1.0 + y
    error = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    return tl.where(x < 0.0, 0.0, x) + tl.where(rounded == 1.0, y, tl.log(rounded) * y / error)


@triton.jit
def is_finite(x):
    """Return True for each finite number."""
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def int8_scale(largest):
    """Return the factor of the numbers of a row, and its scale, by the rule of `quire.ops.weights.rounding`.

    largest: the largest magnitude of each row, infinite if one of its numbers is infinite or NaN.
    """
    finite = largest < float("inf")
    counts = finite & (largest >= SMALLEST)
    divisor = tl.where(counts, largest, 1.0)
    most = tl.full(largest.shape, LARGEST, tl.float32)
    factor = tl.where(counts, tl.div_rn(most, divisor), 0.0)
    scale = tl.where(counts, tl.div_rn(divisor, most), 0.0)
    return factor, tl.where(finite, scale, float("nan"))


@triton.jit
def to_int8(x):
    """Round to the nearest integers, ties to even. x must be between -127.5 and 127.5.

    Adding 1.5 * 2^23 to a number up to 2^22 rounds it to an integer. Compile without fusion.
    """
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)
