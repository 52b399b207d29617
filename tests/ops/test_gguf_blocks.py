"""Blocks of GGUF's types as weights: the numbers that llama.cpp's own package reads out of them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from torch import Tensor

from quire.errors import BadDtype, BadShape, BadValue, Unsupported
from quire.ops import native
from quire.ops.cpu.linear import Packer
from quire.ops.weights.gguf_blocks import FLOATS, FORMATS, BlockWeight, row_bytes, weight_of
from quire.ops.weights.linear import Linears
from quire.ops.weights.narrow import NarrowWeight

HALVES = {  # where blocks of each kind have fp16 numbers
    "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # fmt: skip
SCALES = (0.0, -0.0, 1.0, -0.37, 6e-8, -6e-8, 3e-5, 65504.0, -1e-3)  # among them none, and those below the normal ones


def random_blocks(kind: str, rows: int, in_size: int, seed: int = 0, scales: tuple[float, ...] = SCALES) -> Tensor:
    """Any bytes, with finite scales of every size: uint8 [rows, bytes of a row]."""
    rng = np.random.default_rng(seed)
    form = FORMATS[kind]
    blocks = rng.integers(0, 256, (rows * in_size // form.inputs, form.nbytes), dtype=np.uint8)
    for place in HALVES[kind]:
        chosen = np.where(
            rng.random(len(blocks)) < 0.2, rng.choice(scales, len(blocks)), rng.normal(size=len(blocks)) * 0.01
        )
        blocks[:, place : place + 2] = chosen.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(blocks.reshape(rows, -1))


@pytest.mark.parametrize("reader", ["native", "torch"])
@pytest.mark.parametrize("kind", FORMATS)
def test_numbers_are_those_of_the_format(kind, reader, monkeypatch):
    if reader == "torch":
        monkeypatch.setattr(native, "unavailable", lambda: "it is to be read without the library")
    elif reason := native.unavailable():
        pytest.skip(reason)
    for rows, in_size, apart in ((1, 256, 0), (37, 768, 0), (5, 2048, 3)):
        blocks = random_blocks(kind, rows, in_size, seed=rows)
        blocks = torch.cat([torch.full((rows, apart), 255, dtype=torch.uint8), blocks], 1)[:, apart:]
        weight = weight_of(kind, blocks, in_size, torch.float32)
        expected = quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
        assert isinstance(weight, BlockWeight)
        assert torch.equal(weight.dequantised(), torch.from_numpy(expected))
        assert weight.nbytes == blocks.numel()
        some = torch.tensor([rows - 1, 0, rows // 2, 0])
        assert torch.equal(weight.rows(some).dequantised(), torch.from_numpy(expected)[some])


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_are_packed_as_their_integers_are(kind):
    """Straight from several parts, whose rows lie apart and do not fill strips, and by way of a byte a number."""
    if reason := native.unavailable():
        pytest.skip(reason)
    packer = Packer()
    order = torch.randperm(768, generator=torch.Generator().manual_seed(0))
    for sizes, apart in (((1,), 0), ((16,), 0), ((37,), 3), ((5, 16, 30), 3)):
        whole = random_blocks(kind, sum(sizes), 768, seed=sizes[0])
        parts = [
            torch.cat([torch.full((len(p), apart), 255, dtype=torch.uint8), p], 1)[:, apart:]
            for p in whole.split(sizes)
        ]
        weight = BlockWeight(kind, tuple(parts), 768, torch.float32, order)
        straight, by_integers = packer(weight), packer(weight.whole())
        assert torch.equal(straight.packed, by_integers.packed)
        some = torch.randint(sum(sizes), (9,))
        assert torch.equal(straight.weight_rows(some), weight.rows(some).dequantised())
        joined = BlockWeight(kind, tuple(parts[:1]), 768, torch.float32).with_outputs(
            [BlockWeight(kind, (part,), 768, torch.float32) for part in parts[1:]]
        )
        assert torch.equal(packer(joined).packed, straight.packed)


def test_numbers_of_mxfp4():
    blocks = torch.randint(0, 256, (40, 3 * 17), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    blocks[:, ::17] = torch.arange(120).view(40, 3) * 2  # exponents, among them the first and nearly the last
    weight = weight_of("MXFP4", blocks, 96, torch.float32)
    assert isinstance(weight, NarrowWeight)
    expected = quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(weight.dequantised(), torch.from_numpy(expected))
    blocks[3, 17] = 255
    with pytest.raises(BadValue, match=r"scales holds inf at \[3, 1\]"):
        weight_of("MXFP4", blocks, 96, torch.float32)


@pytest.mark.parametrize("kind", FORMATS)
def test_products_are_near_the_exact_ones(kind):
    """Rows of x are rounded as finely as llama.cpp rounds them, or more so."""
    weight = weight_of(kind, random_blocks(kind, 60, 512, scales=(0.01, 0.0)), 512, torch.float32)
    x = torch.randn(20, 512, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ weight.dequantised().double().T
    error = (Linears().linear(weight)(x).double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 0.02


@pytest.mark.parametrize("kind", FLOATS)
def test_numbers_that_are_not_quantised(kind):
    numbers = torch.randn(7, 33).to(FLOATS[kind])
    stored = numbers.view(torch.uint8)
    assert torch.equal(weight_of(kind, stored, 33, FLOATS[kind]), numbers)
    assert torch.equal(weight_of(kind, stored, 33, torch.float32), numbers.float())
    apart = torch.zeros(7, stored.shape[1] + 3, dtype=torch.uint8)  # as they may lie in a file
    apart[:, 3:] = stored
    assert torch.equal(weight_of(kind, apart[:, 3:], 33, FLOATS[kind]), numbers)


def test_what_is_refused():
    with pytest.raises(Unsupported, match="IQ2_XS are not served; F32"):
        row_bytes("IQ2_XS", 256)
    with pytest.raises(BadShape, match="Q4_K has blocks of 256 inputs, which do not divide 640"):
        row_bytes("Q4_K", 640)
    with pytest.raises(BadShape, match=r"64 inputs of Q8_0 are \[out, 68\] bytes"):
        weight_of("Q8_0", torch.zeros(2, 67, dtype=torch.uint8), 64, torch.float32)
    with pytest.raises(BadDtype, match=r"expected torch\.uint8"):
        weight_of("Q8_0", torch.zeros(2, 68), 64, torch.float32)
    with pytest.raises(BadShape, match="bytes of a row must be next to each other"):
        weight_of("Q8_0", torch.zeros(68, 2, dtype=torch.uint8).T, 64, torch.float32)
    blocks = random_blocks("Q8_0", 2, 64)
    blocks[1, 34:36] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    with pytest.raises(BadValue, match=r"scales holds inf at \[1, 1\]"):
        weight_of("Q8_0", blocks, 64, torch.float32)
