"""Caches whose values go through registers: on Hopper they get tiles of 32 rows where V has few columns."""

from __future__ import annotations

import pytest
import torch

from quire import ops
from quire.ops.triton import tiles
from quire.ops.triton.tiles import Tile, launchable, pieces
from tests.ops.cases import Case, Step, naming
from tests.ops.conftest import DEVICES

pytestmark = [pytest.mark.slow, pytest.mark.triton]

DEVICE = DEVICES[-1]  # the interpreter's, or the GPU
MANY = Tile(128, 64, 4, 3)


@pytest.mark.parametrize("layout", ["padded", "HND"])
@pytest.mark.parametrize(("head_dim", "head_dim_v", "group"), [(80, 80, 3), (128, 8, 2), (16, 40, 7), (16, 16, 40)])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("window", [None, 21])
def test_against_float64(head_dim, head_dim_v, group, layout, kv_dtype, window):
    """Several tokens a piece, one, and less than one; rows in every piece of an item and in some."""
    backend = ops.load("triton", DEVICE)
    if (kv_dtype or torch.float16) not in backend.limits.kv_dtypes[torch.float16]:
        pytest.skip(f"no cache of {kv_dtype} on this GPU")
    case = Case(
        query_lens=(47, 1, 0, 9),
        context_lens=(70, 26, 18, 117),
        num_kv_heads=2,
        group_size=group,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=torch.float16,
        kv_dtype=kv_dtype,
        layout=layout,
        window=window,
        return_lse=True,
        written=20,
    )
    with naming(case):
        Step(case, DEVICE).check(backend)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_value_that_is_not_finite_reaches_no_row_that_does_not_see_it(bad):
    """Nor the only row of an item's last piece, which has fewer keys than the item."""
    backend = ops.load("triton", DEVICE)
    fields = {"num_heads": 8, "num_kv_heads": 1, "head_dim": 16, "block_size": 16, "num_blocks": 2, "window": 8}
    wide = ops.AttentionSpec(**fields, dtype=torch.float16, device=DEVICE)
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 1, 16, 17, generator=gen).half().to(DEVICE)[..., :16] for _ in range(2))
    q = torch.randn(5, 8, 16, generator=gen).half().to(DEVICE)
    v[0, 0, 9] = bad
    plan = backend.plan(wide, torch.tensor([0, 5]), torch.tensor([20]), torch.tensor([[0, 1]]))
    out = backend.attention(q, ops.PagedKV(k, v), plan)
    assert [bool(row.isfinite().all()) for row in out] == [position - 8 >= 9 for position in range(15, 20)]


def spec(head_dim: int, kv_dtype: torch.dtype | None = None) -> ops.AttentionSpec:
    return ops.AttentionSpec(
        num_heads=8, num_kv_heads=2, head_dim=head_dim, block_size=16, num_blocks=4, dtype=torch.bfloat16,
        kv_dtype=kv_dtype, device=DEVICE,
    )  # fmt: skip


def test_only_such_caches_get_them(monkeypatch):
    monkeypatch.setattr(tiles, "chip_of", lambda device: "sm90")
    assert launchable(spec(80), MANY, aligned=True) == MANY
    assert launchable(spec(128), MANY, aligned=False) == MANY
    assert launchable(spec(192), MANY, aligned=False) == MANY  # 128 and 64
    assert launchable(spec(64, torch.int8), MANY, aligned=True) == MANY
    for narrow in (launchable(spec(80), MANY, aligned=False), launchable(spec(32, torch.int8), MANY, aligned=True)):
        assert (narrow.block_m, narrow.block_n) == (32, 32)


@pytest.mark.parametrize(
    ("group", "rows", "expected"), [(4, 128, 4), (3, 128, 5), (7, 128, 5), (40, 128, 6), (200, 128, 7)]
)
def test_pieces_cover_an_item(group, rows, expected):
    """Of 32 rows: 8 tokens, 10 of at most 42, 4 of at most 18; three tokens of two tiles of heads; a token of seven."""
    assert pieces(group, rows, Tile(32, 32, 4, 1)) == expected
    assert pieces(group, rows, Tile(rows, 32, 4, 1)) == -(-group // rows)
