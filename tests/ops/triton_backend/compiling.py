"""The Triton backend's kernels, compiled for one chip without one: `python -m ... sm90` prints a line for each.

With `--all` it compiles every head dimension, dtype and tile, else the first of each; `pytest --long` does all.
A process of its own a chip: triton keeps some of what it finds out about the first one. No GPU and no driver is needed;
what the compiler made is read off its own resource report and the disassembly.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire import ops
from quire.ops.triton import cache, linear, quantised, recurrent, sampling, scan, small, states, tiles
from quire.ops.triton.attention import attend as attend_kernel
from quire.ops.triton.attention import merge as merge_kernel
from quire.ops.triton.packed import PackedWeight, has_sums
from quire.ops.triton.tiles import CHUNK, Kind, choose, pairs_of, precision
from quire.ops.weights.quantised import PARTS, QuantisedWeight

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
COUNTED = re.compile(r"(attend \w+|linear) \d+ bf16|integers \S+ (128x64|32x16)")  # whose instructions are of interest
HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512, 1024)
SCALARS = ("scale", "cap", "eps", "slope", "limit", "offset", "dt_low", "dt_high", "beta_scale", "floor")
UNALIGNED = (
    *SCALARS,
    "window",
    "num_rows",
    "inner",
    "rows",
    "size",
    "x_column",
)  # arguments that are multiples of nothing


@dataclass
class Kernel:
    """One kernel as it is launched: arguments that are not named are int32."""

    name: str
    function: object
    pointers: dict[str, str]
    constants: dict[str, object]
    options: dict[str, object]


@dataclass
class Compiled:
    """What the compiler made of it."""

    name: str
    registers: int
    spills: int  # registers of a thread that lie in memory
    shared: int  # bytes
    warps: int
    buffers: dict[str, int]  # shape of a tile of keys or values -> how many the pipeline holds
    instructions: dict[str, int]  # of the kernels that are COUNTED


# --------------------------------------------------------------------------------------------------- the kernels

NARROW = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
          torch.int8: "i8", torch.int16: "i16"}  # fmt: skip
SCALES = ("k_scale", "v_scale")


def attend(
    chip: str, kind: Kind, head_dim: int, dtype: torch.dtype = torch.bfloat16,
    kv: torch.dtype | None = None, everything: bool = False, finite: bool = False, latent: int | None = None,
    pairs: bool = False,
) -> Kernel:  # fmt: skip
    """Attention with the tile that the table gives; tiles of few rows are of one token, as when sequences decode.

    everything: with a window, ALiBi, a softcap, sinks and an LSE. finite: the second launch, for what was reported.
    latent: V is so many numbers of K. pairs: of dimensions of 8 bits are loaded at a time.
    """
    spec = ops.AttentionSpec(
        num_heads=32, num_kv_heads=8, head_dim=head_dim, block_size=16, num_blocks=100, dtype=dtype, kv_dtype=kv,
        head_dim_v=latent, latent=latent is not None,
    )  # fmt: skip
    tile = choose(chip, kind, spec)
    rows, keys = NARROW[dtype], NARROW[kv or dtype]
    is_exact = kind == "exact"
    pointers = {"q": rows, "k": keys, "v": keys, "out": rows, "lse": "fp32", "slopes": "fp32", "sinks": "fp32"}
    pointers |= {"part_mix": "fp32", "part_sums": "fp32"}
    pointers |= dict.fromkeys(("items", "rows", "positions", "ends", "sequences", "tables"), "i32")
    pointers["reports"] = "i8"
    constants = {
        **{"v_block": None, "v_slot": None},  # as in the engine's cache
        **{"G": 4, "B": 16, "D": head_dim, "DV": spec.dim_v, "LATENT": spec.latent and spec.is_scaled, "CAUSAL": True},
        "PRECISION": precision(chip, spec),
        "UNIT": 16 // spec.cache_dtype.itemsize,
        **{"BLOCK_M": tile.block_m, "TILE": tile.block_n, "CHUNK": CHUNK if is_exact else 0},
        "FINITE": finite,
        "PAIRS": pairs_of(replace(spec, device="cuda"), tile, 16) if pairs else None,
    }
    if kv is torch.int8:
        pointers |= dict.fromkeys(SCALES, "fp32")
    else:
        constants |= dict.fromkeys(SCALES)
    if not everything:
        constants |= dict.fromkeys(("window", "span", "slopes", "sequences", "cap", "sinks", "lse"))
    if kind == "few" and not finite:
        constants["reports"] = None
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": not is_exact}
    if finite:
        options["num_stages"] = 1
    name = f"attend {kind} {head_dim} {rows}" + (f"/{keys}" if kv else "")
    name += " latent" * spec.latent + " pairs" * pairs + " everything" * everything + " again" * finite
    return Kernel(name, attend_kernel, pointers, constants, options)


def attention_kernels(chip: str) -> Iterator[Kernel]:
    tiles.IN_PAIRS = True
    kinds: tuple[Kind, ...] = ("few", "many", "exact")
    for kind in kinds:
        for head_dim in HEAD_DIMS:
            yield attend(chip, kind, head_dim)
        for head_dim in (64, 128, 256):
            yield attend(chip, kind, head_dim, torch.float32)
        for head_dim in (64, 128):
            yield attend(chip, kind, head_dim, everything=True)
        yield attend(chip, kind, 80, finite=True)
        if chip != "gfx942":
            yield attend(chip, kind, 128, kv=torch.int8)
            yield attend(chip, kind, 576, kv=torch.int8, latent=512)
        if chip in ("sm90", "sm100"):
            yield attend(chip, kind, 128, kv=torch.float8_e4m3fn)
        if chip in ("sm90", "sm100") and kind == "few":
            for kv in (torch.int8, torch.float8_e4m3fn):
                yield attend(chip, kind, 128, kv=kv, pairs=True)
    pointers = {"out": "bf16", **dict.fromkeys(("lse", "part_mix", "part_sums", "sinks"), "fp32"), "merges": "i32"}
    for dim in (128, 576):
        constants = {"DV": dim, "DIMS": triton.next_power_of_2(dim)}
        yield Kernel(f"merge {dim}", merge_kernel, pointers, constants, {"num_warps": 1 if dim <= 128 else 4})


def other_kernels(chip: str) -> Iterator[Kernel]:
    def pointers(dtype: str, *names: str) -> dict[str, str]:
        return dict.fromkeys(names, dtype)

    kv_heads = {"BLOCK_SIZE": 16, "HEADS": 8, "D": 128, "DV": 128, "K_HEADS": 8, "K_DIMS": 128, "V_HEADS": 8}
    limits = (
        {"bf16": 0.0}
        | ({"i8": 0.0} if chip != "gfx942" else {})
        | ({"fp8e4nv": 448.0, "fp8e5": 57_344.0} if chip in ("sm90", "sm100") else {})
    )
    for kv, limit in limits.items():
        types = {
            **pointers("bf16", "k_new", "v_new"),
            **pointers(kv, "k", "v"),
            **pointers("i32", "slots", "rows_nonfinite"),
        }
        constants: dict[str, object] = {**kv_heads, "V_DIMS": 128, "LIMIT": limit}
        if kv == "i8":
            types |= pointers("fp32", *SCALES)
        else:
            constants |= dict.fromkeys(SCALES)
        yield Kernel(f"write_rows {kv}", cache.write_rows, types, constants, {})
    yield Kernel(
        "copy_part", cache.copy_part, {"cache": "i16", **pointers("i32", "sources", "targets")},
        {"HEADS": 8, "BLOCK_SIZE": 16, "DIM": 128, "TILE": cache.COPY_TILE}, {},
    )  # fmt: skip
    heads = {"HEADS": 32, "DIM": 128, "HEAD_TILE": 16, "DIM_TILE": 128}
    types = {**pointers("bf16", "out_a", "out_b", "out"), **pointers("fp32", "lse_a", "lse_b", "lse")}
    yield Kernel("merge_rows", states.merge_rows, types, heads, {})
    types = {**pointers("bf16", "out", "closed"), **pointers("fp32", "lse", "sinks")}
    yield Kernel("sink_rows", states.sink_rows, types, heads, {})
    types = {**pointers("bf16", "x", "residual", "weight", "bias", "out"), "eps": "float"}
    for size in (768, 4096, 16384):
        tile, warps = small.norm_tile(size)
        for add in (False, True):
            constants = {"H": size, "TILE": tile, "ADD": add}
            yield Kernel(f"rms_norm {size} {add}", small.rms_norm_row, types, constants, {"num_warps": warps})
        constants = {"H": size, "TILE": tile, "BIAS": True}
        yield Kernel(f"layer_norm {size}", small.layer_norm_row, types, constants, {"num_warps": warps})
    types = {**pointers("bf16", "q", "k"), "positions": "i32", **pointers("fp32", "cos", "sin")}
    constants = {"Q_HEADS": 32, "K_HEADS": 8, "HALF": 64, "HEAD_TILE": 32, "PAIR_TILE": 64}
    yield Kernel("rope", small.rope_row, types, constants, {})
    types = pointers("bf16", "gate_up", "out")
    yield Kernel("swiglu", small.swiglu_part, types, {"SIZE": 14_336, "TILE": 1024}, {})
    for function, gated in ((0, True), (1, False), (2, True), (4, False), (5, False)):
        types = pointers("bf16", "x", "out")
        constants = {"SIZE": 14_336, "TILE": 1024, "FUNCTION": function, "GATED": gated, "LIMITED": gated}
        yield Kernel(f"activation {function}", small.activate_part, types, constants, {})
    for tanh in (False, True):
        constants = {"H": 3072, "TILE": 1024, "TANH": tanh}
        yield Kernel(f"gelu {tanh}", small.gelu_part, pointers("bf16", "x", "out"), constants, {})
    types = pointers("bf16", "x", "gate", "weight", "out") | {"eps": "float"}
    for heads, size in ((32, 128), (1, 8192)):
        tile, warps = small.norm_tile(size)
        constants = {"HEADS": heads, "DIM": size, "TILE": tile, "GATE_FIRST": heads == 1}
        yield Kernel(f"gated_norm {size}", small.gated_norm_part, types, constants, {"num_warps": warps})
    yield Kernel(
        "gate", small.gate_part, pointers("bf16", "gate", "x"), {"SIZE": 4096, "TILE": 1024, "BY_ROW": False}, {}
    )
    step = pointers("i32", "starts", "lens", "offsets", "records")
    types = {**pointers("bf16", "x", "out", "tail", "inputs"), **pointers("fp32", "weight", "bias"), **step}
    constants = {"W": 8192, "TAPS": 4, "TAIL_TILE": 4, "TILE": recurrent.CHANNELS, "SILU": True}
    yield Kernel("convolve", recurrent.convolve_piece, types, constants, {})
    yield from recurrence_kernels(step)
    types = pointers("fp32", "logits", "out")
    yield Kernel("logsumexp", sampling.logsumexp_row, types, {"TILE": 4096}, {"num_warps": 16})
    tiles = [linear.FEW_ON_HOPPER if chip == "sm90" else linear.FEW_ROWS, linear.MANY_ROWS]
    if chip == "sm90":
        tile = linear.MANY_ON_HOPPER
        types = pointers("bf16", "bias", "out")
        types["x"], types["weight"] = (f"tensordesc<bf16[{n}, {tile.depth}]>" for n in (tile.rows, tile.columns))
        yield Kernel(f"linear {tile.rows} bf16", linear.described_tile, types, *linear_options(tile))
    for dtype, depth in (("bf16", None), ("fp32", linear.FP32_DEPTH)):
        for tile in tiles:
            types = pointers(dtype, "x", "weight", "bias", "out")
            options = linear_options(replace(tile, depth=depth or tile.depth))
            yield Kernel(f"linear {tile.rows} {dtype}", linear.linear_tile, types, *options)
    yield from integer_kernels(chip)


def linear_options(tile: linear.LinearTile) -> tuple[dict[str, object], dict[str, object]]:
    constants = {"BIAS": True, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    return constants, {"num_warps": tile.warps, "num_stages": tile.stages}


def integer_weights() -> dict[str, QuantisedWeight]:
    """Of one output and 512 inputs."""

    def made(bits: int, group: int, dtype: torch.dtype = torch.float16, **parts: object) -> QuantisedWeight:
        return QuantisedWeight(
            torch.zeros(1, 512, dtype=torch.uint8), torch.ones(1, 512 // group, dtype=dtype), None, bits, group,
            torch.bfloat16, **parts,
        )  # fmt: skip

    def ones(group: int, dtype: torch.dtype) -> Tensor:
        return torch.ones(1, 512 // group, dtype=dtype)

    subs = {"sub_scales": ones(32, torch.int8), "sub_minimums": ones(32, torch.int8)}
    grouped = replace(made(4, 128, torch.float32), zeros=ones(128, torch.float32), order=torch.arange(512))
    return {
        "int4": grouped,
        "int8": made(8, 512, torch.float32, activation_group=512),
        "Q4_0": made(4, 32, activation_group=32),
        "Q4_K": made(4, 256, minimums=ones(256, torch.float16), **subs),
        "Q6_K": made(6, 256, sub_scales=ones(16, torch.int8)),
    }


def integer_kernels(chip: str) -> Iterator[Kernel]:
    """Products with quantised weights of every kind of code, in every tile, and the rounding of rows."""
    on_amd = chip == "gfx942"
    tiles = [quantised.FEW_ROWS, quantised.MANY_ROWS]
    tiles += [] if on_amd else [quantised.SOME_ROWS, quantised.FEW_OF_WIDE, quantised.SOME_OF_WIDE]
    for name, weight in integer_weights().items():
        packed = PackedWeight.of(weight)
        kind, parts = packed.kind, dict.fromkeys(PARTS[1:])
        parts |= {part: NARROW[given.dtype] for part in parts if (given := getattr(packed, part)) is not None}
        pointers = {"values": "i8", "bias": "fp32", "x": "i8", "x_scales": "fp32", "x_sums": "i32", "out": "bf16"}
        pointers |= {part: dtype for part, dtype in parts.items() if dtype is not None}
        for tile in tiles:
            constants = {**quantised.constants(kind, tile), "AHEAD": 0 if on_amd else tile.ahead}
            constants |= {part: None for part, dtype in parts.items() if dtype is None}
            constants |= {} if has_sums(kind) else {"x_sums": None}
            options = quantised.options(kind, tile, on_amd)
            label = f"integers {name} {tile.outputs}x{tile.rows}"
            label += " wide" * (tile in (quantised.FEW_OF_WIDE, quantised.SOME_OF_WIDE))
            yield Kernel(label, quantised.multiply_tile, pointers, constants | {"sums": None}, options)
            if tile in (quantised.FEW_ROWS, quantised.SOME_ROWS) and kind.minimums is None and not on_amd:
                types = pointers | {"sums": "i32"}
                yield Kernel(f"{label} divided", quantised.multiply_tile, types, constants | {"AHEAD": 0}, options)
        if kind.minimums is None and not on_amd:
            types = {"sums": "i32", "scales": parts["scales"], "bias": "fp32", "x_scales": "fp32", "out": "bf16"}
            finishing = quantised.finishing_constants(kind)
            yield Kernel(f"finish {name}", quantised.finish_sums, types, finishing, {"enable_fp_fusion": False})
        pointers = {"x": "bf16", "values": "i8", "scales": "fp32", "sums": "i32", "order": "i64"}
        constants = dict(quantised.rounding_constants(kind))
        if weight.order is None:
            constants["order"] = None
        if not has_sums(kind):
            constants["sums"] = None
        yield Kernel(f"round {name}", quantised.round_part, pointers, constants, quantised.rounding_options(kind))


def recurrence_kernels(step: dict[str, str]) -> Iterator[Kernel]:
    """The gated delta rule and Mamba-2's recurrence."""
    records = ("state", "keys", "updates", "decays", "passed")
    pointers = dict.fromkeys(("decay_rate", "dt_bias", "skip", *records), "fp32")
    pointers |= dict.fromkeys(("q", "k", "v", "gates", "out"), "bf16") | step | {"nonfinite": "i32", "slots": "i32"}
    options = {"num_warps": recurrent.WARPS, "num_stages": recurrent.STAGES, "enable_fp_fusion": False}
    for name, heads, k_heads, dim_k, dim_v in (("gated_delta", 32, 16, 128, 128), ("state_space", 128, 1, 128, 64)):
        constants: dict[str, object] = {"HEADS": heads, "K_HEADS": k_heads, "DIM_K": dim_k, "DIM_V": dim_v}
        constants["TILE"] = recurrent.COLUMNS
        if name == "gated_delta":
            constants["skip"] = None
        yield Kernel(name, recurrent.recur_columns, pointers, constants, options)
    pointers = dict.fromkeys(("rate", "bias", "skip", *records[:-1]), "fp32")
    pointers |= dict.fromkeys(("x", "gates", "side", "out"), "bf16") | step | {"nonfinite": "i32"}
    options = {"num_warps": scan.WARPS, "num_stages": 1, "enable_fp_fusion": False}
    for rule, heads, k_heads, dim_k, dim_v in (
        ("delta", 32, 32, 128, 128), ("selective", 128, 1, 16, 64), ("lru", 40, 1, 1, 64)
    ):  # fmt: skip
        constants = {"HEADS": heads, "K_HEADS": k_heads, "DIM_K": dim_k, "DIM_V": dim_v, "K_TILE": dim_k}
        constants |= {"TILE": scan.COLUMNS, "RULE": rule} | ({} if rule == "selective" else {"skip": None})
        yield Kernel(f"scan {rule}", scan.scan_columns, pointers, constants, options)


