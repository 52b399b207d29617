"""Tensors that their owner sets to other memory: a plan finds a cache where it lies at each call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.errors import BadDtype, BadShape

SHAPE = (2, 2, 4, 8)  # [N, Hkv, B, D]


def set_data(x: Tensor, new: Tensor) -> None:
    x.data = new


def grow(x: Tensor, new: Tensor) -> None:
    """Torch moves what it lets grow."""
    x.resize_(1000, *new.shape).resize_(new.shape).copy_(new)


MOVES: dict[str, Callable[[Tensor, Tensor], object]] = {"data": set_data, "set_": Tensor.set_, "resize_": grow}


def make_plan(backend: ops.Backend, device: str, kv_dtype: torch.dtype) -> ops.AttentionPlan:
    """Of a row that sees five keys and is written to the sixth slot."""
    spec = ops.AttentionSpec(
        num_heads=2, num_kv_heads=2, head_dim=8, block_size=4, num_blocks=2, dtype=torch.float32, kv_dtype=kv_dtype,
        device=device,
    )  # fmt: skip
    return backend.plan(spec, torch.tensor([0, 1]), torch.tensor([5]), torch.tensor([[0, 1]]), torch.tensor([5]))


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
def test_a_plan_finds_a_cache_where_it_lies_now(backend, device, move, kv_dtype):
    """Keys are all alike, so that a row gets its values' mean: one number."""
    if kv_dtype not in backend.limits.kv_dtypes[torch.float32]:
        pytest.skip(f"the backend has no cache of {kv_dtype}")

    def filled(number: float, dtype: torch.dtype = kv_dtype, shape: tuple[int, ...] = SHAPE) -> Tensor:
        return torch.full(shape, number, dtype=dtype, device=device)

    scaled = kv_dtype == torch.int8
    scales = [filled(1, torch.float32, SHAPE[:3]) for _ in range(2)] if scaled else []
    kv, plan = ops.PagedKV(filled(1), filled(1), *scales), make_plan(backend, device, kv_dtype)
    q, row = filled(1, torch.float32, (1, 2, 8)), filled(0.5, torch.float32, (1, 2, 8))

    def check(value: float) -> None:
        out = backend.attention(q, kv, plan)
        torch.testing.assert_close(out, torch.full_like(out, value), atol=1e-3, rtol=1e-4, equal_nan=True)

    check(1)
    MOVES[move](kv.v, filled(7))
    check(7)
    MOVES[move](kv.k, filled(torch.nan) if not scaled else filled(3))
    check(7 if scaled else torch.nan)
    if scaled:
        MOVES[move](kv.v_scale, filled(2, torch.float32, SHAPE[:3]))
        check(14)
    backend.write_kv(row, row, kv, plan)
    MOVES[move](kv.k, filled(4))
    MOVES[move](kv.v, filled(5))
    backend.write_kv(row, row, kv, plan)
    for x, number in ((kv.k, 4), (kv.v, 5)):
        want = filled(number)
        want[1, :, 1] = 127 if scaled else 0.5
        assert torch.equal(x, want)
    if scaled:
        assert kv.k_scale[1, :, 1].tolist() == pytest.approx([0.5 / 127] * 2)


def test_a_cache_that_no_longer_fits_is_refused(backend, device):
    k, v = (torch.ones(SHAPE, device=device) for _ in range(2))
    kv, plan = ops.PagedKV(k, v), make_plan(backend, device, torch.float32)
    rows = torch.ones(1, 2, 8, device=device)
    backend.write_kv(rows, rows, kv, plan)
    backend.attention(rows, kv, plan)
    for change, error, shown in (
        (lambda: v.resize_(1, 2, 4, 8), BadShape, r"kv.v has shape \(1, 2, 4, 8\); expected \(2, 2, 4, 8\)"),
        (lambda: v.resize_(0), BadShape, r"kv.v has shape \(0,\); expected \(2, 2, 4, 8\)"),
        (lambda: set_data(v, torch.ones(SHAPE, dtype=torch.float16, device=device)), BadDtype, "kv.v has dtype"),
    ):
        change()
        with pytest.raises(error, match=shown):
            backend.attention(rows, kv, plan)
        with pytest.raises(error, match=shown):
            backend.write_kv(rows, rows, kv, plan)
    set_data(v, torch.full(SHAPE, 3.0, device=device))
    assert torch.equal(backend.attention(rows, kv, plan), torch.full((1, 2, 8), 3.0, device=device))
