"""Our own linear on a CPU: what it computes, and that only the row, the weight and the ISA decide on its bits."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.errors import BadShape, BadValue, Unsupported
from quire.ops.cpu.linear import BLOCK, Packer
from quire.ops.memory import HUGE_PAGE
from tests.ops.integers import as_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# out, in: single numbers, vectors and strips +- 1, more than one stretch of lanes, odd numbers of inputs
SHAPES = ((1, 1), (7, 1), (15, 7), (16, 64), (17, 65), (63, 33), (65, 96), (960, 576), (100, 1536), (130, 4097))
ROWS = (0, 1, 2, 5, 6, 7, 13, 24, 95, 96, 97, 193)


def tensors(dtype: torch.dtype, out_size: int, in_size: int) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(out_size * in_size)
    x, weight = torch.randn(400, in_size, generator=gen), torch.randn(out_size, in_size, generator=gen) / in_size**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(out_size, generator=gen).to(dtype)


def whole_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype == torch.float32 else torch.int16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_and_its_bits(backend, dtype, shape):
    x, weight, bias = tensors(dtype, *shape)
    pack = Packer()
    made, without_bias, unrounded = pack(weight, bias), pack(weight), pack(weight, bias, torch.float32)
    exact = x.double() @ weight.double().T
    eps = torch.finfo(dtype).eps
    near = {"rtol": eps, "atol": 4 * shape[1] * torch.finfo(torch.float32).eps + eps / 64}
    torch.testing.assert_close(made(x).double(), exact + bias.double(), **near)
    torch.testing.assert_close(without_bias(x).double(), exact, **near)
    torch.testing.assert_close(unrounded(x).double(), exact + bias.double(), rtol=1e-6, atol=near["atol"] - eps / 64)
    assert torch.equal(unrounded(x).to(dtype), made(x))
    whole = as_bits(made(x))
    for rows in ROWS:
        for first in (0, 3, 400 - rows):
            assert torch.equal(as_bits(made(x[first : first + rows])), whole[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_show(backend, dtype):
    x, weight, bias = tensors(dtype, 1_000, 96)
    made = Packer()(weight, bias)
    whole = as_bits(made(x))
    for threads in (2, 7, 16):
        torch.set_num_threads(threads)
        for rows in (1, 40, 400):
            assert torch.equal(as_bits(made(x[:rows])), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_size", [64, 65])
def test_any_strides(backend, dtype, in_size):
    """Rows that lie apart, that start at odd places, that stand in columns; a transposed weight."""
    x, weight, bias = tensors(dtype, 100, in_size)
    made = Packer()(weight, bias)
    whole = as_bits(made(x))
    for offset in (0, 1, 2, 3):
        wide = torch.full((400, in_size + 7), torch.nan, dtype=dtype)
        wide[:, offset : offset + in_size] = x
        assert torch.equal(as_bits(made(wide[:, offset : offset + in_size])), whole)
    assert torch.equal(as_bits(made(x.T.contiguous().T)), whole)
    assert torch.equal(as_bits(made(torch.stack([x, x * torch.nan], 1)[:, 0])), whole)
    assert torch.equal(as_bits(Packer()(weight.T.contiguous().T, bias)(x)), whole)
    padded = torch.full((100, in_size + 5), torch.nan, dtype=dtype)
    padded[:, 2 : 2 + in_size] = weight
    assert torch.equal(as_bits(Packer()(padded[:, 2 : 2 + in_size], bias)(x)), whole)


@pytest.mark.parametrize("apart", [64, 96, 2048])
def test_many_rows_where_they_lie(backend, apart):
    """Rows of whole cache lines, close together and 4 KiB apart, the first or the last of them poison."""
    x, weight, bias = tensors(torch.bfloat16, 100, 64)
    made = Packer()(weight, bias)
    wide = torch.full((400, apart), torch.nan, dtype=torch.bfloat16)
    for first, rows in ((0, 33), (3, 47), (16, 64), (300, 100), (0, 400)):
        wide[:] = torch.nan
        wide[first : first + rows, :64] = x[:rows]
        assert torch.equal(as_bits(made(wide[first : first + rows, :64])), as_bits(made(x[:rows].clone())))


@pytest.mark.parametrize("rows", [1, 17, 32, 33, 47, 100])
def test_nothing_after_the_last_row_is_read(backend, rows):
    """It is the end of a page, and the next one must not be touched."""
    x, weight, bias = tensors(torch.bfloat16, 100, 64)
    size, page = rows * 64 * 2, mmap.PAGESIZE
    memory = mmap.mmap(-1, (size // page + 2) * page)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    end = len(buffer) - page
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(buffer.data_ptr() + end), ctypes.c_size_t(page), 0) == 0
    try:
        last = buffer[end - size : end].view(torch.bfloat16).view(rows, 64)
        last.copy_(x[:rows])
        made = Packer()(weight, bias)
        assert torch.equal(as_bits(made(last)), as_bits(made(x)[:rows]))
    finally:
        libc.mprotect(ctypes.c_void_p(buffer.data_ptr() + end), ctypes.c_size_t(page), 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_keep_their_nans_to_themselves(backend, dtype):
    x, weight, bias = tensors(dtype, 70, 65)
    made = Packer()(weight, bias)
    whole = as_bits(made(x[:100]))
    x[7:11], x[50, 3] = torch.nan, torch.inf
    out = made(x[:100])
    assert out[7:11].isnan().all()
    assert not out[50].isfinite().any()
    others = [i for i in range(100) if i not in (7, 8, 9, 10, 50)]
    assert torch.equal(as_bits(out)[others], whole[others])


def handing_out(first: Tensor) -> Callable[..., Tensor]:
    """torch.empty, but for its first call."""
    given, empty = [first], torch.empty
    return lambda *size, **kinds: given.pop() if given else empty(*size, **kinds)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_writes_its_own_rows_only(backend, dtype, monkeypatch):
    """The output is the middle of a larger tensor, all of it poison."""
    x, weight, bias = tensors(dtype, 37, 64)
    made = Packer()(weight, bias)
    for rows in (1, 7, 97):
        whole = made(x[:rows])
        poison = torch.full((rows + 2, 37), -77.0, dtype=dtype)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", handing_out(poison[1 : 1 + rows]))
            assert torch.equal(made(x[:rows]), whole)
        assert (poison[0] == -77).all()
        assert (poison[-1] == -77).all()


def test_weights_share_memory_and_keep_apart(backend):
    """Many small ones and one that is larger than what they share."""
    pack = Packer()
    gen = torch.Generator().manual_seed(0)
    weights = [torch.randn(out, 100, generator=gen) for out in (3, 500, BLOCK // 400 + 1, 17, 900)]
    made = [pack(weight) for weight in weights]
    assert made[0].packed.data_ptr() % HUGE_PAGE == 0
    assert all(one.packed.data_ptr() % 64 == 0 for one in made)
    assert made[1].packed.data_ptr() - made[0].packed.data_ptr() == len(made[0].packed)
    x = torch.randn(2, 100, generator=gen)
    for weight, one in zip(weights, made, strict=True):
        torch.testing.assert_close(one(x), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_come_back_as_they_were_packed(backend, dtype, shape):
    """Every bit pattern, those of NaNs too; any order, any number of threads."""
    whole = torch.iinfo(whole_dtype(dtype))
    gen = torch.Generator().manual_seed(shape[0])
    bits = torch.randint(whole.min, whole.max + 1, shape, generator=gen, dtype=whole_dtype(dtype))
    made = Packer()(bits.view(dtype), out_dtype=torch.float32)
    places = torch.randint(0, shape[0], (1_000,), generator=gen)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for chosen in (places, places[:1], places[:0], places[::3], torch.arange(shape[0])):
            rows = made.weight_rows(chosen)
            assert rows.dtype is dtype
            assert torch.equal(as_bits(rows), bits[chosen])


def test_rows_that_are_none_are_refused(backend):
    made = Packer()(torch.zeros(70, 8))
    for wrong in (-1, 70, 2**40, -(2**40)):
        with pytest.raises(BadValue, match=f"places\\[2\\] is {wrong}; the weight has rows 0..69"):
            made.weight_rows(torch.tensor([0, 69, wrong]))
    for places in (torch.zeros(2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)):
        with pytest.raises(BadShape, match=r"expected torch\.int64 \[T\]"):
            made.weight_rows(places)


def test_what_cannot_be_packed_or_multiplied_is_refused(backend):
    pack, weight = Packer(), torch.zeros(5, 8, dtype=torch.bfloat16)
    for wrong in (torch.zeros(5, 0), torch.zeros(0, 8), torch.zeros(5)):
        with pytest.raises(BadShape, match="expected \\[out, in\\]"):
            pack(wrong)
    with pytest.raises(BadShape, match="bias \\(4,\\)"):
        pack(weight, torch.zeros(4))
    with pytest.raises(Unsupported, match="float64"):
        pack(weight.double())
    with pytest.raises(Unsupported, match="float16"):
        pack(weight, out_dtype=torch.float16)
    for x in (torch.zeros(2, 7, dtype=torch.bfloat16), torch.zeros(2, 8)):
        with pytest.raises(BadShape, match="the weight takes"):
            pack(weight)(x)
    bias = torch.arange(10.0)[::2]
    assert torch.equal(pack(weight.float(), bias)(torch.zeros(1, 8))[0], bias)


def test_what_lies_elsewhere_is_refused(backend):
    """Tensors without memory have the address 0."""
    weight, elsewhere = torch.ones(4, 8), torch.ones(2, 8, device="meta")
    made = Packer()(weight)
    for call, name in (
        (lambda: made(elsewhere), "x"),
        (lambda: made.weight_rows(torch.zeros(1, dtype=torch.int64, device="meta")), "places"),
        (lambda: Packer()(weight.to("meta")), "weight"),
        (lambda: Packer()(weight, torch.ones(4, device="meta")), "bias"),
    ):
        with pytest.raises(BadValue, match=f"^{name} is on meta"):
            call()
