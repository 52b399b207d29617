"""Sizes of the attention kernel's tiles by chip, dtype and head dimensions.

"few" is for tiles of up to 16 rows, a decoding sequence with its G heads; "many" for more; "exact" for all tiles of a
reproducible plan, with few rows or many, so that the instructions that compute a row's sums do not depend on its batch.
A plan with two tiles, one of 16 rows for decoding sequences, was not batch-invariant on an H200 (bf16, heads of 64 and
128), although both tiles agreed for other shapes on an H100.

Every entry was compiled for its chip and keeps all of its numbers in registers, which a test asserts for plain
attention. Exceptions are fp32 heads above 256, and reproducible ones of 1024 on two of the chips and of 64 to 128 on
Hopper: those keep the state of earlier chunks in memory, which costs less than a smaller tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from quire.ops.spec import AttentionSpec
from quire.ops.triton.attention import main_part, tail_part

Kind = Literal["few", "many", "exact"]

CHUNK = 1_024  # keys: a reproducible plan cuts contexts at absolute multiples
SPLIT = 256  # keys: the smallest part of a context; a multiple of every tile's block_n


@dataclass(frozen=True)
class Tile:
    """Rows and keys of a tile, and compiler options."""

    block_m: int  # (query token, head) pairs
    block_n: int  # keys
    num_warps: int
    num_stages: int  # of the pipeline that loads keys
    groups: int = 1  # of warps, that divide the rows: each has whole tokens

    def tokens(self, group_size: int) -> int:
        """Return the number of tokens whose heads of a group fit; 0 if one token's do not."""
        return self.groups * (self.block_m // self.groups // group_size)


# By kind: the tile for head dimensions up to 64, 96, 128, 256, 512, 1024.
# fmt: off
SM80: dict[Kind, tuple[Tile, ...]] = {
    "few": (Tile(16, 64, 4, 3), Tile(16, 32, 4, 4), Tile(16, 32, 4, 4), Tile(16, 32, 4, 3), Tile(16, 16, 4, 2),
            Tile(16, 16, 8, 1)),
    "many": (Tile(128, 64, 8, 3), Tile(64, 32, 8, 3), Tile(64, 32, 8, 3), Tile(32, 32, 4, 2), Tile(16, 16, 4, 2),
             Tile(16, 16, 8, 1)),
    "exact": (Tile(64, 32, 8, 3), Tile(16, 16, 4, 3), Tile(32, 32, 8, 3), Tile(16, 32, 4, 3), Tile(16, 16, 8, 1),
              Tile(16, 16, 8, 1)),
}
SM90: dict[Kind, tuple[Tile, ...]] = {
    "few": (Tile(16, 128, 4, 2), Tile(16, 64, 4, 3), Tile(16, 128, 4, 2), Tile(16, 32, 4, 3), Tile(16, 16, 4, 2),
            Tile(16, 16, 8, 1)),
    "many": (Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 32, 8, 2), Tile(16, 16, 4, 2),
             Tile(16, 16, 8, 1)),
    "exact": (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(16, 32, 4, 3), Tile(16, 16, 8, 1),
              Tile(16, 16, 8, 1)),
}
GFX942: dict[Kind, tuple[Tile, ...]] = {
    "few": (Tile(16, 32, 4, 3), Tile(16, 32, 4, 3), Tile(16, 32, 4, 3), Tile(16, 16, 4, 2), Tile(16, 16, 4, 1),
            Tile(16, 16, 4, 1)),
    "many": (Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(16, 16, 4, 1),
             Tile(16, 16, 4, 1)),
    "exact": (Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(16, 16, 4, 2), Tile(16, 16, 4, 1),
              Tile(16, 16, 4, 1)),
}
HALVES = {"sm80": SM80, "sm90": SM90, "sm100": SM90, "gfx942": GFX942}
# In fp32 a number takes twice the space, and a product several instructions.
_LARGE = (Tile(16, 32, 4, 2), Tile(16, 32, 4, 2), Tile(16, 16, 4, 2), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1))
FP32: dict[Kind, tuple[Tile, ...]] = {
    "few": (Tile(16, 32, 8, 2), *_LARGE), "many": (Tile(16, 32, 8, 2), *_LARGE), "exact": (Tile(16, 32, 4, 2), *_LARGE),
}
# fmt: on

