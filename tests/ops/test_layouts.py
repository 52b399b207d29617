"""Layouts: there and back without a bit changed, and what lies where."""

from __future__ import annotations

import pytest
import torch

from quire.errors import BadShape
from quire.ops import layouts

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(3, 2, 16, 64), (1, 1, 1, 8), (4, 3, 5, 24), (2, 5, 32, 16), (0, 2, 4, 8)]


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits: NaN of every kind, infinities, denormals."""
    gen = torch.Generator().manual_seed(sum(shape))
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(integers)
    return torch.randint(info.min, info.max, shape, generator=gen, dtype=integers).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_there_and_back(shape, dtype):
    cache = noise(shape, dtype)
    for there, back in (
        (layouts.nhd_from_hnd, layouts.hnd_from_nhd),
        (layouts.hnd_from_nhd, layouts.nhd_from_hnd),
        (layouts.pack_keys, layouts.unpack_keys),
        (layouts.pack_values, layouts.unpack_values),
    ):
        moved = there(cache)
        assert moved.is_contiguous()
        assert same_bits(back(moved), cache), there.__name__
        assert same_bits(back(there(cache.transpose(1, 2))), cache.transpose(1, 2).contiguous()), "strided"


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_everything_lies(dtype):
    cache = noise((3, 2, 5, 24), dtype)
    nhd, k, v = layouts.nhd_from_hnd(cache), layouts.pack_keys(cache), layouts.pack_values(cache)
    x = 16 // dtype.itemsize
    assert layouts.vector_size(cache) == x
    assert k.shape == (3, 2, 24 // x, 5, x)
    assert v.shape == (3, 2, 24, 5)
    for n, head, slot, d in ((0, 0, 0, 0), (2, 1, 4, 23), (1, 0, 3, 9), (2, 0, 1, 8)):
        number = cache[n, head, slot, d]
        for other in (nhd[n, slot, head, d], k[n, head, d // x, slot, d % x], v[n, head, d, slot]):
            assert same_bits(other[None], number[None])


def test_what_is_refused():
    with pytest.raises(BadShape, match=r"20; the packed layout needs a multiple of x = 8"):
        layouts.pack_keys(torch.zeros(1, 1, 4, 20, dtype=torch.float16))
    with pytest.raises(BadShape, match=r"x = 8, its last dimension; for torch.float32 x is 4"):
        layouts.unpack_keys(torch.zeros(1, 1, 2, 4, 8))
    for convert in (layouts.nhd_from_hnd, layouts.hnd_from_nhd, layouts.pack_keys, layouts.pack_values):
        with pytest.raises(BadShape, match=r"\(2, 3\)"):
            convert(torch.zeros(2, 3))
    with pytest.raises(BadShape, match=r"\[N, Hkv, D/x, B, x\]"):
        layouts.unpack_keys(torch.zeros(1, 1, 2, 4))
    with pytest.raises(BadShape, match=r"\[N, Hkv, D, B\]"):
        layouts.unpack_values(torch.zeros(2))


def test_a_copy_is_a_copy():
    """Also where the strides were right already: nothing that is written to one shows in the other."""
    for convert, shape in (
        (layouts.nhd_from_hnd, (3, 1, 4, 8)),
        (layouts.hnd_from_nhd, (3, 1, 4, 8)),
        (layouts.pack_keys, (3, 2, 4, 4)),
        (layouts.unpack_keys, (3, 2, 1, 4, 4)),
        (layouts.pack_values, (3, 2, 1, 8)),
        (layouts.unpack_values, (3, 2, 8, 1)),
    ):
        cache = torch.zeros(shape)
        convert(cache).fill_(1)
        assert not cache.any(), convert.__name__
