"""Sizes at both ends: tensors without an element, and counts that no int32 or int64 holds."""

from __future__ import annotations

import math

import pytest
import torch

from quire import ops
from quire.errors import BadDtype, BadShape, BadStride, BadValue, QuireError, Unsupported
from tests.ops.conftest import checked_once
from tests.ops.test_validate import good_metadata, good_spec

TOO_MANY = (2**31, 2**32 + 3, 2**63, 2**64 + 1)


# ---------------------------------------------------------------------------------------------------- nothing


@pytest.mark.parametrize("shape", [(4, 0, 4, 8), (4, 2, 0, 8), (4, 2, 4, 0), (4, 0, 0, 0)])
def test_copy_blocks_of_blocks_without_an_element(backend, device, shape):
    some = torch.rand(4, 2, 4, 8).to(device)
    expected = some.clone()
    expected[1] = expected[0]
    backend.copy_blocks(ops.PagedKV(torch.empty(shape, device=device), some), [0], [1])
    assert torch.equal(some, expected)
    backend.copy_blocks(ops.PagedKV(torch.empty(shape, device=device), torch.empty(shape, device=device)), [0], [1])


def test_copy_blocks_of_no_blocks(backend, device):
    backend.copy_blocks(ops.PagedKV(*torch.empty(2, 0, 2, 4, 8, device=device)), [], [])
    with pytest.raises(BadValue, match=r"src\[0\] is 0"):
        backend.copy_blocks(ops.PagedKV(*torch.empty(2, 0, 2, 4, 8, device=device)), [0], [1])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 8), (2, 0, 8), (2, 3, 0), (0, 0, 0, 8)])
def test_rows_without_an_element(backend, device, shape):
    x, weight = torch.empty(shape, device=device), torch.ones(shape[-1:], device=device)
    for result in (
        backend.rms_norm(x, weight, 1e-6),
        backend.layer_norm(x, weight, weight, 1e-6),
        backend.gelu(x, "none"),
        backend.swiglu(torch.cat([x, x], dim=-1)),
    ):
        assert result.shape == x.shape


def test_states_and_heads_without_an_element(backend, device):
    for shape in ((0, 2, 8), (3, 0, 8), (3, 2, 0)):
        out, lse = torch.zeros(shape, device=device), torch.zeros(shape[:2], device=device)
        merged, both = backend.merge_states(out, lse, out, lse)
        assert (merged.shape, both.shape) == (out.shape, lse.shape)
        assert backend.apply_sinks(out, lse, torch.zeros(shape[1], device=device)).shape == out.shape
    positions, tables = torch.zeros(3, dtype=torch.int64, device=device), torch.rand(2, 5, 4).to(device)
    q, none = torch.rand(3, 2, 8).to(device), torch.empty(3, 0, 8, device=device)
    expected = q.cpu().clone()
    ops.load("reference").rope(expected, none.cpu(), positions.cpu(), *tables.cpu())
    backend.rope(q, none, positions, *tables)
    torch.testing.assert_close(q.cpu(), expected)
    backend.rope(none, q, positions, *tables)
    backend.rope(q, none, positions, *tables[..., :0])


def test_logits_without_an_element(backend, device):
    assert backend.logsumexp(torch.empty(0, 9, device=device)).shape == (0,)
    assert (backend.logsumexp(torch.empty(2, 0, device=device)) == -math.inf).all()
    for shape, k in (((0, 9), 3), ((2, 0), 0), ((2, 9), 0)):
        logits = torch.zeros(shape, device=device)
        assert backend.top_k(logits, k).shape == (shape[0], k)
        assert [x.shape for x in backend.top_k_softmax(logits, k)] == [(shape[0], k)] * 2


# --------------------------------------------------------------------------------------------------- too much


@checked_once
@pytest.mark.parametrize("name", ["max_tokens", "max_seqs", "max_blocks"])
@pytest.mark.parametrize("value", [-1, *TOO_MANY, 1.5, True, "4", None])
def test_a_plan_of_a_size_that_no_int32_holds(backend, device, name, value):
    room = {"max_tokens": 5, "max_seqs": 3, "max_blocks": 2, name: value}
    with pytest.raises(BadValue, match=rf"^{name} is {value!r}; it must be"):
        backend.make_plan(good_spec(device), **room)


