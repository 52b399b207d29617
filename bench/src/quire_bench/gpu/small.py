"""The parts of a step around attention and linears: writing K and V, and small operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire import ops
from quire_bench.gpu.common import Bench, Call, Contestant, copy, race

ROWS = (64, 16384)  # of a step of decoding, and of several prompts
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 4096, 32, 8, 128, 14336  # a model of 8 billion parameters
VOCABULARY, SAMPLED = 128256, 64


def small(bench: Bench) -> None:
    """Stage: bytes a second of each operator."""
    for rows in (3,) if bench.settings.tiny else ROWS:
        race(bench, f"{rows} rows", {"copy": copy(bench), **_operators(bench, rows)}, "copy", rounds=3)
        bench.forget()
    logits = torch.randn(*((3, 99) if bench.settings.tiny else (SAMPLED, VOCABULARY)), device=bench.device)
    contestants = {
        "logsumexp": Contestant(lambda: lambda: bench.backend.logsumexp(logits), logits.nbytes),
        "top_k 50": Contestant(lambda: lambda: bench.backend.top_k(logits, 50), logits.nbytes),
        "torch.topk 50": Contestant(lambda: lambda: logits.topk(50), logits.nbytes),
    }
    race(bench, f"logits of {len(logits)} rows", {"copy": copy(bench), **contestants}, "copy", rounds=3)


def _operators(bench: Bench, rows: int) -> dict[str, Contestant]:
    """Each operator, its bytes those that it has to read and to write."""
    mine = bench.backend

    def random_rows(*shape: int) -> Tensor:
        return torch.randn(shape, device=bench.device).bfloat16()

    x, residual, weight, inner = random_rows(rows, HIDDEN), random_rows(rows, HIDDEN), random_rows(HIDDEN), INNER
    gates = random_rows(rows, 2 * inner)
    q, k = random_rows(rows, HEADS, HEAD_DIM), random_rows(rows, KV_HEADS, HEAD_DIM)
    angles = torch.arange(rows, device=bench.device)[:, None] / 1e4 ** torch.linspace(
        0, 1, HEAD_DIM // 2, device=bench.device
    )
    cos, sin, positions = angles.cos(), angles.sin(), torch.arange(rows, device=bench.device)
    calls: dict[str, tuple[Call, int]] = {
        "rms_norm": (lambda: mine.rms_norm(x, weight, 1e-6), 2 * x.nbytes),
        "add_rms_norm": (lambda: mine.add_rms_norm(x, residual, weight, 1e-6), 4 * x.nbytes),
        "layer_norm": (lambda: mine.layer_norm(x, weight, weight, 1e-5), 2 * x.nbytes),
        "swiglu": (lambda: mine.swiglu(gates), gates.nbytes * 3 // 2),
        "gelu": (lambda: mine.gelu(gates, "tanh"), 2 * gates.nbytes),
        "rope": (lambda: mine.rope(q, k, positions, cos, sin), 2 * (q.nbytes + k.nbytes)),
    }
    writing = {"write_kv": Contestant(lambda: _write_call(bench, k), 4 * k.nbytes)}
    return writing | {name: Contestant(_ready(call), work) for name, (call, work) in calls.items()}


def _ready(call: Call) -> Callable[[], Call]:
    return lambda: call


def _write_call(bench: Bench, k: Tensor) -> Call:
    """K and V of all rows, into blocks of 16 in random order."""
    rows, size = len(k), 16
    blocks = -(-rows // size)
    spec = bench.spec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=size, num_blocks=blocks, dtype=k.dtype
    )
    memory = torch.empty(blocks, 2, KV_HEADS, size, HEAD_DIM, dtype=k.dtype, device=bench.device)
    kv, v = ops.PagedKV(memory[:, 0], memory[:, 1]), k.clone()
    table = torch.randperm(blocks, dtype=torch.int32)[None]
    slots = (table[0].long()[:, None] * size + torch.arange(size)).flatten()[:rows]
    starts, lens = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([rows], dtype=torch.int32)
    plan = bench.backend.plan(spec, starts, lens, table, slots)
    return lambda: bench.backend.write_kv(k, v, kv, plan)
