"""What the compiler makes of the kernels, for every chip that the tiles were chosen for. No GPU is needed.

With --long, for all four chips, of every head dimension, dtype and tile. Else, a chip taking minutes, for one of them,
and of the first of each kernel (`compiling` lists them).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.ops.triton.tiles import RESIDENT
from tests.ops.triton_backend.compiling import HEAD_DIMS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
SHARED = {"sm80": 163 * 1024, "sm90": 227 * 1024, "sm100": 227 * 1024, "gfx942": 64 * 1024}  # bytes a program may have
PROCESSOR_SHARED = {
    "sm80": 164 * 1024,
    "sm90": 228 * 1024,
    "sm100": 228 * 1024,
}  # bytes a processor has, 1 KiB a program
PROCESSOR_REGISTERS = 64 * 1024

HOPPER = ("sm90", "sm100")
# How many registers of a thread may lie in memory. Heads of 1024 that are to be reproducible hold two sums of 1024
# numbers a row. Reproducible heads of 64 to 128 on Hopper and later keep the state of the chunks before there: it is
# touched once in 1,024 keys. Of fp32 heads of 64 and integers of 8 bits the compiler stops at fewer registers than
# there are, and lays some that are used once a program into memory. The recurrences' tiles are for NVIDIA's chips.
MOST_SPILLS = {
    ("sm80", "attend exact 1024 bf16"): 32,
    ("gfx942", "attend exact 1024 bf16"): 320,
    **{(chip, "attend many 64 fp32"): 6 for chip in ("sm80", *HOPPER)},
    ("sm80", "attend many 64 bf16 everything"): 2,
    **{(chip, f"attend exact {dim} bf16"): 48 for chip in HOPPER for dim in (96, 128)},
    **{(chip, f"attend exact {dim} bf16 everything"): 64 for chip in HOPPER for dim in (64, 128)},
    ("sm90", "attend exact 64 bf16"): 24,
    ("sm90", "attend exact 64 bf16 everything"): 112,
    ("sm90", "attend exact 128 bf16/i8"): 4,
    # A pair that is put aside once before a loop.
    **{("sm80", f"attend {name}"): 2 for name in ("few 64 fp32", "few 256 fp32", "few 64 bf16 everything")},
    ("sm80", "attend many 256 fp32"): 2,
    **{("sm90", f"attend exact {name}"): 2 for name in ("80 bf16", "1024 bf16", "256 fp32")},
    ("sm100", "attend many 80 bf16"): 2,
    ("gfx942", "attend exact 512 bf16"): 2,
    ("sm100", "attend exact 80 bf16"): 16,
    ("sm100", "attend exact 1024 bf16"): 4,
    ("sm100", "attend exact 256 fp32"): 8,
    # Keys have two products, each with its scale.
    **{(chip, f"attend {kind} 576 bf16/i8 latent"): 4 for chip in HOPPER for kind in ("few", "many")},
    ("sm80", "linear 128 fp32 in sections"): 12,  # two sums
    ("sm80", "integers int8 32x16"): 4,
    ("sm100", "integers int4 32x64"): 4,
    ("gfx942", "gated_delta"): 160,
    ("gfx942", "state_space"): 48,
}


Kernels = dict[str, dict]  # by name, as `compiling` reports them


def kernels(chip: str, everything: bool) -> Kernels:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.ops.triton_backend.compiling", chip, *["--all"] * everything]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return {kernel["name"]: kernel for kernel in map(json.loads, run.stdout.splitlines())}


def attention(found: Kernels, kind: str) -> dict[int, dict]:
    """The plain bf16 attention kernels of a kind, by head dimension."""
    pattern = re.compile(rf"attend {kind} (\d+) bf16")
    return {int(match[1]): kernel for name, kernel in found.items() if (match := pattern.fullmatch(name))}


def test_sm80(long: bool) -> None:
    only_if(long)
    check("sm80", long)


@pytest.mark.triton(cases=0)
def test_sm90(long: bool) -> None:
    found = check("sm90", long)
    for name in ("many", "exact"):
        for dim, kernel in attention(found, name).items():
            if dim <= (256 if name == "many" else 128):  # Hopper's own matrix instruction, and no other
                assert kernel["instructions"]["HGMMA"] > 0, kernel
                assert kernel["instructions"]["HMMA"] == 0, kernel
    for name, kernel in found.items():
        if name.startswith("linear") and " bf16" in name:
            code = kernel["instructions"]
            assert code["HGMMA"] > 0, name
            assert code["LDGSTS.128"] == code["LDGSTS"], name
            assert kernel["buffers"], name  # that the pipeline loads ahead
        elif name.startswith("integers") and name.endswith((" 128x64", " 32x16")):  # rows are many, or few
            assert kernel["instructions"]["IGMMA" if name.endswith("128x64") else "IMMA"] > 0, name


def test_sm100(long: bool) -> None:
    only_if(long)
    found = check("sm100", long)
    for dim, kernel in attention(found, "many").items():
        assert kernel["instructions"]["UTCHMMA"] > 0 or dim > 256, kernel


def test_gfx942(long: bool) -> None:
    only_if(long)
    found = check("gfx942", long)
    assert all(kernel["instructions"]["MFMA"] > 0 for kernel in attention(found, "many").values())


def only_if(long: bool) -> None:
    if not long:
        pytest.skip("compiled for this chip with --long: `make test-long`")


def check(chip: str, everything: bool) -> Kernels:
    """Compile for a chip, and check what holds on all of them."""
    found = kernels(chip, everything)
    for name, kernel in found.items():
        if not name.endswith(" again"):  # that one runs where something went wrong
            assert kernel["spills"] <= MOST_SPILLS.get((chip, name), 0), kernel
        assert kernel["shared"] <= SHARED[chip], kernel
    for kind in ("few", "many", "exact"):
        assert tuple(attention(found, kind)) == (HEAD_DIMS if everything else HEAD_DIMS[:1])
        for dim in {64, 128, 256} & attention(found, kind).keys():
            code = attention(found, kind)[dim]["instructions"]
            if chip == "gfx942":
                assert code["LDG.128"] > 0, (kind, dim)
            else:  # every load of keys and values brings 16 bytes, past the registers
                assert code["LDGSTS.128"] == code["LDGSTS"] > 0, (kind, dim, code)
    for dim, kernel in attention(found, "few").items():
        if dim not in (64, 128, 256):
            continue
        # Keys, besides those of the tile that is computed with.
        in_flight = max(count * int(shape.partition("x")[0]) for shape, count in kernel["buffers"].items())
        assert in_flight >= (64 if chip != "gfx942" or dim != 256 else 16), kernel
        if dim <= 128 and chip in PROCESSOR_SHARED:  # as many at a time as the plan counts on
            registers = -(-kernel["registers"] // 8) * 8 * 32 * kernel["warps"]
            assert registers * RESIDENT[chip] <= PROCESSOR_REGISTERS, kernel
            # The system takes 1 KiB of each program.
            assert (kernel["shared"] + 1024) * RESIDENT[chip] <= PROCESSOR_SHARED[chip], kernel
    return found
