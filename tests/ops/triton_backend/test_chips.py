"""What the backend makes of the GPU that it finds; none is needed, only what torch tells of one."""

from __future__ import annotations

import pytest
import torch

from quire import ops
from quire.ops.triton import BACKEND
from quire.ops.triton.backend import _narrow
from quire.ops.triton.tiles import HALVES, chip_of, choose, precision

INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A machine with two GPUs of that compute capability, or with two of AMD's."""
    capability = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability or (9, 4))
    monkeypatch.setattr(torch.version, "hip", None if capability else "7.0")
    return "cuda:1"


@pytest.mark.parametrize(
    ("found", "chip", "narrow"),
    [
        ((8, 0), "sm80", {INT8, E5M2}),
        ((8, 6), "sm80", {INT8, E5M2}),
        ((8, 9), "sm80", {INT8, E4M3, E5M2}),
        ((9, 0), "sm90", {INT8, E4M3, E5M2}),
        ((10, 0), "sm100", {INT8, E4M3, E5M2}),
        ((12, 0), "sm100", {INT8, E4M3, E5M2}),
        (None, "gfx942", set()),
    ],
    indirect=["found"],
)
def test_the_chip_decides_tiles_and_narrow_caches(found, chip, narrow):
    assert BACKEND.unavailable(found) is None
    assert chip_of(found) == chip
    assert _narrow() == narrow
    assert chip in HALVES


@pytest.mark.parametrize("found", [(7, 5)], indirect=True)
def test_a_gpu_that_is_too_old(found):
    assert BACKEND.unavailable(found) == "it needs a GPU of compute capability 8.0, and 'cuda:1' has 7.5"


@pytest.mark.parametrize("found", [(9, 0)], indirect=True)
def test_a_gpu_that_is_not_there(found):
    assert BACKEND.unavailable("cuda:2") == "torch finds 2 GPUs here"
    assert "not 'mps'" in str(BACKEND.unavailable("mps"))


@pytest.mark.parametrize("chip", sorted(HALVES))
def test_there_is_a_tile_for_every_head(chip):
    """Of every dtype and kind; deeper pipelines for fp8, and fp32 multiplied exactly where a split would not fit."""
    for head_dim in (1, 16, 64, 65, 96, 97, 128, 129, 256, 257, 512, 1024):
        for dtype, kv_dtype in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, E4M3)):
            spec = ops.AttentionSpec(
                num_heads=4, num_kv_heads=2, head_dim=16, head_dim_v=head_dim, block_size=16, num_blocks=4, dtype=dtype,
                kv_dtype=kv_dtype,
            )  # fmt: skip
            tiles = {kind: choose(chip, kind, spec) for kind in ("few", "many", "exact")}
            assert tiles["few"].block_m == 16
            assert all(256 % tile.block_n == 0 for tile in tiles.values())
            assert precision(chip, spec) == ("ieee" if chip == "gfx942" or head_dim > 128 else "tf32x3")
    wide, narrow = (
        ops.AttentionSpec(
            num_heads=4, num_kv_heads=2, head_dim=128, block_size=16, num_blocks=4, dtype=torch.bfloat16, kv_dtype=kv
        )
        for kv in (None, E5M2)
    )
    assert choose(chip, "few", narrow).num_stages > choose(chip, "few", wide).num_stages
