"""Products with quantised weights on a CPU: the bits of the specification, on every instruction set."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape, BadValue, Unsupported
from quire.ops import native
from quire.ops.cpu.linear import PackedLinears, Packer
from quire.ops.weights.linear import Linears
from quire.ops.weights.quantised import QuantisedWeight, quantised
from tests.marks import spread
from tests.ops.conftest import use_library
from tests.ops.integers import BLOCKS, KINDS, as_bits, random_rows, random_weight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# out, in: single numbers, vectors and strips +- 1, groups +- 1, more than one stretch of segments
SHAPES = ((1, 1), (7, 3), (16, 64), (17, 129), (63, 127), (65, 128), (40, 576), (100, 1537), (33, 4100))
ROWS = (0, 1, 2, 5, 6, 7, 13, 24, 96, 97)
ISAS = () if native.unavailable() else native.runnable(native.library_path())
# Where integers are multiplied by tiles: one tile +- 1, several panels of strips, and ends of stretches of the inputs.
TILED = [isa for isa in ISAS if isa.startswith("amx")]
TILED_SHAPES = ((17, 63), (32, 65), (300, 1540), (100, 768), (33, 769))


@pytest.mark.parametrize(("kind", "shape"), spread(2, [*KINDS, *BLOCKS], SHAPES))
def test_every_instruction_set_has_the_specified_bits(backend, kind, shape):
    for dtype in DTYPES:
        weight = random_weight(kind, *shape, dtype)
        x = random_rows(97, weight.in_size, dtype)
        bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(1)).to(dtype)
        specified = Linears().linear(weight, bias)(x)
        made = Packer()(weight, bias)
        assert torch.equal(as_bits(made(x)), as_bits(specified))
        for rows in ROWS:
            for first in (0, 97 - rows):
                assert torch.equal(as_bits(made(x[first : first + rows])), as_bits(specified[first : first + rows]))


def exact_numbers(like: Tensor, gen: torch.Generator) -> Tensor:
    """Numbers that every processor draws alike, which does not hold of random normal ones."""
    whole = torch.randint(-999, 1000, like.shape, generator=gen)
    return (whole.float() * torch.exp2(torch.randint(-20, -10, like.shape, generator=gen))).to(like.dtype)


# The first half of SHA-256, over the results in fp32, bf16 and fp16. The same on x86-64 and on Arm.
DIGESTS = {
    "int4-32": "7c449c29648c65e9a90d0dfc928e82fc",
    "int4-64-zeros": "7f4581cbcaa69ebccb21f5c2479a7dae",
    "int4-128": "6ceac1b0648f5f66316431f5e8488bb1",
    "int4-128-zeros-order": "600a70ff8cb2ef7915b5c0123e214423",
    "int4-output": "b6ee21b6cd3ceb9ca92e1979ccbd3a5d",
    "int8-output": "bd83bccb7ba1bf9f7e2bdf628a0369f1",
    "int8-output-zeros": "f9b80c2461284bd23a0ef23a81eb70c5",
    "int8-32-zeros": "f74604efaa9af3fc9d73de913526cf7d",
    "int8-64": "4acccab675fa8f2288599ed4c45d7ca4",
    "int8-128": "13849af899897e3e8a8701438cdbbe37",
    "int8-rows": "d8369ba599ace378b75c52679c0cd815",
    "int4-rows": "8838bc0036d58f91c23c5b81d445be63",
    "blocks8": "2ee6dd53d2fbf0f1f86fc6d5b59d2d1a",
    "blocks5-order": "a98bc781e3145629e58a9ae38007593a",
    "blocks4": "6331dc224a2e7f81eab5fc6e2dab3640",
    "blocks4-minimums": "95f20881055b94a7db4b5d613e33d342",
    "blocks5-minimums": "ac1f6b8e74d25184553bc2c3d842958e",
    "sub4": "cdb497fc7b8e46be8952b7a84a948634",
    "sub5-order": "2fb0b799606739d08d15d32e84cae91b",
    "sub6": "b6a65c7f5775956b58e03fc509db2ee2",
}


@pytest.mark.parametrize("kind", [*KINDS, *BLOCKS])
def test_every_processor_has_the_same_bits(backend, kind):
    found = hashlib.sha256()
    for dtype in DTYPES:
        gen = torch.Generator().manual_seed(7)
        weight = random_weight(kind, 67, 700, dtype)
        weight = replace(weight, scales=exact_numbers(weight.scales, gen))
        if weight.minimums is not None:
            weight = replace(weight, minimums=exact_numbers(weight.minimums, gen))
        x = exact_numbers(torch.empty(40, weight.in_size), gen).to(dtype)
        bias = exact_numbers(torch.empty(67), gen).to(dtype)
        made = Packer()(weight, bias)
        for rows in (1, 5, 40):
            found.update(as_bits(made(x[:rows])).numpy().tobytes())
    assert found.hexdigest()[:32] == DIGESTS[kind]


@pytest.mark.slow
@pytest.mark.parametrize("library", TILED, indirect=True)
@pytest.mark.parametrize(("kind", "shape"), spread(len(TILED_SHAPES), [*KINDS, *BLOCKS], TILED_SHAPES))
def test_tiles_have_the_specified_bits_for_any_number_of_rows(library, kind, shape):
    """Few rows, which vectors take; up to 16 and 32; more than an item has, so that few are left for the second one."""
    weight = random_weight(kind, *shape, torch.bfloat16)
    x = random_rows(530, weight.in_size, torch.bfloat16)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(1)).bfloat16()
    specified = as_bits(Linears().linear(weight, bias)(x))
    made = Packer(library)(weight, bias)
    for rows in (*range(1, 41), 64, 96, 130, 515, 530):
        for first in (0, 530 - rows):
            assert torch.equal(as_bits(made(x[first : first + rows])), specified[first : first + rows])


@pytest.mark.parametrize("kind", [*KINDS, *BLOCKS])
def test_the_product_is_near_the_exact_one(backend, kind):
    """Only the rounding of x lies between, half a step of a group's largest number in 127."""
    weight = random_weight(kind, 60, 700, torch.float32)
    x = torch.randn(50, weight.in_size, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ weight.dequantised().double().T
    error = (Packer()(weight)(x).double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 0.03


@pytest.mark.parametrize("kind", ["int4-128", "int8-output", "int8-rows", "blocks5-minimums"])
def test_threads_and_strides_do_not_show(backend, kind):
    weight = random_weight(kind, 1_000, 200, torch.bfloat16)
    x = random_rows(150, weight.in_size, torch.bfloat16)
    made = PackedLinears().linear(weight)
    whole = made(x)
    for threads in (1, 2, 7, 16):
        torch.set_num_threads(threads)
        assert torch.equal(made(x[:40]), whole[:40])
    apart = torch.full((150, 333), torch.nan, dtype=x.dtype)
    apart[:, 7 : 7 + weight.in_size] = x
    assert torch.equal(made(apart[:, 7 : 7 + weight.in_size]), whole)
    assert torch.equal(made(x.T.contiguous().T), whole)


@pytest.mark.parametrize("kind", ["int4-128-zeros-order", "int8-output", "int8-rows", "blocks8", "sub4", "sub6"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_shows_in_its_row_alone(backend, kind, bad):
    weight = random_weight(kind, 50, 300, torch.bfloat16)
    x = random_rows(20, weight.in_size, torch.bfloat16)
    made = PackedLinears().linear(weight)
    whole = made(x)
    x[7, 250] = bad
    found = made(x)
    assert found[7].isnan().all()
    assert torch.equal(torch.cat([found[:7], found[8:]]), torch.cat([whole[:7], whole[8:]]))
    assert Linears().linear(weight)(x)[7].isnan().all()


@pytest.mark.parametrize("kind", [*KINDS, *BLOCKS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_the_weight(backend, kind, dtype):
    weight = random_weight(kind, 67, 259, dtype)
    places = torch.tensor([66, 0, 3, 3, 16, 15])
    made, specified = PackedLinears().tied(weight)[0], Linears().tied(weight)[0]
    assert torch.equal(as_bits(made(places)), as_bits(specified(places)))
    assert torch.equal(specified(places), weight.dequantised()[places].to(dtype))
    with pytest.raises(BadValue, match=r"places\[1\] is 67"):
        made(torch.tensor([1, 67]))


def test_logits_are_in_fp32(backend):
    weight, x = random_weight("int8-output", 40, 96, torch.bfloat16), random_rows(3, 96, torch.bfloat16)
    found = PackedLinears().head(weight)(x)
    assert found.dtype is torch.float32
    assert torch.equal(found, Linears().head(weight)(x))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 10**9])
def test_rounding_to_the_nearest(bits, group):
    weight = torch.randn(30, 333) * torch.exp2(torch.randint(-20, 20, (30, 1)))
    weight[3] = 0
    rounded = quantised(weight, bits, group, torch.bfloat16)
    error = (rounded.dequantised() - weight).abs()
    scales = rounded.scales.abs().repeat_interleave(min(333, group), 1)[:, :333]
    # With four bits the largest number of the other sign may lie beyond the last value: by a scale at most.
    assert (error <= scales * (0.5 if bits == 8 else 1) * (1 + 1e-5)).all()
    assert (rounded.dequantised()[3] == 0).all()
    assert ((error <= scales * 0.5001).float().mean() > 0.98).all()


def test_what_is_refused():
    values, scales = torch.zeros(4, 256, dtype=torch.uint8), torch.ones(4, 2)
    for wrong, error, said in (
        ({"bits": 3}, Unsupported, "bits is 3"),
        ({"group_size": 48}, Unsupported, "group_size is 48"),
        ({"scales": torch.ones(4, 3)}, BadShape, r"scales has shape \(4, 3\); expected \(4, 2\)"),
        ({"scales": torch.full((4, 2), torch.inf)}, BadValue, r"scales holds inf at \[0, 0\]"),
        ({"values": values + 16}, BadValue, r"values holds 16; of 4 bits they lie in 0..15"),
        ({"zeros": torch.full((4, 2), 17.0)}, BadValue, r"zeros holds 17.0 at \[0, 0\]; of 4 bits they are whole"),
        ({"zeros": torch.full((4, 2), 7.5)}, BadValue, r"zeros holds 7.5 at \[0, 0\]"),
        ({"order": torch.zeros(256, dtype=torch.int64)}, BadValue, "order is no permutation"),
        ({"activation_group": 256}, Unsupported, "rows with one scale"),
    ):
        fields = {
            "values": values,
            "scales": scales,
            "zeros": None,
            "bits": 4,
            "group_size": 128,
            "dtype": torch.float32,
        }
        with pytest.raises(error, match=said):
            QuantisedWeight(**fields | wrong)
    in_blocks = {
        "values": values,
        "scales": torch.ones(4, 1).half(),
        "zeros": None,
        "bits": 4,
        "group_size": 256,
        "dtype": torch.float32,
        "minimums": torch.ones(4, 1).half(),
        "sub_scales": torch.ones(4, 8, dtype=torch.int8),
        "sub_minimums": torch.ones(4, 8, dtype=torch.int8),
    }
    QuantisedWeight(**in_blocks)
    for wrong, error, said in (
        ({"bits": 8}, Unsupported, "bits is 8; it must be one of 4, 5, 6"),
        ({"group_size": 32}, Unsupported, "group_size is 32; it must be one of 256"),
        ({"values": values[:, :128]}, BadShape, "values has 128 inputs; blocks of 256"),
        ({"minimums": None}, Unsupported, "minimums is None; weights of 4 and 5 bits"),
        ({"sub_minimums": None}, Unsupported, "sub_minimums is None; they go with"),
        ({"bits": 6}, Unsupported, "minimums is given; weights of 6 bits have none"),
        ({"scales": torch.ones(4, 1)}, Unsupported, "minimums is given; weights with scales in fp32"),
        ({"scales": torch.ones(4, 1).bfloat16()}, BadDtype, r"scales is torch\.bfloat16; expected"),
        ({"zeros": torch.ones(4, 1)}, Unsupported, "zeros is given"),
        ({"activation_group": 32}, Unsupported, "activation_group is 32; of such a weight it must be 128"),
        (
            {"sub_scales": torch.ones(4, 4, dtype=torch.int8)},
            BadShape,
            r"sub_scales has shape \(4, 4\); expected \(4, 8\)",
        ),
        ({"sub_minimums": torch.full((4, 8), -1, dtype=torch.int8)}, BadValue, r"sub_minimums holds -1.0 at \[0, 0\]"),
        ({"minimums": torch.full((4, 1), torch.nan).half()}, BadValue, r"minimums holds nan at \[0, 0\]"),
    ):
        with pytest.raises(error, match=said):
            QuantisedWeight(**in_blocks | wrong)
    with pytest.raises(BadValue, match="only finite numbers"):
        quantised(torch.full((2, 2), torch.nan), 8, 2, torch.float32)


def by_rule(weight: Tensor, bits: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The definition, group by group: values and scales."""
    numbers, half = weight.float().numpy(), np.float32(2 ** (bits - 1))
    parts = []
    for first in range(0, numbers.shape[1], size):
        x = numbers[:, first : first + size]
        if bits == 8:
            scale = np.abs(x).max(1) / (half - 1)
        else:
            scale = np.where(x.max(1) > -x.min(1), x.max(1), x.min(1)) / -half
        steps = x / np.where(scale == 0, np.float32(1), scale)[:, None]
        parts.append((np.clip(np.rint(steps), -half, half - 1) + half, np.where(scale == 0, 0, scale)))
    values, scales = zip(*parts, strict=True)
    return np.concatenate(values, 1).astype(np.uint8), np.stack(scales, 1)


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_weights_are_rounded_by_the_rule(request, monkeypatch, natively, bits, dtype):
    """To the bit, by the library and by torch's operators, on any threads."""
    use_library(request, monkeypatch, None)
    if not natively:
        monkeypatch.setattr(native, "unavailable", lambda: "for the test")
    gen = torch.Generator().manual_seed(bits)
    for threads, (out_size, in_size, size) in enumerate(((1, 1, 1), (7, 129, 128), (33, 300, 64), (40, 4100, 4100)), 1):
        torch.set_num_threads(threads)
        drawn = torch.randn(out_size, in_size, generator=gen)
        zeros = torch.where(torch.rand(drawn.shape, generator=gen) < 0.5, 0.0, -0.0)
        sparse = torch.where(torch.rand(drawn.shape, generator=gen) < 0.99, zeros, drawn)
        halves = torch.randint(-16, 17, drawn.shape, generator=gen) / 2  # between two whole numbers
        for numbers in (drawn, drawn.abs(), -drawn.abs(), sparse, halves, drawn * 1e-7, drawn * 1e-40):
            weight = numbers.to(dtype)
            for given in (weight, weight.T.contiguous().T, torch.cat((weight, weight), 1)[:, :in_size]):
                made = quantised(given, bits, size, torch.float32)
                values, scales = by_rule(weight, bits, size)
                assert np.array_equal(made.values.numpy(), values)
                assert np.array_equal(made.scales.numpy().view(np.uint32), scales.view(np.uint32))


@pytest.mark.parametrize("natively", [True, False])
def test_what_cannot_be_rounded_is_refused(request, monkeypatch, natively):
    use_library(request, monkeypatch, None)
    if not natively:
        monkeypatch.setattr(native, "unavailable", lambda: "for the test")
    for dtype, bits, number in itertools.product(DTYPES, (4, 8), (torch.nan, torch.inf, -torch.inf)):
        weight = torch.ones(3, 70, dtype=dtype)
        weight[1, 67] = number
        with pytest.raises(BadValue, match=rf"the weight holds {number} at \[1, 67\]; only finite numbers"):
            quantised(weight, bits, 64, torch.float32)
    for shape in ((0, 4), (4, 0), (4,)):
        with pytest.raises(BadShape, match=r"weight has shape .*; expected \[out, in\], not empty"):
            quantised(torch.ones(shape), 8, 4, torch.float32)
