"""Products with quantised weights on a GPU: the bits of the specification, in every tile and for every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape, BadValue
from quire.ops.triton import quantised
from quire.ops.triton.backend import TritonBackend
from quire.ops.triton.linear import TiledLinears
from quire.ops.triton.packed import PackedWeight
from quire.ops.triton.quantised import (
    FEW_OF_WIDE,
    FEW_ROWS,
    MANY_ROWS,
    SOME_OF_WIDE,
    SOME_ROWS,
    IntegerLinear,
    IntegerLinears,
    integer_linear,
    rounded_rows,
)
from quire.ops.triton.tiles import processors_of
from quire.ops.weights.linear import Linears
from quire.ops.weights.quantised import PARTS, QuantisedEmbedding, QuantisedLinear, QuantisedWeight, rounded_groups
from tests.marks import of_long_runs, spread
from tests.ops.conftest import DEVICES
from tests.ops.integers import BLOCKS, KINDS, as_bits, random_rows, random_weight

pytestmark = [pytest.mark.slow, pytest.mark.triton]

DEVICE = DEVICES[-1]  # the interpreter's, or the GPU
ALL = [*KINDS, *BLOCKS]
IS_RIGHT = quantised.is_right  # which the tests of all else do without


def weight_of(kind: str, out_size: int, in_size: int, dtype: torch.dtype = torch.bfloat16) -> QuantisedWeight:
    return random_weight(kind, out_size, in_size, dtype).to(DEVICE)


def rows_of(rows: int, weight: QuantisedWeight) -> Tensor:
    return random_rows(rows, weight.in_size, weight.dtype).to(DEVICE)


def bias_of(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


def check(got: Tensor, want: Tensor) -> None:
    """The same bits, but that NaN is NaN."""
    assert got.dtype == want.dtype
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(as_bits(got)[~nan], as_bits(want)[~nan])


@pytest.fixture(autouse=True)
def _unproved(monkeypatch):
    """What a load compares is compared here, on more."""
    monkeypatch.setattr(quantised, "is_right", lambda weight: True)


@pytest.mark.parametrize("kind", spread(2, ALL))
def test_sections_that_are_divided_among_programs_or_not(monkeypatch, kind):
    """The last section is smaller. One row and many have the same bits, those of the definition."""
    monkeypatch.setattr(quantised, "DIVIDES", True)
    weight, launched = weight_of(kind, 40, 3_000 if kind in KINDS else 2_816), []
    add = quantised.launch_add_sections
    monkeypatch.setattr(quantised, "launch_add_sections", lambda *sums: launched.append(len(sums[0])) or add(*sums))
    x, bias = rows_of(18, weight), bias_of(40, torch.bfloat16)
    linear = IntegerLinears().linear(weight, bias)
    assert linear.section == 1_024
    together = linear(x)
    check(linear(x[3:4]), together[3:4])
    whole = integer_linear(x, linear.weight, bias.float(), torch.bfloat16, SOME_ROWS, linear.section)
    check(whole, together)
    assert launched == [3, 3]
    section = 0 if kind.endswith("-rows") else linear.section
    check(together, QuantisedLinear(weight, bias, torch.bfloat16, section)(x))


# What each tile computes: sizes that are multiples of no tile, and more than one turn of the kernel's loop.
CASES = {
    "few": (FEW_ROWS, torch.bfloat16, 37, 1100, 17),
    "some": (SOME_ROWS, torch.float16, 7, 300, 67),
    "few of wide": (FEW_OF_WIDE, torch.float32, 35, 700, 18),
    "some of wide": (SOME_OF_WIDE, torch.bfloat16, 67, 300, 35),
    "many": (MANY_ROWS, torch.float32, 130, 500, 65),
}


@pytest.mark.parametrize(("kind", "case"), spread(3, ALL, CASES))
def test_the_bits_of_the_specification(kind, case):
    tile, dtype, out_size, in_size, rows = CASES[case]
    weight, bias = weight_of(kind, out_size, in_size, dtype), bias_of(out_size, dtype)
    x = rows_of(rows, weight)
    got = integer_linear(x, PackedWeight.of(weight), bias.float(), dtype, tile)
    check(got, QuantisedLinear(weight, bias, dtype)(x))


@pytest.mark.parametrize("kind", spread(2, ALL))
def test_linears_and_heads(kind):
    weight = weight_of(kind, 20, 260)
    bias = bias_of(20, torch.bfloat16)
    linears = IntegerLinears()
    linear, head = linears.linear(weight, bias), linears.head(weight)
    assert isinstance(linear, IntegerLinear)
    for rows in (0, 1, 3, 17, 65):
        x = rows_of(rows, weight)
        check(linear(x), QuantisedLinear(weight, bias, torch.bfloat16)(x))
    x = rows_of(3, weight)
    check(head(x), QuantisedLinear(weight, None, torch.float32)(x))


def test_wide_weights_have_tiles_of_their_own():
    """As many outputs for each processor as `WIDE` says; on AMD's GPUs all have the same."""
    edge = quantised.WIDE * processors_of(DEVICE)
    narrow, wide = (quantised.tiles_of(weight_of("int8-rows", size, 64)) for size in (edge - 1, edge))
    assert (narrow[0], wide[0]) == (FEW_ROWS, FEW_ROWS if quantised.ON_AMD else FEW_OF_WIDE)
    for tiles in (narrow, wide):
        assert [tile.rows for tile in tiles] == sorted(tile.rows for tile in tiles)
        assert tiles[-1] == MANY_ROWS
    weight = weight_of("int4-32", edge, 64)
    linear = IntegerLinears().linear(weight)
    for rows in (1, 17, 40):
        x = rows_of(rows, weight)
        check(linear(x), QuantisedLinear(weight, None, torch.bfloat16)(x))


