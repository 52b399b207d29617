"""The linear layer: right against float64, and a row's bits are the same whatever comes with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape, BadStride, QuireError, Unsupported
from quire.ops.triton import linear as module
from quire.ops.triton.linear import (
    FEW_ON_HOPPER,
    FEW_ROWS,
    MANY_ROWS,
    DescribedLinear,
    LinearTile,
    TiledLinear,
    TiledLinears,
    describable,
    linear,
)
from tests.ops.conftest import DEVICES
from tests.ops.dense import check_close

DEVICE = DEVICES[-1]  # the interpreter's, or the GPU
TILES = [FEW_ROWS, MANY_ROWS, FEW_ON_HOPPER]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(rows: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random rows within wider ones of NaN."""
    gen = torch.Generator().manual_seed(seed)
    home = torch.full((rows, size + 24), torch.nan, dtype=dtype, device=DEVICE)[:, 8 : 8 + size]
    return home.copy_(torch.randn(rows, size, generator=gen))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "size", "columns"), [(1, 1, 1), (3, 64, 32), (5, 100, 47), (65, 33, 129), (0, 8, 8)])
def test_against_float64(tile, dtype, with_bias, rows, size, columns):
    x, weight = draw(rows, size, dtype), draw(columns, size, dtype, seed=1)
    bias = draw(1, columns, dtype, seed=2)[0] if with_bias else None
    got = linear(x, weight, bias, tile)
    x64, weight64 = x.cpu().double(), weight.cpu().double()
    offset = torch.zeros(columns).double() if bias is None else bias.cpu().double()
    want, terms = x64 @ weight64.T + offset, x64.abs() @ weight64.abs().T + offset.abs()
    assert got.dtype == dtype
    assert got.shape == (rows, columns)
    rounding = 0.51 * torch.finfo(dtype).eps * want.abs()
    check_close("linear", got.cpu().double(), want, rounding + 16 * torch.finfo(torch.float32).eps * terms)


@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(tile, dtype):
    x, weight, bias = draw(150, 200, dtype), draw(40, 200, dtype, seed=1), draw(1, 40, dtype, seed=2)[0]
    together = linear(x, weight, bias, tile)
    for begin, end in ((0, 1), (149, 150), (3, 5), (60, 77), (1, 129)):
        assert torch.equal(linear(x[begin:end], weight, bias, tile), together[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sections_that_are_divided_among_programs_or_not(monkeypatch, dtype):
    """The last of three sections is smaller. A row has the same bits alone and among many, in every kind of launch."""
    monkeypatch.setattr(module, "DIVIDES", True)
    monkeypatch.setattr(module, "rows_are_independent", lambda *linears: True)  # it is compared here
    launched, add = [], module.launch_add_sections
    monkeypatch.setattr(module, "launch_add_sections", lambda *sums: launched.append(len(sums[0])) or add(*sums))
    x, weight, bias = draw(70, 700, dtype), draw(40, 700, dtype, seed=1), draw(1, 40, dtype, seed=2)[0]
    product = TiledLinears().linear(weight, bias)
    few = product.few
    assert few.section == 256
    together = few(x)
    for begin, end in ((0, 1), (3, 20)):
        assert torch.equal(few(x[begin:end]), together[begin:end])
    assert launched == [3, 3, 3]
    assert torch.equal(linear(x, weight, bias, few.tile, few.section), together)
    assert torch.equal(product.many(x), together)
    x64, weight64 = x.cpu().double(), weight.cpu().double()
    terms = x64.abs() @ weight64.abs().T + bias.cpu().double().abs()
    want = x64 @ weight64.T + bias.cpu().double()
    rounding = 0.51 * torch.finfo(dtype).eps * want.abs()
    check_close("linear", together.cpu().double(), want, rounding + 16 * torch.finfo(torch.float32).eps * terms)


needs_descriptions = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() != (9, 0), reason="a kernel for Hopper"
)


@pytest.mark.slow
@needs_descriptions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "size", "columns", "section"),
    [(1, 8, 8, 0), (300, 72, 136, 0), (257, 64, 130, 0), (3, 200, 5, 0), (257, 520, 130, 128)],
)
def test_tiles_that_the_hardware_copies_have_the_same_bits(dtype, rows, size, columns, section):
    """Also of an x that it cannot copy, which then takes the other kernel, and of none."""
    weight, bias = draw(columns, size, dtype, seed=1).contiguous(), draw(1, columns, dtype, seed=2)[0]
    for x in (draw(rows, size, dtype), draw(rows, size + 1, dtype)[:, 1:], draw(rows, size, dtype)[:0]):
        for b in (bias, None):
            got = DescribedLinear(weight, b, TiledLinear(weight, b, FEW_ON_HOPPER, section))(x)
            assert torch.equal(got, linear(x, weight, b, FEW_ROWS if describable(x) else FEW_ON_HOPPER, section))
    assert describable(weight)
    assert not describable(draw(rows, size + 1, dtype)[:, 1:])
    assert not describable(draw(rows, size, torch.float32))


def test_columns_do_not_depend_on_the_others():
    """So a tensor-parallel share of a weight gives the same bits as the whole."""
    x, weight = draw(5, 70, torch.float32), draw(90, 70, torch.float32, seed=1)
    assert torch.equal(linear(x, weight[40:75], None, FEW_ROWS), linear(x, weight, None, FEW_ROWS)[:, 40:75])


def test_tiles_of_many_row_and_column_tiles_cover_all():
    """More tiles of rows than share the weights at a time, and not a multiple of them."""
    x, weight = draw(19, 16, torch.float32), draw(50, 16, torch.float32, seed=1)
    got = linear(x, weight, None, LinearTile(2, 16, 64, 4, 2))
    check_close("linear", got.cpu().double(), x.cpu().double() @ weight.cpu().double().T, 1e-5)


def test_nan_in_a_row_stays_in_that_row():
    x, weight = draw(4, 40, torch.bfloat16), draw(7, 40, torch.bfloat16, seed=1)
    clean = linear(x, weight, None, FEW_ROWS)
    x[2, 3] = torch.nan
    dirty = linear(x, weight, None, FEW_ROWS)
    assert dirty[2].isnan().all()
    assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])


REFUSED: list[tuple[Tensor, Tensor, Tensor | None, type[QuireError], str]] = [
    (torch.ones(8), torch.ones(4, 8), None, BadShape, r"x has shape \(8,\)"),
    (torch.ones(2, 8), torch.ones(8), None, BadShape, r"weight has shape \(8,\)"),
    (torch.ones(2, 8), torch.ones(4, 7), None, BadShape, r"weight has shape \(4, 7\)"),
    (torch.ones(2, 8), torch.ones(4, 8), torch.ones(5), BadShape, r"bias has shape \(5,\)"),
    (torch.ones(2, 8), torch.ones(4, 8).half(), None, BadDtype, "weight has dtype torch.float16"),
    (torch.ones(2, 8).double(), torch.ones(4, 8).double(), None, Unsupported, "x is torch.float64"),
    (torch.ones(8, 2).T, torch.ones(4, 8), None, BadStride, "x has strides"),
    (torch.ones(2, 8), torch.ones(8, 4).T, None, BadStride, "weight has strides"),
]


@pytest.mark.parametrize(("x", "weight", "bias", "error", "message"), REFUSED)
def test_refusals(x, weight, bias, error, message):
    with pytest.raises(error, match=message):
        linear(x.to(DEVICE), weight.to(DEVICE), None if bias is None else bias.to(DEVICE), FEW_ROWS)