def test_a_plan_that_no_memory_holds(backend, device):
    with pytest.raises(MemoryError, match="2147483647 sequences of 2147483647 blocks"):
        backend.make_plan(good_spec(device), 1, 2**31 - 1, 2**31 - 1)


@checked_once
def test_more_sequences_than_an_int32_numbers(backend, device):
    """A length, repeated without memory."""
    many = torch.zeros(1, dtype=torch.int32).expand(2**31)
    with pytest.raises(BadShape, match=r"^context_lens has shape \(2147483648,\)"):
        backend.plan(good_spec(device), torch.tensor([0, 1]), many, torch.zeros(1, 1, dtype=torch.int32))
    wide = torch.zeros(1, 1, dtype=torch.int32).expand(1, 2**40)
    with pytest.raises(BadShape, match=r"^block_tables has shape \(1, 1099511627776\)"):
        backend.plan(good_spec(device), torch.tensor([0, 1]), torch.tensor([1]), wide)


@checked_once
def test_a_context_whose_last_tile_would_leave_int32(backend, device):
    tables = torch.zeros(1, 1, dtype=torch.int32).expand(1, 2**23)
    spec = good_spec(device, block_size=256)
    with pytest.raises(BadValue, match=r"context_lens\[0\] is 2147482625; .*0\.\.2147482624 tokens"):
        backend.plan(spec, torch.tensor([0, 1]), torch.tensor([2**31 - 1023]), tables)


@checked_once
@pytest.mark.parametrize("k", [-1, 10, *TOO_MANY, 2.0, True, "3", None])
def test_a_k_that_is_no_number_of_logits(backend, device, k):
    for operator in (backend.top_k, backend.top_k_softmax):
        with pytest.raises(BadValue, match=r"^k is "):
            operator(torch.zeros(2, 9, device=device), k)


@checked_once
def test_scores_beyond_fp32(backend, device):
    """1e-50 is 0 in fp32, which would be no cap at all, and 1e39 is infinity."""
    spec = good_spec(device)
    plan, q = backend.plan(spec, **good_metadata()), torch.zeros(5, 6, 16, device=device)
    kv = ops.PagedKV(*torch.zeros(2, 10, 2, 8, 16, device=device))
    for name, value in (("softcap", 1e-50), ("softcap", 1e39), ("softcap", "30"), ("scale", 1e39), ("scale", "1")):
        with pytest.raises(BadValue, match=f"^{name} is "):
            backend.attention(q, kv, plan, **{name: value})


def test_strides_of_a_single_row_may_be_any(backend, device):
    """Torch lets a dimension of one element have a stride whose bytes are more than an int64 holds."""
    home = torch.rand(64).to(device)
    huge, plain = home.as_strided((1, 1, 8), (2**62, 2**62, 1)), home[:8].view(1, 1, 8)
    assert torch.equal(backend.rms_norm(huge, home[:8], 1e-6), backend.rms_norm(plain, home[:8], 1e-6))
    cache, expected = torch.rand(2, 1, 1, 8).to(device), torch.rand(8).to(device)
    cache[0] = expected
    view = cache.as_strided((2, 1, 1, 8), (8, 2**62, 2**62, 1))
    backend.copy_blocks(ops.PagedKV(view, view.clone()), [0], [1])
    assert torch.equal(cache[1, 0, 0], expected)


# ------------------------------------------------------------------------------------------ refused by everyone


@checked_once
@pytest.mark.parametrize("form", ["quick", "", "Tanh", None, True])
def test_gelu_of_an_unknown_form(backend, device, form):
    with pytest.raises(BadValue, match=r"^approximate is .*'none' or 'tanh'"):
        backend.gelu(torch.ones(2, 8, device=device), form)


@checked_once
@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf, "1", None])
def test_an_eps_that_is_no_small_number(backend, device, eps):
    x, weight = torch.ones(2, 8, device=device), torch.ones(8, device=device)
    for call in (
        lambda: backend.rms_norm(x, weight, eps),
        lambda: backend.add_rms_norm(x, x.clone(), weight, eps),
        lambda: backend.layer_norm(x, weight, None, eps),
    ):
        with pytest.raises(BadValue, match=r"^eps is "):
            call()


