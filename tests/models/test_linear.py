"""Linears: what they compute, and that a row's bits do not depend on the others."""

from __future__ import annotations

import importlib

import pytest
import torch

from quire.ops import load, native
from quire.ops.weights import linear
from quire.ops.weights.linear import (
    CutLinear,
    Linears,
    OneDnnLinear,
    PlainEmbedding,
    PlainLinear,
    RowLinear,
    rows_are_independent,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (0, 1, 2, 3, 5, 16, 17, 64, 100, 513)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does not run our own."""
    monkeypatch.setattr(native, "unavailable", lambda: "not here")


@pytest.fixture(params=["own", "oneDNN"])
def linears(request: pytest.FixtureRequest) -> Linears:
    """With our own kernels, and without: a backend without products takes those of the fastest one."""
    if request.param == "oneDNN":
        request.getfixturevalue("no_kernels")
    return load("reference").linears("cpu")


def tensors(dtype: torch.dtype, bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    gen = torch.Generator().manual_seed(0)
    x, weight = torch.randn(513, 96, generator=gen), torch.randn(200, 96, generator=gen) / 10
    return x.to(dtype), weight.to(dtype), torch.randn(200, generator=gen).to(dtype) if bias else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_product(linears: Linears, dtype: torch.dtype, bias: bool) -> None:
    x, weight, offset = tensors(dtype, bias)
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    for made in (linears.linear(weight, offset), RowLinear(weight, offset)):
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
def test_a_row_keeps_its_bits(linears: Linears, dtype: torch.dtype) -> None:
    x, weight, offset = tensors(dtype, bias=True)
    made = linears.linear(weight, offset)
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
    assert not rows_are_independent(Unreproducible(), Unreproducible(), torch.zeros(1, 8))


def test_the_probe_compares_two_ways() -> None:
    weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    one = RowLinear(weight, None)
    assert rows_are_independent(one, one, weight)
    assert not rows_are_independent(one, RowLinear(weight, torch.full((5,), 1e-6)), weight)


@pytest.mark.usefixtures("no_kernels")
def test_a_shape_is_probed_once_and_refused_shapes_go_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def probe(made: linear.Linear, like: linear.Linear, weight: torch.Tensor) -> bool:
        assert made is like
        asked.append((len(weight), weight.shape[1]))
        return len(weight) != 8

    monkeypatch.setattr(linear, "rows_are_independent", probe)
    linears = Linears()
    made = [linears.linear(torch.zeros(out, 16)) for out in (8, 4, 8, 4)]
    assert [type(one) for one in made] == [RowLinear, OneDnnLinear, RowLinear, OneDnnLinear]
    assert asked == [(8, 16), (4, 16)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("product", ["as it is", "widened", "row by row"])
def test_a_tied_weight_gives_rows_and_logits(
    linears: Linears, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, product: str
) -> None:
    """Rows bit for bit, and the same logits as from a head of its own, up to the order of sums."""
    x, weight, _ = tensors(dtype, bias=False)
    if product == "widened":
        monkeypatch.setattr(linear, "product_dtype", lambda dtype: torch.float32 if dtype in DTYPES else None)
    elif product == "row by row":
        monkeypatch.setattr(linear, "rows_are_independent", lambda *_: False)
    embedding, head = linears.tied(weight)
    token_ids = torch.tensor([199, 0, 16, 15, 199, 64])
    for ids in (token_ids, token_ids[:1], token_ids[:0]):
        embedded = embedding(ids)
        assert embedded.dtype is dtype
        assert torch.equal(embedded, weight[ids])
    embedding(token_ids).zero_()  # whose memory is the caller's
    assert torch.equal(embedding(token_ids), weight[token_ids])
    like = linears.head(weight)
    assert head(x).dtype is like(x).dtype
    torch.testing.assert_close(head(x), like(x), rtol=torch.finfo(dtype).eps, atol=1e-5)
    whole = head(x)
    for rows in ROWS:
        assert torch.equal(head(x[513 - rows :]), whole[513 - rows :])


def test_a_tied_weight_on_a_gpu_is_one_tensor() -> None:
    weight = torch.empty(8, 16, device="meta")
    embedding, head = Linears().tied(weight)
    assert isinstance(embedding, PlainEmbedding)
    assert isinstance(head, PlainLinear)
    assert embedding.weight is head.weight is weight


def test_logits_of_odd_vocabularies_are_cut_from_aligned_ones_on_a_gpu() -> None:
    weight = torch.empty(50_257, 16, dtype=torch.bfloat16, device="meta")
    embedding, tied = Linears().tied(weight)
    for head in (tied, Linears().head(weight)):
        assert isinstance(head, CutLinear)
        assert head(torch.empty(3, 16, dtype=torch.bfloat16, device="meta")).shape == (3, 50_257)
        assert head.padded.weight.shape == (50_264, 16)  # type: ignore[attr-defined]
    assert embedding.weight is tied.padded.weight  # type: ignore[attr-defined,union-attr]
    biased = Linears().head(weight, torch.empty(50_257, dtype=torch.bfloat16, device="meta"))
    assert biased.padded.bias.shape == (50_264,)  # type: ignore[attr-defined]
    assert biased(torch.empty(3, 16, dtype=torch.bfloat16, device="meta")).shape == (3, 50_257)
    x, small = torch.randn(3, 5), torch.randn(7, 5)
    padded = torch.cat([small, torch.zeros(1, 5)])
    assert torch.equal(CutLinear(PlainLinear(padded, None), 7)(x), (x @ padded.T)[:, :7])


def test_where_there_is_no_packed_product_rows_go_one_by_one() -> None:
    assert isinstance(load("cpu").linears("cpu").linear(torch.zeros(4, 8, dtype=torch.float64)), RowLinear)


def test_a_gpu_gets_the_product_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own only for reproducibility, and both shapes of its tiles only where they give the same bits."""
    ours = pytest.importorskip("quire.ops.triton.linear")
    backend = importlib.import_module("quire.ops.triton").BACKEND
    tried: list[str] = []

    def product(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: object, *_: object
    ) -> torch.Tensor:
        tried.append("few" if tile in (ours.FEW_ROWS, ours.FEW_ON_HOPPER) else "many")
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(ours, "linear", product)
    weight, x = torch.empty(8, 16, device="meta"), torch.empty(1_000, 16, device="meta")
    assert isinstance(backend.linears("cuda").linear(weight), PlainLinear)
    for alike, expected in ((True, ["few", "many"]), (False, ["few", "few"])):

        def probe(made: linear.Linear, like: linear.Linear, weight: torch.Tensor, alike: bool = alike) -> bool:
            made(x), like(x)
            return alike

        monkeypatch.setattr(ours, "rows_are_independent", probe)
        made = backend.linears("cuda", reproducible=True).linear(weight)
        assert tried == ["many", "few"], "the probe compares many with few"
        tried.clear()
        assert made(x[:3]).shape == (3, 8)
        assert made(x).shape == (1_000, 8)
        assert tried == expected
        tried.clear()


def test_many_rows_go_to_the_product_for_many() -> None:
    ours = pytest.importorskip("quire.ops.triton.linear")
    two = ours.TwoLinears(lambda x: x + 1, lambda x: x + 2)
    for rows in (0, 1, ours.SMALL, ours.SMALL + 1, 1_000):
        assert two(torch.zeros(rows, 1)).sum() == rows * (1 + (rows > ours.SMALL))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_our_own_product_on_a_gpu(dtype: torch.dtype, bias: bool) -> None:
    x, weight, offset = (None if one is None else one.cuda() for one in tensors(dtype, bias))
    made = load("triton", "cuda").linears("cuda", reproducible=True).linear(weight, offset)
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    whole = made(x)
    torch.testing.assert_close(
        whole.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0.02 if dtype != torch.float32 else 1e-5
    )
    for rows in ROWS:
        for first in (0, 7, 513 - rows):
            part = made(x[first : first + rows])
            assert torch.equal(part, whole[first : first + len(part)])
