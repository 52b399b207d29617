"""How large the attention kernel's tiles are: on which chip, for which dtype and head dimensions.

Every entry was compiled for its chip and has to keep all of its numbers in registers, which a test asserts. "few" is
for tiles of up to 16 rows, a sequence that decodes with its G heads; "many" for more; "exact" for all tiles of a plan
that must be reproducible: one tile, so that a row's sums are formed in one order wherever it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from quire.ops.interface import AttentionSpec

Kind = Literal["few", "many", "exact"]

CHUNK = 1_024  # keys: where a reproducible plan cuts contexts, at absolute multiples
SPLIT = 256  # keys: the least that a part of a context is worth; a multiple of every tile's block_n


@dataclass(frozen=True)
class Tile:
    """Rows and keys of a tile, and how the compiler is to lay it out."""

    block_m: int  # (query token, head) pairs
    block_n: int  # keys
    num_warps: int
    num_stages: int  # of the pipeline that loads keys


# By chip and kind: the tile for head dimensions up to 64, 128, 256, 512, 1024.
HALVES: dict[str, dict[Kind, tuple[Tile, Tile, Tile, Tile, Tile]]] = {
    "sm80": {
        "few": (Tile(16, 64, 4, 3), Tile(16, 64, 4, 3), Tile(16, 32, 4, 3), Tile(16, 16, 4, 2), Tile(16, 16, 8, 1)),
        "many": (Tile(128, 64, 8, 3), Tile(64, 32, 4, 3), Tile(64, 32, 8, 2), Tile(16, 16, 4, 2), Tile(16, 16, 8, 1)),
        "exact": (Tile(64, 32, 4, 3), Tile(32, 32, 4, 3), Tile(16, 32, 4, 3), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
    "sm90": {
        "few": (Tile(16, 64, 4, 3), Tile(16, 64, 4, 3), Tile(16, 32, 4, 3), Tile(16, 16, 4, 2), Tile(16, 16, 8, 1)),
        "many": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 32, 8, 2), Tile(16, 16, 4, 2), Tile(16, 16, 8, 1)),
        "exact": (Tile(64, 64, 4, 3), Tile(64, 64, 8, 3), Tile(16, 32, 4, 3), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
    "sm100": {
        "few": (Tile(16, 64, 4, 3), Tile(16, 64, 4, 3), Tile(16, 32, 4, 3), Tile(16, 16, 4, 2), Tile(16, 16, 8, 1)),
        "many": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 32, 8, 2), Tile(16, 16, 4, 2), Tile(16, 16, 8, 1)),
        "exact": (Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(16, 32, 4, 3), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
    "gfx942": {
        "few": (Tile(16, 32, 4, 3), Tile(16, 32, 4, 3), Tile(16, 16, 4, 2), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        "many": (Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        "exact": (Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(16, 16, 4, 2), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    },
}
# In fp32 a number takes twice the room, and a product several: the same tile for every kind, the last two slow.
FP32 = (Tile(16, 32, 4, 2), Tile(16, 32, 4, 2), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1))

DIMS = (64, 128, 256, 512, 1024)


def choose(chip: str, kind: Kind, spec: AttentionSpec) -> Tile:
    """The tile of that kind on that chip, as `chip_of` names it."""
    size = next(i for i, most in enumerate(DIMS) if max(spec.head_dim, spec.dim_v) <= most)
    return FP32[size] if spec.dtype is torch.float32 else HALVES[chip][kind][size]


def chip_of(device: str) -> str:
    """The entry of the table that serves a device; the interpreter takes Hopper's."""
    if not device.startswith("cuda"):
        return "sm90"
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return "sm80" if major < 9 else "sm90" if major == 9 else "sm100"


def processors_of(device: str) -> int:
    """How many programs run at the same time on different processors; few in the interpreter, so that work is cut."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.startswith("cuda") else 8
