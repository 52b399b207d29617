"""The repairs of Triton's interpreter: what a kernel converts and computes there is what torch makes of it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests import interpreter

if torch.cuda.is_available():
    pytest.skip("kernels run on the GPU", allow_module_level=True)

NARROW = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def convert(x, y, n, BLOCK: tl.constexpr):
    for first in tl.range(0, n, BLOCK):  # bounds known at run time only, and `first` a tensor
        i = first.to(tl.int64) + tl.arange(0, BLOCK)
        values = tl.load(x + i, mask=i < n, other=0.0)
        tl.store(y + i, values.to(y.dtype.element_ty), mask=i < n)


@triton.jit
def product(a, b, c, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))


@triton.jit
def arithmetic(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = a + a * tl.full([N], 0.75, a.dtype)
    tl.store(y + i, tl.where(a > b, a, b))


@triton.jit
def extremes(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(y, tl.max(a, 0))
    tl.store(y + 1, tl.min(a, 0))
    tl.store(y + 2, tl.sum(tl.maximum(a, 1.0), 0))


@triton.jit
def fused(x, y, z, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.fma(tl.load(x + i), tl.load(y + i), tl.load(z + i)))


def every(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of a dtype of one or two bytes."""
    size = torch.finfo(dtype).bits
    bits = torch.arange(-(2 ** (size - 1)), 2 ** (size - 1))
    return bits.to({8: torch.int8, 16: torch.int16}[size]).view(dtype)


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.zeros(len(x), dtype=dtype)
    convert[(1,)](x, y, len(x), BLOCK=1024)
    return y


def check_same(got: torch.Tensor, want: torch.Tensor) -> None:
    got, want = got.double(), want.double()
    same = (got == want) & (got.signbit() == want.signbit()) | (got.isnan() & want.isnan())
    assert same.all(), f"{got[~same][:5]}, not {want[~same][:5]}"


@pytest.mark.parametrize("dtype", NARROW)
def test_widening_all_numbers(dtype):
    x = every(dtype)
    check_same(converted(x, torch.float32), x)


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_to_nearest_even(dtype):
    """All numbers, those half-way between two, the neighbours of both, and random ones of every size."""
    numbers = every(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    random = torch.randn(5_000, generator=torch.Generator().manual_seed(0))
    random = random * 2.0 ** torch.linspace(-140, 127, len(random))
    exact = torch.cat([numbers, ties, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.4e38])])
    inf = torch.tensor(torch.inf)
    near = torch.cat([exact.nextafter(inf), exact.nextafter(-inf)])
    x = torch.cat([exact, near, random, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    check_same(converted(x, dtype), x.to(dtype))


@pytest.mark.parametrize("source", NARROW[:2])
@pytest.mark.parametrize("dtype", NARROW)
def test_from_one_narrow_dtype_to_another(source, dtype):
    x = every(source)
    check_same(converted(x, dtype), x.to(dtype))


def test_integers_become_bf16():
    x = torch.randint(-(2**20), 2**20, (2_000,), dtype=torch.int32)
    check_same(converted(x, torch.bfloat16), x.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_dot(dtype):
    gen = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 32, generator=gen).to(dtype) for _ in range(2))
    c = torch.zeros(32, 32)
    product[(1,)](a, b, c, N=32)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW[:2]])
def test_arithmetic_and_comparison(dtype):
    x = torch.randn(256, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = torch.zeros_like(x)
    arithmetic[(1,)](x, y, N=256)
    b = x + x * 0.75
    check_same(y, torch.where(x > b, x, b))


def test_extremes_pass_over_nan_as_the_hardware_does():
    y = torch.zeros(3)
    extremes[(1,)](torch.tensor([2.0, torch.nan, -5.0, 0.5]), y, N=4)
    assert y.tolist() == [2.0, -5.0, 2.0 + 1.0 + 1.0 + 1.0]


def test_a_fused_product_and_sum_is_rounded_once():
    x = torch.full((4,), 1 + 2.0**-12)
    out = torch.zeros(4)
    fused[(1,)](x, x, -(x * x), out, N=4)
    assert (out == (x.double() * x.double() - (x * x).double()).float()).all()
    assert (out != 0).all()


def test_enabling_twice_is_enabling_once():
    interpreter.enable()
    test_dot(torch.bfloat16)
