"""Functions of numbers, in fp32, where Triton's own are off by too much or there is none. NaN stays NaN."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops import rounding

LN2_HIGH = tl.constexpr(0.693359375)  # exact in few bits
LN2_LOW = tl.constexpr(-2.12194440e-4)  # ln 2 less that
LOG2_E = tl.constexpr(1.4426950408889634)
SMALLEST = tl.constexpr(rounding.SMALLEST)
LARGEST = tl.constexpr(rounding.LARGEST)


@triton.jit
def exp(x):
    """e^x within a few units of the last place, where tl.exp is off by as many as |x|.

    x is n ln 2 + r with an integer n (Cody & Waite 1980), so that nothing large is rounded.
    """
    x = tl.where(x < -110.0, -110.0, tl.where(x > 110.0, 110.0, x))  # 0 and infinity lie within
    n = tl.floor(x * LOG2_E + 0.5)
    r = tl.fma(n, -LN2_LOW, tl.fma(n, -LN2_HIGH, x))
    half = tl.floor(n * 0.5)  # 2^n may overflow where e^x does not
    return tl.exp2(r * LOG2_E) * tl.exp2(half) * tl.exp2(n - half)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x), to its last places also where it is small: what rounding 1 + y adds to y is divided out again."""
    y = exp(-tl.abs(x))
    rounded = 1.0 + y
    error = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    return tl.where(x < 0.0, 0.0, x) + tl.where(rounded == 1.0, y, tl.log(rounded) * y / error)


@triton.jit
def is_finite(x):
    """Of each number."""
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def int8_scale(largest):
    """What the numbers of a row are multiplied with, and its scale, by the rule of `quire.ops.rounding`.

    largest: of the numbers in size, of some rows; infinite where one is infinite or NaN.
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
    """The nearest whole numbers, of two the even one; x lies within -127.5 and 127.5.

    Added to 1.5 * 2^23, a number up to 2^22 is rounded to a whole one. To be compiled without fusion.
    """
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)