def test_a_kind_of_weight_is_compared_once(monkeypatch):
    """Where the sums are wrong, torch's operators serve all weights of that kind, and the log says so."""
    compared, warned = [], []
    monkeypatch.setattr(quantised, "is_right", lambda weight: compared.append(weight.bits) or weight.bits == 8)
    monkeypatch.setattr(quantised.log, "warning", lambda text, *values: warned.append(text % values))
    linears = IntegerLinears()
    four, eight = weight_of("int4-32", 20, 64), weight_of("int8-rows", 20, 64)
    for weight, serves in ((four, QuantisedLinear), (eight, IntegerLinear)) * 2:
        assert isinstance(linears.linear(weight), serves)
        assert isinstance(linears.head(weight), serves)
        assert isinstance(linears.tied(weight)[1], serves)
    assert compared == [4, 8]
    assert warned == ["the kernel of 4-bit weights gives wrong sums here; torch's slow operators serve them"]


@pytest.mark.parametrize("kind", ["int4-32", of_long_runs("sub6")])
def test_what_is_compared(kind):
    weight = weight_of(kind, 70, 260)
    assert IS_RIGHT(weight)
    scales = weight.scales.clone()
    scales[0, 0] = torch.nan
    assert IS_RIGHT(weight.derived(scales=scales))  # both make NaN of it
    wrong = integer_linear

    def off_by_one_output(x, *rest):
        out = wrong(x, *rest)
        return out.roll(1, 1) if len(x) > 64 else out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised, "integer_linear", off_by_one_output)
        assert not IS_RIGHT(weight)


@pytest.mark.parametrize("shape", [(1, 1), (1, 128), (33, 129), (3, 2049)], ids=str)
@pytest.mark.parametrize("kind", ["int4-32", "int4-output", "int8-rows", "int4-rows"])
def test_sizes_at_edges(kind, shape):
    """One number; a row in whole groups; one number more; more than a whole row that a program rounds at a time."""
    weight = weight_of(kind, *shape, torch.float32)
    x = rows_of(2, weight)
    check(IntegerLinears().linear(weight)(x), QuantisedLinear(weight, None, torch.float32)(x))


def test_rows_longer_than_are_rounded_at_a_time():
    weight = weight_of("int8-rows", 2, quantised.ROUNDED_WHOLE + 100)
    x = rows_of(2, weight)
    check(IntegerLinears().linear(weight)(x), QuantisedLinear(weight, None, torch.bfloat16)(x))


def test_the_largest_sums():
    """All numbers at the ends of their range: nothing overflows."""
    for kind in ("int8-output-zeros", "int8-rows", "int4-rows", "sub5-order", "sub6", "sub4"):
        weight = weight_of(kind, 3, 1024, torch.float32)
        weight = weight.derived(values=torch.full_like(weight.values, 2**weight.bits - 1))
        if weight.sub_scales is not None:
            weight = weight.derived(sub_scales=torch.full_like(weight.sub_scales, -128))
        if weight.zeros is not None:
            weight = weight.derived(zeros=torch.zeros_like(weight.zeros))
        x = torch.ones(2, 1024, device=DEVICE)
        x[1] = -1.0
        check(IntegerLinears().linear(weight)(x), QuantisedLinear(weight, None, torch.float32)(x))


@pytest.mark.parametrize("kind", ["int4-128", "int4-128-zeros-order", "int8-rows", "blocks5-order"])
def test_strides_do_not_show(kind):
    weight = weight_of(kind, 9, 200)
    linear, x = IntegerLinears().linear(weight), rows_of(5, weight)
    apart = torch.full((5, 2 * weight.in_size + 9), torch.nan, dtype=x.dtype, device=DEVICE)
    apart[:, 3 : 3 + weight.in_size] = x
    assert torch.equal(linear(apart[:, 3 : 3 + weight.in_size]), linear(x))
    assert torch.equal(linear(x.T.contiguous().T), linear(x))
    apart[:, 8 : 8 + 2 * weight.in_size : 2] = x
    assert torch.equal(linear(apart[:, 8 : 8 + 2 * weight.in_size : 2]), linear(x))


