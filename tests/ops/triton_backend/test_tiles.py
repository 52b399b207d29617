"""Where the small kernels take more than one tile for a row, or for a token's heads; and the ends of the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.ops.triton import sampling, small, states
from quire.ops.triton.cache import ROW_TILE
from tests.ops.cases import Case, Step
from tests.ops.conftest import DEVICES
from tests.ops.dense import check_close

DEVICE = DEVICES[-1]  # the interpreter's, or the GPU
LONG = 2 * small.NORM_TILE + 37


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def exact(x: Tensor) -> Tensor:
    return x.cpu().double()


def test_norms_of_long_rows():
    x, weight, bias = draw(3, LONG) + 2, draw(LONG, seed=1), draw(LONG, seed=2)
    wide = exact(x)
    want = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * exact(weight)
    check_close("rms_norm", exact(small.rms_norm(x, weight, 1e-5)), want, 1e-5)
    want = torch.layer_norm(wide, (LONG,), exact(weight), exact(bias), 1e-5)
    check_close("layer_norm", exact(small.layer_norm(x, weight, bias, 1e-5)), want, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_long_row_that_is_normed_is_the_residual_as_stored(dtype):
    x, residual, weight = draw(3, LONG).to(dtype), draw(3, LONG, seed=1).to(dtype), draw(LONG, seed=2)
    total = (x.float() + residual.float()).to(dtype)
    got = small.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(got, small.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_norm_weights_of_their_own_dtype(weight_dtype):
    x, weight = draw(4, 96).bfloat16(), draw(96, seed=1).to(weight_dtype)
    wide = exact(x)
    want = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * exact(weight)
    check_close("rms_norm", exact(small.rms_norm(x, weight, 1e-5)), want, 2.0**-8 * want.abs() + 1e-5)


def test_activations_of_long_rows():
    x = draw(2, 2 * (small.PART_TILE + 5))
    gate, up = exact(x).chunk(2, dim=-1)
    check_close("swiglu", exact(small.swiglu(x)), gate / (1 + torch.exp(-gate)) * up, 1e-5)
    check_close("gelu", exact(small.gelu(x, "tanh")), torch.nn.functional.gelu(exact(x), approximate="tanh"), 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "half"), [(11, 3, 300), (70, 1, 33), (3, 9, 512)])
def test_rope_of_more_heads_than_a_tile(heads, kv_heads, half):
    q, k = draw(4, heads, 2 * half), draw(4, kv_heads, 2 * half, seed=1)
    angle = draw(20, half, seed=2)
    positions = torch.tensor([3, 19, 0, 7], device=DEVICE)
    turn = torch.polar(torch.ones(20, half, dtype=torch.float64), exact(angle))[positions.cpu()][:, None]
    pairs = [torch.complex(*exact(x).split(half, dim=-1)) * turn for x in (q, k)]
    small.rope(q, k, positions, angle.cos(), angle.sin())
    for x, want in zip((q, k), pairs, strict=True):
        check_close("rope", exact(x), torch.cat([want.real, want.imag], dim=-1), 1e-5)


@pytest.mark.parametrize(("heads", "dim", "dim_v"), [(5, 1000, 576), (9, 1024, 1), (70, 60, 80)])
def test_write_kv_of_more_heads_than_a_tile(heads, dim, dim_v):
    assert heads * dim > ROW_TILE
    case = Case(
        query_lens=(3,),
        context_lens=(3,),
        num_kv_heads=heads,
        group_size=1,
        head_dim=dim,
        head_dim_v=dim_v,
        layout="NHD",
    )
    step = Step(case, DEVICE)
    step.write(ops.load("triton", DEVICE))
    step.check_cache()


def test_copy_blocks_keeps_the_payload_of_nan():
    k = torch.arange(0x7F80_0000, 0x7F80_0000 + 6 * 2 * 8 * 70, dtype=torch.int32).view(6, 2, 8, 70)
    before = k.clone()
    kv = ops.PagedKV(k.to(DEVICE).view(torch.float32), k.to(DEVICE).view(torch.float32).clone())
    ops.load("triton", DEVICE).copy_blocks(kv, [5, 1], [0, 3])
    before[[0, 3]] = before[[5, 1]]
    for x in (kv.k, kv.v):
        assert torch.equal(x.view(torch.int32).cpu(), before)


@pytest.mark.parametrize(("heads", "dim"), [(5, 1000), (70, 40), (1, 1)])
def test_states_of_more_heads_than_a_tile(heads, dim):
    out_a, out_b, lse_a, lse_b = (
        draw(3, heads, dim),
        draw(3, heads, dim, seed=1),
        draw(3, heads),
        draw(3, heads, seed=1),
    )
    out, lse = states.merge_states(out_a, lse_a, out_b, lse_b)
    a, b = exact(lse_a).exp()[..., None], exact(lse_b).exp()[..., None]
    check_close("out", exact(out), (a * exact(out_a) + b * exact(out_b)) / (a + b), 1e-5)
    check_close("lse", exact(lse), (a + b).log()[..., 0], 1e-5)
    sinks = draw(heads, seed=3)
    want = exact(out_a) * torch.sigmoid(exact(lse_a) - exact(sinks))[..., None]
    check_close("sinks", exact(states.apply_sinks(out_a, lse_a, sinks)), want, 1e-5)


def test_logsumexp_at_the_ends():
    width = 2 * sampling.TILE + 3
    rows = draw(6, width)
    rows[0] = -torch.inf
    rows[1, 5], rows[1, 6] = torch.inf, 300.0
    rows[2, width - 1] = torch.nan
    rows[3] = -torch.inf
    rows[3, 4000] = -300.0
    rows[4] = 3e38
    got = sampling.logsumexp(rows).cpu()
    assert got[:2].tolist() == [-torch.inf, torch.inf]
    assert got[2].isnan()
    assert got[3] == -300.0
    assert got[4] == torch.tensor(3e38)
    check_close("logsumexp", got[5:].double(), torch.logsumexp(exact(rows[5:]), -1), 1e-5)


def test_top_k_of_infinities_and_numbers_of_every_size():
    tiny = torch.finfo(torch.float32).smallest_normal
    row = torch.tensor([0.0, -torch.inf, tiny / 2, -1e38, torch.inf, -tiny / 2, -0.0, 1e38, -torch.inf], device=DEVICE)
    assert sampling.top_k(row[None], 9).tolist() == [[4, 7, 2, 0, 6, 5, 3, 1, 8]]