def first_of_each(kernels: list[Kernel]) -> list[Kernel]:
    """Those of another name or kind than all before."""
    found: dict[str, Kernel] = {}
    for kernel in kernels:
        name, kind, *_ = [*kernel.name.split(), ""]
        found.setdefault(name + kind * kind.isalpha(), kernel)
    return list(found.values())


# ----------------------------------------------------------------------------------------------- compiling them


def compiled(kernel: Kernel, chip: str) -> Compiled:
    """The kernel for that chip, and what is known of it."""
    names = kernel.function.arg_names
    types = dict.fromkeys(SCALARS, "fp32")
    types |= {
        name: dtype if dtype.startswith("tensordesc") else f"*{dtype}"
        for name, dtype in kernel.pointers.items()
        if name != "eps"
    }
    signature = {name: "constexpr" if name in kernel.constants else types.get(name, "i32") for name in names}
    aligned = [
        i for i, name in enumerate(names)
        if name not in kernel.constants and (name not in UNALIGNED or signature[name].startswith("*"))
    ]  # fmt: skip
    source = ASTSource(
        fn=kernel.function,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in kernel.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    made = triton.compile(source, target=TARGETS[chip], options=kernel.options)
    buffers = {
        shape: int(count)
        for count, shape in re.findall(r"local_alloc.*memdesc<(\d+)x(\d+x\d+x\w+),", made.asm["ttgir"])
    }
    usage, count = (_amd, _amd_instructions) if "amdgcn" in made.asm else (_nvidia, _nvidia_instructions)
    code = made.asm["amdgcn" if "amdgcn" in made.asm else "cubin"]
    return Compiled(
        kernel.name,
        *usage(code),
        shared=made.metadata.shared,
        warps=made.metadata.num_warps,
        buffers=buffers,
        instructions=count(code) if COUNTED.fullmatch(kernel.name) else {},
    )


def _nvidia(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and how many more lie in memory: its stack holds nothing else."""
    usage = re.search(r"REG:(\d+) STACK:(\d+)", _output("cuobjdump", "-res-usage", cubin))
    return int(usage[1]), int(usage[2]) // 4


def _nvidia_instructions(cubin: bytes) -> dict[str, int]:
    code = _output("nvdisasm", "-c", cubin)
    names = ("HGMMA", "HMMA", "IGMMA", "IMMA", "UTCHMMA", "LDGSTS", r"LDGSTS[.A-Z0-9]*\.128")
    return {name.replace(r"[.A-Z0-9]*\.", "."): len(re.findall(rf"\b{name}\b", code)) for name in names}


def _output(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([BIN / tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _amd(code: str) -> tuple[int, int]:
    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", code)[1])

    return number("vgpr_count"), number("vgpr_spill_count")


def _amd_instructions(code: str) -> dict[str, int]:
    return {
        "MFMA": len(re.findall("v_mfma", code)),
        "LDG.128": len(re.findall("(?:global|buffer)_load_dwordx4", code)),
    }


if __name__ == "__main__":
    target, everything = sys.argv[1], sys.argv[2:] == ["--all"]
    kernels = [*attention_kernels(target), *other_kernels(target)]
    for kernel in kernels if everything else first_of_each(kernels):
        print(json.dumps(asdict(compiled(kernel, target))), flush=True)
