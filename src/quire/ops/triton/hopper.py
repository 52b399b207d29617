"""The backend "hopper": the Triton backend, with prompts and shared prefixes by `prefill` on GPUs of capability 9.0.

A plan or a call that this kernel does not serve is computed by Triton's, and a warning gives the reason, once. "auto"
does not choose this backend: its kernel was compiled ahead of time and its algorithm emulated, but it has not been run.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import triton
from torch import Tensor

from quire.ops.spec import AttentionSpec
from quire.ops.triton.backend import LOG2_E, Call, TritonBackend, launch_attend
from quire.ops.triton.tiles import Tile, choose, processors_of
from quire.ops.triton.worklist import TritonPlan

log = logging.getLogger("quire")

GROUP_ROWS = 64  # of a warp group: one matrix instruction's
# By head dimension: rows and keys of a tile, warps, stages of the ring, warp groups.
TILES = {128: Tile(128, 128, 8, 2, groups=2), 64: Tile(192, 128, 12, 2, groups=3)}
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)  # a piece of a block is a whole number of swizzles, a tile of pieces
# By warp groups: the compiler's limit for a thread, then registers of the groups and of the warp that copies. Together
# they are the 65,536 of a processor; each is a multiple of 8.
REGISTERS = {2: (168, 232, 40), 3: (128, 160, 32)}


class HopperBackend(TritonBackend):
    """The Triton backend with a kernel of specialised warps for many rows."""

    name = "hopper"

    def unavailable(self, device: str) -> str | None:
        """Return the reason why this backend cannot serve the device on this machine, or None if it can."""
        if not device.startswith("cuda"):
            return f"it serves GPUs of compute capability 9.0, not {device!r}"
        if reason := super().unavailable(device):
            return reason
        if torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
            return f"it needs a GPU of compute capability 9.0, as an H100 has, and {device!r} is another"
        if not triton.__version__.startswith("3.6."):
            return f"its kernel was written for triton 3.6, which changes Gluon; there is {triton.__version__}"
        return None

    def _make_plan(self, spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int) -> TritonPlan:
        if reason := plan_reason(spec):
            _report(reason)
            return super()._make_plan(spec, max_tokens, max_seqs, max_blocks)
        return TritonPlan(spec, max_tokens, max_seqs, max_blocks, TILES[spec.head_dim])

    def _attend_many(self, call: Call, items: Tensor, count: int, mixed: bool) -> None:
        spec, tile = call.plan.spec, call.plan.partitioner.many_tile
        if tile.groups == 1:  # the plan was not made for the kernel
            return super()._attend_many(call, items, count, mixed)
        usual = choose("sm90", "many", spec)
        if reason := call_reason(call):
            _report(reason)
            return self._attend(call, items, count, usual, mixed, rows=tile.block_m)
        if count == 0:
            return None
        size = count * spec.num_kv_heads * tile.block_m
        reports = torch.empty(size, dtype=torch.int8, device=call.q.device) if mixed else None
        _prefill(call, items, count, tile, reports)
        if mixed:
            again = Tile(GROUP_ROWS, usual.block_n, usual.num_warps, 1)
            launch_attend(call, items, (count, spec.num_kv_heads, tile.groups), again, reports, finite=True)
        return None


def plan_reason(spec: AttentionSpec) -> str | None:
    """Return the reason why no call with this spec can use the kernel, or None."""
    reasons = {
        f"reproducible plans have one tile for all rows, which is {choose('sm90', 'exact', spec)}": spec.reproducible,
        f"q is {spec.dtype}; it multiplies bfloat16 and float16": spec.dtype not in (torch.bfloat16, torch.float16),
        f"the cache is {spec.cache_dtype}; it multiplies the dtype of q": spec.cache_dtype is not spec.dtype,
        "the cache is latent": spec.latent,
        f"heads have {spec.head_dim} and {spec.dim_v} dimensions; it has tiles for 64 and 128": (
            spec.head_dim not in TILES or spec.dim_v != spec.head_dim
        ),
        f"blocks have {spec.block_size} tokens; it copies blocks of {BLOCK_SIZES}": spec.block_size not in BLOCK_SIZES,
        f"there is a window of {spec.window}": spec.window is not None,
        f"{spec.group_size} heads share a KV head; a warp group has {GROUP_ROWS} rows": spec.group_size > GROUP_ROWS,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def call_reason(call: Call) -> str | None:
    """Return the reason why this call cannot use the kernel although its plan was made for it, or None."""
    scale, alibi_slopes, softcap, _, chunk = call.scores
    caches = (call.kv.k, call.kv.v)
    unaligned = any(x.data_ptr() % 16 or any(step * x.itemsize % 16 for step in x.stride()[:3]) for x in caches)
    reasons = {
        "there are ALiBi slopes": alibi_slopes is not None,
        "there is a softcap": softcap is not None,
        "rows see chunks": chunk is not None,
        f"the scale is {scale}; the largest score must belong to the largest product": scale is not None and scale <= 0,
        "rows of the cache do not begin at multiples of 16 bytes": unaligned,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


@cache
def _report(reason: str) -> None:
    log.warning("backend 'hopper' computes prompts with Triton's kernel: %s", reason)


def turns_of(work: int, processors: int) -> tuple[int, int]:
    """Return the number of programs, one per processor at most, and of items that each of them takes in turn."""
    programs = min(work, processors)
    return programs, -(-work // programs)


def _prefill(call: Call, items: Tensor, count: int, tile: Tile, reports: Tensor | None) -> None:
    """Launch the kernel."""
    # Imported here: the package is there without Gluon on other chips, and compiling is not needed to plan.
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quire.ops.triton.prefill import prefill

    spec, plan, kv = call.plan.spec, call.plan, call.kv
    programs, turns = turns_of(count * spec.num_kv_heads, processors_of(spec.device))
    piece = [1, 1, min(spec.block_size, tile.block_n), 64]
    layout = gl.NVMMASharedLayout(128, 16, 4)
    scale = spec.default_scale if call.scores.scale is None else call.scores.scale
    limit, registers, copy_registers = REGISTERS[tile.groups]
    prefill[(programs,)](
        *(TensorDescriptor(x, list(x.shape), list(x.stride()), piece, layout) for x in (kv.k, kv.v)),
        call.q,
        call.out,
        call.lse,
        *call.parts,
        items,
        plan.rows,
        plan.ends,
        plan.tables,
        call.scores.sinks,
        reports,
        count,
        spec.num_kv_heads,
        spec.num_blocks,
        turns,
        *call.q.stride()[:2],
        *call.out.stride()[:2],
        LOG2_E * scale,
        G=spec.group_size,
        B=spec.block_size,
        D=spec.head_dim,
        N=tile.block_n,
        GROUPS=tile.groups,
        STAGES=tile.num_stages,
        CAUSAL=spec.causal,
        REGISTERS=registers,
        COPY_REGISTERS=copy_registers,
        num_warps=4,
        maxnreg=limit,
    )


BACKEND = HopperBackend()
