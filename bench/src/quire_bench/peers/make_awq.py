"""A bf16 checkpoint of Llama's shape with its linears rounded to 4 bits and stored as AWQ does (version gemm).

python -m quire_bench.peers.make_awq DIRECTORY TARGET

Each number is rounded to the nearest. AWQ itself chooses scales with data; speed does not depend on that.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BITS = 4
MOST = 2**BITS - 1
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight columns, the one that each number of a word has; the lowest bits first
GROUPS = (128, 64)  # inputs, the larger where it divides
SMALLEST_SCALE = 2.0**-14  # of normal fp16


def rounded(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers, zeros and scales of a weight [out, in], which is about (q - z) s.

    q: int32 [in, out]; z: int32 [in / group_size, out]; s: fp16 [in / group_size, out].
    """
    groups = weight.T.float().reshape(-1, group_size, len(weight))  # [groups, group_size, out]
    low, high = groups.amin(1).clamp(max=0.0), groups.amax(1).clamp(min=0.0)
    scales = ((high - low) / MOST).clamp(min=SMALLEST_SCALE).half()
    steps = scales.float()
    zeros = (-low / steps).round().clamp(0, MOST)
    values = (groups / steps[:, None] + zeros[:, None]).round().clamp(0, MOST)
    return values.flatten(0, 1).int(), zeros.int(), scales


def packed(numbers: Tensor) -> Tensor:
    """int32 [rows, columns], each 0 to 15 -> words, int32 [rows, columns / 8]."""
    shifts = torch.arange(0, 32, BITS, dtype=torch.int32)
    return (numbers.reshape(len(numbers), -1, len(ORDER))[..., ORDER] << shifts).sum(-1, dtype=torch.int32)


def main(source: Path, target: Path) -> None:
    """Write the checkpoint. Ends the program where no size of groups divides the inputs of all linears."""
    tensors = {name: tensor for path in source.glob("*.safetensors") for name, tensor in load_file(path).items()}
    linears = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    inputs = {tensors[f"{name}.weight"].shape[1] for name in linears}
    group_size = next((size for size in GROUPS if not any(count % size for count in inputs)), None)
    if group_size is None:
        sys.exit(f"{source}: linears have {sorted(inputs)} inputs; groups of {GROUPS} must divide all")
    for name in linears:
        values, zeros, scales = rounded(tensors.pop(f"{name}.weight"), group_size)
        tensors |= {f"{name}.qweight": packed(values), f"{name}.qzeros": packed(zeros), f"{name}.scales": scales}
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    scheme = {"quant_method": "awq", "version": "gemm", "bits": BITS, "group_size": group_size, "zero_point": True}
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