@pytest.mark.parametrize("kind", ["int4-128-zeros-order", "int8-output", "int8-rows", "blocks4", "sub4", "sub6"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_shows_in_its_row_alone(kind, bad):
    weight = weight_of(kind, 12, 300)
    linear, x = IntegerLinears().linear(weight), rows_of(20, weight)
    clean = linear(x)
    x[7, 250] = bad
    dirty = linear(x)
    assert dirty[7].isnan().all()
    assert torch.equal(dirty[[*range(7), *range(8, 20)]], clean[[*range(7), *range(8, 20)]])


@pytest.mark.parametrize("kind", ["int4-32", "int8-output", "int8-rows"])
def test_rows_are_rounded_by_the_rule(kind):
    """Halfway between two integers to the even one; numbers that are too small to zeros with the scale 0."""
    weight = weight_of(kind, 1, 256, torch.float32)
    x = torch.zeros(3, 256, device=DEVICE)
    x[0] = torch.arange(256, device=DEVICE) % 128 - 0.5
    x[0, ::128] = 127.0
    x[1] = 2.0**-101
    made = rounded_rows(x, PackedWeight.of(weight).kind, 1)
    values, scales = rounded_groups(x, weight.activation_group)
    assert torch.equal(made.values[:, :256], values)
    assert torch.equal(made.scales[: scales.shape[1]].T, scales)
    assert values[0, 1:5].tolist() == [0, 2, 2, 4]


@pytest.mark.parametrize("kind", ALL)
def test_rows_of_a_packed_weight_are_those_that_were_packed(kind):
    weight = weight_of(kind, 11, 300)
    index = torch.tensor([10, 0, 0, 3], device=DEVICE)
    packed = PackedWeight.of(weight)
    got, want = packed.rows(index), weight.rows(index)
    for name in PARTS:
        made, given = getattr(got, name), getattr(want, name)
        assert (made is None) == (given is None)
        assert made is None or (made.dtype == given.dtype and torch.equal(made, given)), name
    assert torch.equal(QuantisedEmbedding(packed)(index), QuantisedEmbedding(weight)(index))
    assert QuantisedEmbedding(packed)(index[:0]).shape == (0, weight.in_size)


def test_a_weight_may_be_strided():
    weight = weight_of("int4-128", 32, 512)
    apart = weight.derived(values=weight.values.T.contiguous().T, scales=weight.scales.T.contiguous().T)
    assert torch.equal(PackedWeight.of(apart).values, PackedWeight.of(weight).values)
    assert torch.equal(PackedWeight.of(apart).scales, PackedWeight.of(weight).scales)


def test_four_bits_take_half_a_byte():
    weight = weight_of("int4-128", 64, 1024)
    assert PackedWeight.of(weight).values.nbytes == 64 * 1024 // 2


def test_embeddings_stay_packed_and_are_held_once():
    weight = weight_of("int4-32", 40, 64)
    index = torch.tensor([3, 39], device=DEVICE)
    embedding, head = IntegerLinears().tied(weight)
    assert isinstance(head, IntegerLinear)
    assert embedding.weight is head.weight
    assert torch.equal(embedding(index), QuantisedEmbedding(weight)(index))
    x = rows_of(3, weight)
    check(head(x), QuantisedLinear(weight, None, torch.float32)(x))
    assert torch.equal(IntegerLinears().embedding(weight)(index), embedding(index))


def test_the_backend_has_these_products_reproducible_or_not():
    weight = weight_of("int8-128", 5, 256)
    for reproducible in (False, True):
        linears = TritonBackend().linears("cuda", reproducible)
        assert isinstance(linears, TiledLinears) is reproducible
        assert isinstance(linears.linear(weight), IntegerLinear)
        assert isinstance(linears.head(weight), IntegerLinear)


def test_what_is_no_weight_of_integers_is_the_frameworks():
    weight = torch.randn(6, 8, device=DEVICE)
    x = torch.randn(3, 8, device=DEVICE)
    for make in ("linear", "head"):
        torch.testing.assert_close(getattr(IntegerLinears(), make)(weight)(x), getattr(Linears(), make)(weight)(x))
    double = replace(weight_of("int8-64", 3, 64), dtype=torch.float64)
    assert isinstance(IntegerLinears().linear(double), QuantisedLinear)


REFUSED = [
    (torch.ones(8), BadShape, r"x has shape \(8,\); expected \[T, in\]"),
    (torch.ones(2, 63), BadShape, r"x has shape \(2, 63\); expected \(2, 64\)"),
    (torch.ones(2, 64).half(), BadDtype, "x has dtype torch.float16; expected torch.float32"),
    (torch.ones(2, 64, device="meta"), BadValue, "x is on meta"),
]


@pytest.mark.parametrize(("x", "error", "message"), REFUSED)
def test_refusals(x, error, message):
    linear = IntegerLinears().linear(weight_of("int8-64", 4, 64, torch.float32))
    with pytest.raises(error, match=message):
        linear(x if x.is_meta else x.to(DEVICE))


def test_a_bias_of_another_size_is_refused():
    with pytest.raises(BadShape, match=r"bias has shape \(5,\); expected \(4,\)"):
        IntegerLinears().linear(weight_of("int8-64", 4, 64), torch.ones(5, device=DEVICE))
