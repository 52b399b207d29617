"""The typed attention state: merging is attention over the union, and bases do not mix."""

from __future__ import annotations

import math

import pytest
import torch

from quire.errors import BadDtype, BadShape, BadValue
from quire.ops import AttentionState
from tests.ops import dense
from tests.ops.conftest import checked_once


def parts(device: str, cuts: list[int], dtype: torch.dtype = torch.float32) -> tuple[list[AttentionState], dense.Dense]:
    """States over consecutive pieces of one row's keys, from dense attention, and the answer over all."""
    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, h, 16, generator=gen).to(dtype) for n, h in ((4, 6), (cuts[-1], 2), (cuts[-1], 2)))
    states = []
    for begin, end in zip([0, *cuts], cuts, strict=False):
        piece = dense.attend(q, k[begin:end], v[begin:end], causal=False)
        states.append(AttentionState(piece.out.to(dtype).to(device), piece.lse.float().contiguous().to(device)))
    return states, dense.attend(q, k, v, causal=False)


@pytest.mark.parametrize("cuts", [[5, 9], [1, 2, 3, 30], [0, 7], [7, 7], [4]])
def test_a_merge_is_attention_over_all_keys(backend, device, cuts):
    (first, *others), whole = parts(device, cuts)
    state = first.merge(*others, backend=backend.name)
    whole.check(state.out, state.lse, torch.float32, roundings=4)
    assert state.base == math.e


def test_states_to_base_2_merge_among_themselves(backend, device):
    (first, *others), whole = parts(device, [5, 9, 20])
    in_two = [state.in_base(2) for state in (first, *others)]
    assert torch.allclose(in_two[0].lse * math.log(2), first.lse)
    state = in_two[0].merge(*in_two[1:], backend=backend.name)
    assert state.base == 2
    back = state.in_base(math.e)
    whole.check(back.out, back.lse, torch.float32, roundings=4)


def test_bases_do_not_mix(backend, device):
    (first, second), _ = parts(device, [5, 9])
    with pytest.raises(BadValue, match=r"state 1 is to base 2, that of the first one to base 2\.71828; .* in_base"):
        first.merge(second.in_base(2), backend=backend.name)
    # What that error prevents: the merge of a natural LSE with one to base 2 is off by far more than a rounding.
    wrong = first.merge(AttentionState(second.out, second.in_base(2).lse), backend=backend.name)
    right = first.merge(second, backend=backend.name)
    assert (wrong.out - right.out).abs().max() > 0.01


def test_a_shift_moves_the_lse_alone(device):
    (state, empty), _ = parts(device, [5, 5])
    bias = torch.linspace(-1, 1, 24).view(4, 6).to(device)
    moved = state.shifted(bias)
    assert moved.out is state.out
    assert torch.allclose(moved.lse, state.lse + bias)
    assert (empty.shifted(bias).lse == -torch.inf).all()
    assert torch.allclose(state.in_base(2).shifted(bias).in_base(math.e).lse, moved.lse)


@pytest.mark.parametrize(
    ("out", "lse", "base", "error", "message"),
    [
        (torch.zeros(3, 8), torch.zeros(3), math.e, BadShape, r"\(3, 8\)"),
        (torch.zeros(3, 2, 8), torch.zeros(2, 3), math.e, BadShape, r"lse has shape \(2, 3\); expected \(3, 2\)"),
        (torch.zeros(3, 2, 8), torch.zeros(3, 2).double(), math.e, BadDtype, "lse has dtype torch.float64"),
        (torch.zeros(3, 2, 8).half(), torch.zeros(3, 2).half(), math.e, BadDtype, "lse has dtype torch.float16"),
        (torch.zeros(3, 2, 8), torch.zeros(3, 2), 1.0, BadValue, "base is 1"),
        (torch.zeros(3, 2, 8, dtype=torch.int32), torch.zeros(3, 2), math.e, BadDtype, "out has dtype torch.int32"),
        (torch.zeros(3, 2, 8), torch.zeros(3, 2), 0.9, BadValue, "base is 0[.]9"),
        (torch.zeros(3, 2, 8), torch.zeros(3, 2), math.nan, BadValue, "base is nan"),
        (torch.zeros(3, 2, 8), torch.zeros(3, 2), "2", BadValue, "base is '2'"),
    ],
)
def test_what_is_refused(out, lse, base, error, message):
    with pytest.raises(error, match=message):
        AttentionState(out, lse, base)


@checked_once
def test_other_shapes_are_refused(backend, device):
    (first, _), _ = parts(device, [5, 9])
    other = AttentionState(torch.zeros(4, 6, 8, device=device), torch.zeros(4, 6, device=device))
    with pytest.raises(BadShape, match=r"out_b has shape \(4, 6, 8\)"):
        first.merge(other, backend=backend.name)
    for base in (0.5, 1, 1.0):
        with pytest.raises(BadValue, match=f"base is {base:g}"):
            first.in_base(base)
    with pytest.raises(BadShape, match=r"bias has shape \(6,\); expected \(4, 6\)"):
        first.shifted(torch.zeros(6))


def test_states_do_not_compare_as_a_whole():
    state = AttentionState(torch.zeros(3, 2, 8), torch.zeros(3, 2))
    assert state == state
    assert state != AttentionState(state.out, state.lse)
