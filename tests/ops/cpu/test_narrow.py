"""Products with weights of e4m3 and e2m1 on a CPU: near the exact ones, with a row's own bits wherever it stands."""

from __future__ import annotations

import pytest
import torch

from quire.errors import BadDtype, BadShape, BadValue
from quire.ops import native
from quire.ops.cpu.linear import PackedLinears, Packer
from quire.ops.weights.linear import Linears
from quire.ops.weights.narrow import E2M1, E4M3, NarrowFormat, NarrowWeight
from tests.ops.integers import as_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# out, in: single numbers, vectors and strips +- 1, lines +- 1, groups +- 1, several panels of strips
SHAPES = ((1, 1), (7, 3), (16, 32), (17, 33), (63, 127), (65, 128), (40, 576), (100, 1537), (140, 257))
ROWS = (1, 2, 5, 6, 7, 13, 16, 17, 33, 97)
ISAS = () if native.unavailable() else native.runnable(native.library_path())


def random_weight(form: NarrowFormat, out_size: int, in_size: int, dtype: torch.dtype) -> NarrowWeight:
    """Any numbers, many of them subnormal, with scales of many sizes."""
    gen = torch.Generator().manual_seed(out_size * in_size)
    codes = torch.randint(0, 2**form.bits, (out_size, in_size), generator=gen, dtype=torch.uint8)
    if form.bits == 8:
        codes[torch.rand(codes.shape, generator=gen) < 0.2] &= 0x87
        codes[codes & 0x7F == 0x7F] = 0x80  # NaN becomes -0
    shape = (out_size, -(-in_size // form.group_size))
    scales = torch.exp2(torch.randint(-9, -3, shape, generator=gen))
    if form.bits == 8:
        scales *= torch.randn(shape, generator=gen)
    return NarrowWeight(codes, scales, form, dtype)


@pytest.mark.parametrize("library", ISAS, indirect=True)
@pytest.mark.parametrize("form", [E4M3, E2M1], ids=lambda form: form.name)
def test_products_are_near_the_exact_ones_and_rows_keep_their_bits(library, form):
    for shape in SHAPES:
        for dtype in DTYPES:
            gen = torch.Generator().manual_seed(sum(shape))
            weight, x = random_weight(form, *shape, dtype), torch.randn(200, shape[1], generator=gen).to(dtype)
            x[2::5] = 0
            bias = torch.randn(shape[0], generator=gen).to(dtype)
            exact = x.double() @ weight.dequantised().double().T + bias.double()
            size = x.double().abs() @ weight.dequantised().double().abs().T + bias.double().abs()
            for made in (Packer(library)(weight, bias, torch.float32), Linears().head(weight, bias)):
                assert ((made(x).double() - exact).abs() <= size * 2e-6).all()
            made = Packer(library)(weight, bias)
            whole = made(x)
            assert ((whole.double() - exact).abs() <= size * 2e-6 + exact.abs() * torch.finfo(dtype).eps).all()
            for rows in ROWS:
                for first in (0, 200 - rows):
                    assert torch.equal(as_bits(made(x[first : first + rows])), as_bits(whole[first : first + rows]))


@pytest.mark.parametrize("library", ISAS, indirect=True)
@pytest.mark.parametrize("form", [E4M3, E2M1], ids=lambda form: form.name)
def test_every_code_is_its_number(library, form):
    """One input each, times 1: subnormals and both zeros among them."""
    codes = torch.arange(2**form.bits, dtype=torch.uint8)
    codes = codes[codes & 0x7F != 0x7F] if form.bits == 8 else codes
    numbers = form.table[codes.int()]
    for dtype in DTYPES:
        weight = NarrowWeight(codes[:, None], torch.ones(len(codes), 1), form, dtype)
        assert torch.equal(weight.dequantised()[:, 0], numbers)
        for rows in (1, 40):
            out = Packer(library)(weight, None, torch.float32)(torch.ones(rows, 1, dtype=dtype))
            assert torch.equal(out, numbers.expand(rows, -1))


def test_scales_at_the_ends_of_their_range(backend):
    x = torch.full((1, 32), 2.0**60, dtype=torch.bfloat16)
    for scale in (2.0**-127, 2.0**-126, 1.0, 2.0**60):
        weight = NarrowWeight(torch.full((3, 32), 2, dtype=torch.uint8), torch.full((3, 1), scale), E2M1, x.dtype)
        assert torch.equal(Packer()(weight, None, torch.float32)(x), torch.full((1, 3), 2.0**65 * scale))


@pytest.mark.parametrize("form", [E4M3, E2M1], ids=lambda form: form.name)
def test_threads_strides_and_other_rows_do_not_show(backend, form):
    weight = random_weight(form, 1_000, 200, torch.bfloat16)
    x = torch.randn(150, 200, generator=torch.Generator().manual_seed(3)).bfloat16()
    made = PackedLinears().linear(weight)
    whole = made(x)
    for threads in (1, 2, 7, 16):
        torch.set_num_threads(threads)
        assert torch.equal(made(x[:40]), whole[:40])
    apart = torch.full((150, 333), torch.nan, dtype=x.dtype)
    apart[:, 7:207] = x
    assert torch.equal(made(apart[:, 7:207]), whole)
    assert torch.equal(made(x.T.contiguous().T), whole)
    wrong = x.clone()
    wrong[3, 5], wrong[4, 0] = torch.nan, torch.inf
    found = made(wrong)
    assert not found[3].isfinite().any()
    assert torch.equal(found[[*range(3), *range(5, 150)]], whole[[*range(3), *range(5, 150)]])


def test_what_is_no_weight_is_refused():
    codes, scales = torch.zeros(4, 40, dtype=torch.uint8), torch.ones(4, 1)
    nan = codes.clone()
    nan[2, 3] = 0xFF
    for error, shown, arguments in (
        (BadValue, r"codes holds NaN at \[2, 3\]", (nan, scales, E4M3)),
        (BadValue, r"codes holds more than 4 bits at \[2, 3\]", (nan, torch.ones(4, 2), E2M1)),
        (BadValue, r"scales holds inf at \[0, 0\]; all must be finite", (codes, scales * torch.inf, E4M3)),
        (BadValue, r"scales holds 3\.0 at .*powers of two", (codes, torch.full((4, 2), 3.0), E2M1)),
        (BadShape, r"scales has shape \(4, 1\); expected \(4, 2\)", (codes, scales, E2M1)),
        (BadShape, r"codes has shape \(4,\)", (codes[:, 0], scales, E4M3)),
        (BadDtype, "codes is torch.int8", (codes.to(torch.int8), scales, E4M3)),
    ):
        with pytest.raises(error, match=shown):
            NarrowWeight(*arguments, torch.bfloat16)