# Programs with a "few" tile, for heads of up to 128, that run on one processor at the same time.
RESIDENT = {"sm80": 3, "sm90": 2, "sm100": 2, "gfx942": 2}
WARPS = 8  # of "many" and "exact" tiles that run on one processor at the same time, limited by registers

DIMS = (64, 96, 128, 256, 512, 1024)

# Whether caches of 8 bits are widened in pairs of dimensions. Compiled and emulated, but not run on a GPU yet, see
# docs/gpu.md.
IN_PAIRS = False


def choose(chip: str, kind: Kind, spec: AttentionSpec) -> Tile:
    """Return the tile of a kind on a chip, as named by `chip_of`."""
    size = next(i for i, most in enumerate(DIMS) if max(spec.head_dim, spec.dim_v) <= most)
    if spec.dtype is torch.float32:
        return FP32[kind][size]
    tile = HALVES[chip][kind][size]
    if kind == "few" and spec.cache_dtype.itemsize == 1:  # half the bytes: prefetch further ahead
        return replace(tile, block_n=min(tile.block_n, 64), num_stages=max(3, tile.num_stages) + 1)
    if kind != "few" and chip in ("sm90", "sm100") and spec.cache_dtype.itemsize == 1 and DIMS[size] <= 128:
        # Widening needs registers: the other tiles leave none free.
        return Tile(128 if kind == "many" else 64, 64 if DIMS[size] <= 64 else 32, 8, 3)
    if kind == "many" and spec.is_scaled and DIMS[size] > 64:
        return replace(tile, block_n=min(tile.block_n, 32))
    return tile


def launchable(spec: AttentionSpec, tile: Tile, *, aligned: bool) -> Tile:
    """Return the tile with which an item of `tile` is computed.

    On Hopper with triton 3.6, values that are loaded through registers into shared memory, because their rows do not
    begin at multiples of 16 bytes or are widened, are wrong if the product has fewer than 64 columns of them (seen on
    an H100 and pinned by tests/ops/triton_backend/test_narrow.py). Tiles of 32 rows use another instruction.
    """
    by_registers = not aligned or spec.cache_dtype is not spec.dtype
    narrow = main_part(spec.dim_v) < 64 or 0 < tail_part(spec.dim_v) < 64
    if not by_registers or not narrow:
        return tile
    if tile.block_m < 64 or chip_of(spec.device) != "sm90":
        return tile
    return replace(tile, block_m=32, block_n=min(tile.block_n, 32), num_warps=4, num_stages=1)


def pairs_of(spec: AttentionSpec, tile: Tile, unit: int) -> str | None:
    """Return how a kernel widens a cache of 8 bits in pairs of dimensions, see `widening`, or None if it does not.

    It does in tiles of few rows, whose time is that of reading keys. unit: elements that all strides are multiples of.
    """
    fits = all(dim >= 32 and dim & (dim - 1) == 0 for dim in (spec.head_dim, spec.dim_v)) and unit % 2 == 0
    if not IN_PAIRS or not fits or spec.latent or spec.reproducible or tile.block_m > 16 or spec.dtype.itemsize != 2:
        return None
    name = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(spec.cache_dtype)
    if name is None or not spec.device.startswith("cuda"):
        return name and f"plain {name}"
    return name if torch.version.hip is None else None


def pieces(group_size: int, rows: int, tile: Tile) -> int:
    """Return the number of programs of one head for an item of up to `rows` rows."""
    of_heads, tokens = -(-group_size // tile.block_m), max(1, rows // group_size)
    return of_heads * -(-tokens // max(1, tile.block_m // group_size))


def precision(chip: str, spec: AttentionSpec) -> str:
    """Return the mode of fp32 products: three TF32 products, which are nearly as exact, or fp32 if these do not fit."""
    return "ieee" if chip == "gfx942" or max(spec.head_dim, spec.dim_v) > 128 else "tf32x3"


def chip_of(device: str) -> str:
    """Return the entry of the table for a device; the interpreter uses Hopper's."""
    if not device.startswith("cuda"):
        return "sm90"
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return "sm80" if major < 9 else "sm90" if major == 9 else "sm100"


@cache  # for each product with sections
def processors_of(device: str) -> int:
    """Return the number of the device's processors; few in the interpreter, so that work is cut."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.startswith("cuda") else 8
