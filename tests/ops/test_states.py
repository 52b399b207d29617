"""merge_states and apply_sinks: attention over parts of the keys, put together, is attention over all of them."""

from __future__ import annotations

import pytest
import torch

from quire import ops
from tests.ops.cases import Case, Step
from tests.ops.dense import Dense, check_close

State = tuple[torch.Tensor, torch.Tensor]
B = 8


def part(backend: ops.Backend, step: Step, begin: int, end: int) -> State:
    """The state of all of the step's rows over the keys begin:end of its one sequence, begin at a block's edge."""
    tables = step.block_tables[:, begin // B : -(-end // B)]
    rows = torch.tensor([0, step.num_tokens])
    plan = backend.plan(step.spec, rows, torch.tensor([end - begin]), tables)
    return backend.attention(step.q, step.kv, plan, return_lse=True)


def filled(backend: ops.Backend, device: str, rows: int, keys: int, **options) -> tuple[Step, Dense]:
    step = Step(Case(query_lens=(rows,), context_lens=(keys,), return_lse=True, **options), device)
    step.write(backend)
    return step, step.dense()


@pytest.mark.parametrize("cut", [0, 8, 40, 64, 70])
@pytest.mark.parametrize("rows", [1, 5])
def test_two_parts_of_the_keys(backend, device, rows, cut):
    for dtype in backend.limits.kv_dtypes:
        step, dense = filled(backend, device, rows, 70, causal=False, dtype=dtype, size=3.0)
        a, b = part(backend, step, 0, cut), part(backend, step, cut, 70)
        for left, right in ((a, b), (b, a)):
            out, lse = backend.merge_states(*left, *right)
            dense.check(out, lse, dtype, roundings=3)


def test_a_causal_suffix_after_a_whole_prefix(backend, device):
    """What cascade attention does: nobody is masked in the prefix, so it is attended without a mask."""
    step, dense = filled(backend, device, 6, 38)
    prefix = Step(Case(query_lens=(6,), context_lens=(38,), causal=False), device)
    prefix.q, prefix.kv, prefix.block_tables = step.q, step.kv, step.block_tables
    out, lse = backend.merge_states(*part(backend, prefix, 0, 32), *part(backend, step, 32, 38))
    dense.check(out, lse, torch.float32)


@pytest.mark.parametrize("size", [1.0, 3_000.0])
def test_merging_is_associative_and_commutative(backend, device, size):
    for dtype in backend.limits.kv_dtypes:
        step, dense = filled(backend, device, 4, 60, causal=False, dtype=dtype, size=size)
        a, b, c = (part(backend, step, begin, end) for begin, end in ((0, 8), (8, 32), (32, 60)))
        merge = backend.merge_states
        for out, lse in (merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)), merge(*merge(*c, *a), *b)):
            dense.check(out, lse, dtype, roundings=4)


def test_a_state_that_is_not_finite_stays_so(backend, device):
    """It does not become zeros, and no other row."""
    out, lse = torch.ones(3, 2, 4, device=device), torch.zeros(3, 2, device=device)
    bad_lse, bad_out = lse.clone(), out.clone()
    bad_lse[0, 1], bad_out[2, 0, 1] = torch.nan, torch.inf
    for a, b in (((bad_out, bad_lse), (out, lse)), ((out, lse), (bad_out, bad_lse))):
        merged, merged_lse = (x.cpu() for x in backend.merge_states(*a, *b))
        assert merged[0, 1].isnan().all()
        assert merged_lse[0, 1].isnan()
        assert merged[2, 0, 1] == torch.inf
        assert (merged.isfinite().sum(), merged_lse.isfinite().sum()) == (24 - 5, 6 - 1)


def test_a_state_that_saw_nothing_weighs_nothing(backend, device):
    for dtype in backend.limits.kv_dtypes:
        step, _ = filled(backend, device, 3, 20, causal=False, dtype=dtype)
        state, nothing = part(backend, step, 0, 20), part(backend, step, 0, 0)
        assert not nothing[0].any()
        assert (nothing[1] == -torch.inf).all()
        for empty in (nothing, (torch.full_like(nothing[0], torch.nan), nothing[1])):  # its output does not matter
            for out, lse in (backend.merge_states(*state, *empty), backend.merge_states(*empty, *state)):
                assert torch.equal(out, state[0])
                assert torch.equal(lse, state[1])
            out, lse = backend.merge_states(*empty, *empty)
            assert not out.any()
            assert (lse == -torch.inf).all()


