"""Linears: what they compute, and that a row's bits do not depend on the others."""

from __future__ import annotations

import pytest
import torch

from quire.models import linear
from quire.models.linear import LinearFactory, PackedLinear, RowLinear, rows_are_independent

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (0, 1, 2, 3, 5, 16, 17, 64, 100, 513)


def tensors(dtype: torch.dtype, bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    gen = torch.Generator().manual_seed(0)
    x, weight = torch.randn(513, 96, generator=gen), torch.randn(200, 96, generator=gen) / 10
    return x.to(dtype), weight.to(dtype), torch.randn(200, generator=gen).to(dtype) if bias else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_product(dtype: torch.dtype, bias: bool) -> None:
    x, weight, offset = tensors(dtype, bias)
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    for made in (LinearFactory()(weight, offset), RowLinear(weight, offset)):
        for rows in ROWS:
            out = made(x[:rows])
            assert out.dtype == dtype
            assert out.shape == (rows, 200)
            torch.testing.assert_close(
                out.double(),
                exact[:rows],
                rtol=2 * torch.finfo(dtype).eps,
                atol=0.02 if dtype != torch.float32 else 1e-5,
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_keeps_its_bits(dtype: torch.dtype) -> None:
    x, weight, offset = tensors(dtype, bias=True)
    made = LinearFactory()(weight, offset)
    whole = made(x)
    for rows in ROWS:
        for first in (0, 7, 513 - rows):
            part = made(x[first : first + rows])
            assert torch.equal(part, whole[first : first + len(part)])


class Unreproducible:
    """Adds its number of rows: what a library does that takes another order of summation."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] + (len(x) == 17) * 1e-6


def test_the_probe_finds_a_number_of_rows_with_other_bits() -> None:
    assert not rows_are_independent(Unreproducible(), 1, 8, torch.float32)


def test_a_shape_is_probed_once_and_refused_shapes_go_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def probe(made: linear.Linear, out_size: int, in_size: int, dtype: torch.dtype) -> bool:
        asked.append((out_size, in_size))
        return out_size != 8

    monkeypatch.setattr(linear, "rows_are_independent", probe)
    factory = LinearFactory()
    made = [factory(torch.zeros(out, 16)) for out in (8, 4, 8, 4)]
    assert [type(one) for one in made] == [RowLinear, PackedLinear, RowLinear, PackedLinear]
    assert asked == [(8, 16), (4, 16)]


def test_where_there_is_no_packed_product_rows_go_one_by_one() -> None:
    assert isinstance(LinearFactory()(torch.zeros(4, 8, dtype=torch.float64)), RowLinear)
