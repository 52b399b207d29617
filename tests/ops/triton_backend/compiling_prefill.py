"""The kernel of the backend "hopper", compiled for sm_90 without a GPU: `python -m ...` prints a line for each tile."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from quire import ops
from quire.ops.spec import Scores
from quire.ops.triton import hopper
from quire.ops.triton import prefill as module
from quire.ops.triton.backend import Call
from quire.ops.triton.worklist import TritonPlan
from tests.ops.triton_backend.compiling import _nvidia, _output

COUNTED = ("HGMMA", "HMMA", "MUFU", "LDL", "STL", "UTMALDG")
DRIVER = SimpleNamespace(  # what triton asks a driver before it compiles
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_active_torch_device=lambda: torch.device("cpu"),
)


class Compiled:
    """Stands in for the kernel: `launched[grid](...)` compiles it as a launch with these arguments would."""

    def __init__(self) -> None:
        self.kernel = module.prefill
        self.made: object = None

    def __getitem__(self, grid: tuple[int]):
        def compile_only(*arguments, **constants):
            self.made = self.kernel.warmup(*arguments, **constants, grid=grid)

        return compile_only


def compiled(
    head_dim: int, window: int | None, dtype: torch.dtype = torch.bfloat16, block_size: int = 16
) -> dict[str, object]:
    """Compile one tile by the backend's own launch, and return what the compiler made of it."""
    spec = ops.AttentionSpec(
        num_heads=32, num_kv_heads=8, head_dim=head_dim, block_size=block_size, num_blocks=64, dtype=dtype,
        window=window,
    )  # fmt: skip
    tile = hopper.TILES[head_dim]
    plan = TritonPlan(spec, 256, 4, 16, tile)
    memory = torch.zeros(64, 2, 8, block_size, head_dim, dtype=dtype)
    q, sums = torch.zeros(256, 32, head_dim, dtype=dtype), torch.zeros(2, 64)
    call = Call(q, ops.PagedKV(memory[:, 0], memory[:, 1]), plan, Scores(), q, torch.zeros(256, 32), (sums[0], sums[1]))
    with patch.object(module, "prefill", Compiled()) as launched:
        hopper._prefill(call, plan.many, 2, tile, torch.zeros(9, dtype=torch.int8))
    cubin = launched.made.asm["cubin"]
    code = _output("nvdisasm", "-c", cubin)
    registers, spills = _nvidia(cubin)
    products = 2 * head_dim // 16 if head_dim == 128 else head_dim // 16 + 8  # of a tile of 128 keys: QK, then PV
    of_a_tile = [loop for loop in loops(code) if loop["HGMMA"] == products]
    # A group has a loop with masks, two with a window, and one without, which has fewer instructions.
    of_a_tile = sorted(of_a_tile, key=lambda loop: loop["instructions"])[: tile.groups]
    return {
        "D": head_dim, "window": window, "GROUPS": tile.groups, "registers": registers, "spills": spills,
        "shared": launched.made.metadata.shared, "products": len(re.findall("HGMMA", code)),
        "copies": len(re.findall("UTMALDG", code)), "loops": of_a_tile,
    }  # fmt: skip


def loops(code: str) -> list[dict[str, int]]:
    """Return the number of instructions of each loop of a disassembly, of some kinds and of all."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(.*?);", line):
            instructions.append(found[1])
    made = []
    for at, instruction in enumerate(instructions):
        target = re.match(r"BRA.*?(\.L_x_\d+)", instruction)
        if target and labels.get(target[1], at + 1) <= at:
            body = instructions[labels[target[1]] : at + 1]
            counts = {kind: sum(one.startswith(kind) for one in body) for kind in COUNTED}
            made.append(counts | {"instructions": len(body)})
    return made


if __name__ == "__main__":
    triton.runtime.driver.set_active(DRIVER)
    for tile_dim in hopper.TILES:
        for keys in (None, 1000):
            print(json.dumps(compiled(tile_dim, keys)), flush=True)