def test_merging_weighs_by_the_natural_exponential(backend, device):
    out_a, out_b = torch.full((1, 2, 3), 1.0, device=device), torch.full((1, 2, 3), 4.0, device=device)
    lse = torch.tensor([[0.0, 1e4]], device=device)
    out, merged = backend.merge_states(out_a, lse + torch.tensor(2.0).log().to(device), out_b, lse)
    check_close("out", out[0, 0], torch.full((3,), 2.0), 1e-6)  # (2 * 1 + 1 * 4) / 3
    check_close("lse", merged[0, 0], torch.tensor(3.0).log(), 1e-6)
    check_close("out", out[0, 1], torch.full((3,), 2.0), 1e-3)
    check_close("lse", merged[0, 1], torch.tensor(10_001.0986), 1e-3)


def test_states_of_strided_rows_and_of_none(backend, device):
    gen = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 4, 9, 7, generator=gen).to(device)
    (out_a, out_b), (lse_a, lse_b) = wide[:, :, 1:6, 2:], wide[:, :, 1:6, 0]
    lse_a, lse_b = lse_a.contiguous(), lse_b.contiguous()
    strided = backend.merge_states(out_a, lse_a, out_b, lse_b)
    packed = backend.merge_states(out_a.contiguous(), lse_a, out_b.contiguous(), lse_b)
    assert all(torch.equal(x, y) for x, y in zip(strided, packed, strict=True))
    out, lse = backend.merge_states(out_a[:0], lse_a[:0], out_b[:0], lse_b[:0])
    assert (out.shape, lse.shape) == ((0, 5, 5), (0, 5))


@pytest.mark.parametrize("options", [{}, {"size": 5.0, "causal": False}, {"window": 2}])
def test_apply_sinks_equals_attention_with_sinks(backend, device, options):
    for dtype in backend.limits.kv_dtypes:
        case = Case(query_lens=(5, 6), context_lens=(30, 2), sinks=True, dtype=dtype, **options)
        step = Step(case, device)
        plan = step.write(backend)
        state = step.attend(backend, plan, sinks=None, return_lse=True, out=None)
        closed = backend.apply_sinks(*state, step.sinks)
        dense = step.dense()
        dense.check(closed, None, dtype, roundings=3)
        dense.check(step.attend(backend, plan)[0], None, dtype)
        unseen = state[1] == -torch.inf
        assert not closed[unseen].any()
        assert unseen.any() == case.causal


def test_sinks_at_the_ends(backend, device):
    step, _ = filled(backend, device, 3, 20)
    out, lse = part(backend, step, 0, 20)
    none = torch.full((6,), -torch.inf, device=device)
    assert torch.equal(backend.apply_sinks(out, lse, none), out)
    assert not backend.apply_sinks(out, lse, torch.full((6,), 1e4, device=device)).any()
    check_close("half", backend.apply_sinks(out, torch.zeros_like(lse), torch.zeros_like(none)), out / 2, 1e-6)
    nothing = torch.full_like(lse, -torch.inf)
    assert not backend.apply_sinks(torch.zeros_like(out), nothing, none).any()
    assert not backend.apply_sinks(torch.zeros_like(out), nothing, torch.zeros_like(none)).any()


def test_sinks_after_a_merge(backend, device):
    """Sinks close a state, so they come last: the sink counts once, not once a part."""
    step, _ = filled(backend, device, 4, 60, causal=False)
    whole = Step(Case(query_lens=(4,), context_lens=(60,), causal=False, sinks=True), device)
    merged = backend.merge_states(*part(backend, step, 0, 24), *part(backend, step, 24, 60))
    out = backend.apply_sinks(*merged, whole.sinks)
    whole.dense().check(out, None, torch.float32)
