"""What enters and moves within the cache: write_kv and copy_blocks, bit by bit."""

from __future__ import annotations

import pytest
import torch

from quire import ops
from quire.errors import BadDtype, BadShape, BadStride, BadValue
from tests.marks import spread
from tests.ops.cases import LAYOUTS, Case, Step
from tests.ops.conftest import checked_once


def one_row_plan(backend: ops.Backend, step: Step, slots: list[int]) -> ops.AttentionPlan:
    """A plan that only writes: one row a slot, of a sequence that holds nothing."""
    starts, none = torch.tensor([0, len(slots)]), torch.zeros(1, dtype=torch.int64)
    return backend.plan(step.spec, starts, none, torch.zeros(1, 0, dtype=torch.int64), torch.tensor(slots))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_and_last_slot_and_the_skipped_rows(backend, device, layout):
    """A skipped row is written nowhere: -1 is not the last slot."""
    step = Step(Case(query_lens=(4,), context_lens=(4,), layout=layout, head_dim=5, head_dim_v=9), device)
    last = step.num_blocks * 8 - 1
    for slots in ([-1, -1, -1, -1], [-1, last, -1, 0], [9, -1, 8, 10]):
        before = step.kv.k.clone(), step.kv.v.clone()
        backend.write_kv(step.k_new, step.v_new, step.kv, one_row_plan(backend, step, slots))
        for new, cache, old in zip((step.k_new, step.v_new), (step.kv.k, step.kv.v), before, strict=True):
            for row, slot in enumerate(slots):
                if slot >= 0:
                    assert torch.equal(cache[slot // 8, :, slot % 8], new[row])
                    old[slot // 8, :, slot % 8] = new[row]
            assert torch.equal(cache.contiguous().view(torch.uint8), old.contiguous().view(torch.uint8))


def test_the_new_rows_stay_as_they_are(backend, device):
    step = Step(Case(query_lens=(5,), context_lens=(12,), row_strides="packed"), device)
    before = [x.clone() for x in (step.q, step.k_new, step.v_new)]
    step.attend(backend, step.write(backend))
    assert all(torch.equal(a, b) for a, b in zip(before, (step.q, step.k_new, step.v_new), strict=True))


def stored(rows: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """What a cache of that dtype makes of rows."""
    if kv_dtype.itemsize == 1:
        largest = torch.finfo(kv_dtype).max
        rows = rows.float().clamp(-largest, largest)
    return rows.to(kv_dtype)


def test_rounding_into_the_cache(backend, device):
    """Every pair of dtypes: to nearest, ties to even, overflow to infinity, and infinities and NaN stay.

    In fp8, what is too large becomes the largest number instead.
    """
    for dtype, served in backend.limits.kv_dtypes.items():
        for kv_dtype in served - {torch.int8}:
            eps = torch.finfo(kv_dtype).eps
            values = [
                1 + eps / 2,
                1 + 1.5 * eps,
                1 + 0.51 * eps,
                -1 - eps / 2,
                1 - eps / 4,
                1 + 2.5 * eps,
                1 + 3.5 * eps,
            ]
            values += [464.0, -480.0, 500.0, 57_344.0, 61_440.0, -65_504.0, 2.0**-9, 2.0**-10, 2.0**-16, 3 * 2.0**-17]
            values += [0.0, -0.0, 65_519.0, 65_520.0, -1e5, 3e38, 6e-8, 3e-8, 1e-40, torch.inf, -torch.inf, torch.nan]
            tokens = torch.tensor(values, dtype=torch.float32).to(dtype).to(device)
            case = Case(query_lens=(1,), context_lens=(1,), dtype=dtype, kv_dtype=kv_dtype, head_dim=len(values))
            step = Step(case, device)
            rows = tokens.expand(1, 2, -1).contiguous()
            backend.write_kv(rows, rows, step.kv, one_row_plan(backend, step, [8]))
            for cache in (step.kv.k, step.kv.v):
                got, want = cache[1, :, 0].cpu().double(), stored(rows[0], kv_dtype).cpu().double()
                same = (got == want) & (got.signbit() == want.signbit()) | (got.isnan() & want.isnan())
                assert same.all(), f"{dtype} to {kv_dtype}: {values} became {got.tolist()}, not {want.tolist()}"


@pytest.mark.parametrize(
    ("layout", "pairs"), spread(2, LAYOUTS, [([0], [3]), ([1, 1, 4], [0, 5, 2]), ([3, 2], [1, 4]), ([], [])])
)
def test_copy_blocks(backend, device, layout, pairs):
    src, dst = pairs
    for dtype in {kv for served in backend.limits.kv_dtypes.values() for kv in served}:
        query = next(d for d, served in backend.limits.kv_dtypes.items() if dtype in served)
        case = Case(
            query_lens=(1,), context_lens=(30,), layout=layout, head_dim=5, head_dim_v=9, dtype=query, kv_dtype=dtype
        )
        step = Step(case, device)
        step.write(backend)
        for expected in step.expected_views():
            for a, b in zip(src, dst, strict=True):
                expected[b] = expected[a]
        backend.copy_blocks(step.kv, src, dst)
        step.check_cache()


@checked_once
@pytest.mark.parametrize(
    ("src", "dst", "error", "fragments"),
    [
        ([0], [6], BadValue, ["dst[0]", "6", "0..5"]),
        ([0, -1], [1, 2], BadValue, ["src[1]", "-1", "0..5"]),
        ([0, 1], [2, -3], BadValue, ["dst[1]", "-3"]),
        ([2**40], [1], BadValue, ["src[0]", str(2**40)]),
        ([0, 1], [2, 2], BadValue, ["dst", "2", "twice"]),
        ([0, 1], [1, 2], BadValue, ["block 1", "src", "dst"]),
        ([3], [3], BadValue, ["block 3", "src", "dst"]),
        ([0, 1], [2], BadShape, ["src", "2", "dst", "1"]),
        ([0, 1.0], [2, 3], BadDtype, ["src[1]", "1.0", "integer"]),
        ([0, 1], [2, True], BadDtype, ["dst[1]", "True", "integer"]),
    ],
)
def test_copy_blocks_refuses(backend, device, src, dst, error, fragments):
    step = Step(Case(query_lens=(1,), context_lens=(30,)), device)
    step.write(backend)
    with pytest.raises(error) as raised:
        backend.copy_blocks(step.kv, src, dst)
    assert all(fragment in str(raised.value) for fragment in fragments), raised.value
    step.check_cache()


@checked_once
def test_copy_blocks_refuses_k_and_v_of_different_pools(backend, device):
    kv = ops.PagedKV(torch.zeros(6, 2, 8, 16, device=device), torch.zeros(5, 2, 8, 16, device=device))
    with pytest.raises(BadShape, match=r"kv\.k has 6 blocks and kv\.v 5"):
        backend.copy_blocks(kv, [0], [5])


@checked_once
def test_copy_blocks_refuses_what_is_no_cache(backend, device):
    flat, turned = torch.zeros(6, 8, 16, device=device), torch.zeros(6, 2, 16, 8, device=device).mT
    with pytest.raises(BadShape, match=r"kv\.k has shape \(6, 8, 16\)"):
        backend.copy_blocks(ops.PagedKV(flat, flat), [0], [5])
    with pytest.raises(BadStride, match=r"kv\.v has strides"):
        backend.copy_blocks(ops.PagedKV(torch.zeros(6, 2, 8, 16, device=device), turned), [0], [5])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_rows_that_are_not_finite_are_marked(backend, device, value):
    """In K or in V, in any head and dimension, of any layer since the last update; rows that are skipped are not."""
    for dtype in backend.limits.kv_dtypes:
        step = Step(Case(query_lens=(6,), context_lens=(6,), dtype=dtype, head_dim=19, head_dim_v=33), device)
        plan = one_row_plan(backend, step, [8, 9, -1, 10, 11, 12])
        for new in (step.k_new, step.v_new):
            new[:] = torch.randn_like(new)
        backend.write_kv(step.k_new, step.v_new, step.kv, plan)
        assert plan.nonfinite.tolist() == [0] * 6
        step.k_new[1, 1, 18] = step.k_new[2, 0, 0] = value
        backend.write_kv(step.k_new, step.v_new, step.kv, plan)
        step.k_new[1, 1, 18] = 1.0
        step.v_new[4, 0, 32] = value
        step.v_new[5, 0, 0] = torch.finfo(dtype).max
        backend.write_kv(step.k_new, step.v_new, step.kv, plan)
        assert plan.nonfinite.tolist() == [0, 1, 0, 0, 1, 0]
        plan.update(torch.tensor([0, 2]), torch.zeros(1).int(), torch.zeros(1, 0).int(), torch.tensor([8, 9]))
        assert plan.nonfinite.tolist() == [0, 0]


def test_what_overflows_in_the_cache_is_marked(backend, device):
    """The cache's dtype may hold less than that of the rows; fp8 keeps the largest number instead."""
    for dtype, served in backend.limits.kv_dtypes.items():
        for kv_dtype in served:
            step = Step(Case(query_lens=(2,), context_lens=(2,), dtype=dtype, kv_dtype=kv_dtype), device)
            rows = torch.zeros_like(step.k_new)
            rows[1, 0, 0] = 60_000.0 if dtype == torch.float16 else 1e6
            plan = one_row_plan(backend, step, [8, 9])
            backend.write_kv(rows, rows, step.kv, plan)
            overflows = kv_dtype != torch.int8 and not bool(stored(rows[1], kv_dtype).float().isfinite().all())
            assert plan.nonfinite.tolist() == [0, int(overflows)], f"{dtype} to {kv_dtype}"