@checked_once
@pytest.mark.parametrize("positions", [[0.9, 1.9], [True, False], [-1, 0], [0, 50], [0, 2**40]])
def test_rope_at_what_is_no_position(backend, device, positions):
    positions = torch.tensor(positions)
    rows, tables = torch.ones(2, 1, 8, device=device), torch.rand(2, 50, 4).to(device)
    error: type[QuireError] = BadValue if positions.dtype == torch.int64 else BadDtype
    for x in (positions, positions.to(torch.int16)):
        with pytest.raises(error if x is positions else BadDtype, match=r"^positions"):
            backend.rope(rows, rows.clone(), x, *tables)
    assert torch.equal(rows, torch.ones_like(rows))


@checked_once
def test_rope_of_heads_whose_numbers_are_apart(backend, device):
    apart, tables = torch.ones(2, 1, 16, device=device)[..., ::2], torch.rand(2, 50, 4).to(device)
    rows, positions = torch.ones(2, 1, 8, device=device), torch.arange(2)
    for name, q, k in (("q", apart, rows), ("k", rows, apart)):
        with pytest.raises(BadStride, match=f"^{name} has strides"):
            backend.rope(q, k, positions, *tables)


@checked_once
def test_rows_that_are_no_rows(backend, device):
    one, weight = torch.tensor(1.0, device=device), torch.ones(8, device=device)
    for call in (
        lambda: backend.rms_norm(one, one, 1e-6),
        lambda: backend.layer_norm(one, one, None, 1e-6),
        lambda: backend.gelu(one, "none"),
        lambda: backend.swiglu(one),
    ):
        with pytest.raises(BadShape, match=r"has shape \(\)"):
            call()
    whole = torch.ones(2, 8, dtype=torch.int64, device=device)
    for call in (
        lambda: backend.rms_norm(whole, weight, 1e-6),
        lambda: backend.layer_norm(whole, weight, None, 1e-6),
        lambda: backend.gelu(whole, "none"),
        lambda: backend.swiglu(whole),
        lambda: backend.apply_sinks(whole[None], torch.zeros(1, 2, device=device), torch.zeros(2, device=device)),
    ):
        with pytest.raises(BadDtype, match=r"has dtype torch\.int64"):
            call()


def test_swiglu_of_rows_whose_numbers_are_apart(backend, device):
    rows = torch.rand(3, 8).to(device)
    for x in (rows.T.contiguous().T, torch.rand(2, 8, 3).to(device).transpose(1, 2)):
        assert x.stride(-1) != 1
        torch.testing.assert_close(backend.swiglu(x), backend.swiglu(x.contiguous()))


def test_nan_is_not_taken_for_a_row_that_sees_nothing(backend, device):
    plan, q = backend.plan(good_spec(device), **good_metadata()), torch.zeros(5, 6, 16, device=device)
    q[2, 3] = math.nan
    out, lse = backend.attention(q, ops.PagedKV(*torch.ones(2, 10, 2, 8, 16, device=device)), plan, return_lse=True)
    assert out[2, 3].isnan().all()
    assert out.isnan().sum() == 16
    assert lse.isnan().nonzero().tolist() == [[2, 3]]
    state = torch.ones(2, 1, 8, device=device), torch.tensor([[math.nan], [0.0]], device=device)
    assert backend.merge_states(*state, *state)[0].isnan().flatten(1).all(1).tolist() == [True, False]


def test_a_device_that_torch_does_not_know():
    with pytest.raises(BadValue, match=r"spec\.device is 'abacus'"):
        good_spec("abacus")


@pytest.mark.skipif(ops.unavailable("cpu") is not None, reason=str(ops.unavailable("cpu")))
class TestTheCpuBackend:
    def test_serves_no_other_device(self):
        with pytest.raises(Unsupported, match="does not serve device 'meta'"):
            ops.load("cpu", "cpu").make_plan(good_spec("meta"), 1, 1, 1)

    def test_refuses_more_rows_of_query_heads_than_an_int32_numbers(self):
        """2^21 rows of 1,024 query heads each; before, row 0 was what came after row 2^31 - 1."""
        spec = good_spec(num_heads=1024, num_kv_heads=1, head_dim=1)
        plan = ops.load("cpu", "cpu").make_plan(spec, 2**21, 1, 1)
        with pytest.raises(Unsupported, match=r"2097152 query tokens of 1024 query heads per KV head.*int32"):
            plan.update(torch.tensor([0, 2**21]), torch.tensor([8]), torch.tensor([[0]]))
        assert (plan.num_tokens, plan.num_seqs) == (0, 0)
