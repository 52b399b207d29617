"""Whether the operators compute what they should on this GPU: against float64, on caches full of NaN.

The cases come from a fixed seed and are dealt out to several processes, since most of their time goes into compiling.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire import ops
from quire.ops.reference import BACKEND as REFERENCE
from quire_bench.gpu.common import Bench

PARTS = 4  # processes that share the cases
NUM_CASES, NUM_TINY_CASES = 48, 12

DTYPES = (  # of q, of the cache
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.float32, None),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, None),
    (torch.float16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e5m2),
)
GROUPS = (1, 4, 7, 8)
HEAD_DIMS = (64, 80, 128, 256, 512)
BLOCK_SIZES = (16, 1, 256)
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}  # of |out - expected| / |expected|
FEATURES = ("plain", "window", "softcap", "alibi", "sinks", "lse", "full")  # full: not causal


@dataclass(frozen=True)
class Case:
    """One batch."""

    dtype: torch.dtype
    kv_dtype: torch.dtype | None
    group: int
    head_dim: int
    block_size: int
    feature: str
    reproducible: bool
    lens: tuple[tuple[int, int], ...]  # query rows and context of each sequence

    @property
    def name(self) -> str:
        """The case in a few words."""
        kinds = [self.dtype] if self.kv_dtype is None else [self.dtype, self.kv_dtype]
        shown = "/".join(str(kind).removeprefix("torch.") for kind in kinds)
        kind = f"{self.feature}{' reproducible' if self.reproducible else ''}"
        return f"{shown} G{self.group} D{self.head_dim} B{self.block_size} {kind} {list(self.lens)}"


def cases(tiny: bool) -> list[Case]:
    """The same cases every time: every value of every list, in changing company."""
    rng = random.Random(7)
    found = []
    for i in range(NUM_TINY_CASES if tiny else NUM_CASES):
        longest = 40 if tiny else rng.choice((70, 700, 3000))
        lens = []
        for s in range(rng.randint(1, 5)):
            context = rng.randint(1, longest)
            rows = 1 if i % 3 == 0 else rng.choice((1, context, rng.randint(1, context)))
            lens.append((rows, context))
            if s == 3:
                lens.append((5, 2))  # rows that stand before the sequence's start
        dtype, kv_dtype = DTYPES[i % len(DTYPES)]
        head_dim = rng.choice((16, 24)) if tiny else HEAD_DIMS[i % len(HEAD_DIMS)]
        feature = FEATURES[(i // 2) % len(FEATURES)]
        block_size = BLOCK_SIZES[(i // 5) % len(BLOCK_SIZES)]
        group, reproducible = GROUPS[i % len(GROUPS)], (i // 4) % 3 == 1
        found.append(Case(dtype, kv_dtype, group, head_dim, block_size, feature, reproducible, tuple(lens)))
    return found


def correctness(bench: Bench, part: int, parts: int = PARTS) -> None:
    """Stage: this part of the cases, and of the other checks."""
    limits = bench.backend.limits
    for case in cases(bench.settings.tiny)[part::parts]:
        if (case.kv_dtype or case.dtype) not in limits.kv_dtypes[case.dtype] or case.head_dim > limits.max_head_dim:
            bench.row(case.name, "quire", skipped="the backend does not serve it")
            continue
        attempt(bench, case.name, partial(check_case, bench, case))
    checks = {
        "batch and chunk invariance, decode": lambda: check_invariance(bench, rows=1),
        "batch and chunk invariance, prefill": lambda: check_invariance(bench, rows=0),
        "small operators": lambda: check_small(bench),
        "blocks beyond 2**31 numbers": lambda: check_far_blocks(bench),
        "rows beyond 2**31 numbers": lambda: check_far_rows(bench),
        "merge and copy": lambda: check_merge_and_copy(bench),
    }
    for name in list(checks)[part::parts]:
        attempt(bench, name, checks[name])


def attempt(bench: Bench, name: str, check: Any) -> None:
    """Run a check, which gives its figures, "passed" among them, and report."""
    if bench.seconds_left < 0:
        bench.failed(name, "quire", "the stage's time was up")
        return
    try:
        bench.row(name, "quire", **check())
    except Exception as error:  # of any kind: it is what a report is for
        bench.failed(name, "quire", error)


@dataclass(frozen=True)
class Step:
    """A cache of NaN in which the sequences own slots, and a plan over it."""

    spec: ops.AttentionSpec
    kv: ops.PagedKV
    plan: ops.AttentionPlan
    tables: Tensor  # int32 [S, M], host
    q: Tensor  # [T, Hq, D]


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Memory of nothing but NaN."""
    if dtype.itemsize == 1:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def step(bench: Bench, case: Case) -> Step:
    """Poison a cache, write the sequences' K and V with write_kv, and plan the queries."""
    generator = torch.Generator().manual_seed(len(case.lens))
    widths = [-(-context // case.block_size) for _, context in case.lens]
    num_blocks = sum(widths) + 3
    order = torch.randperm(num_blocks, generator=generator).int()
    tables = torch.full((len(widths), max(widths) + 1), 2**31 - 1, dtype=torch.int32)  # beyond: never read
    for s, width in enumerate(widths):
        tables[s, :width] = order[sum(widths[:s]) :][:width]
    spec = bench.spec(
        num_heads=2 * case.group,
        num_kv_heads=2,
        head_dim=case.head_dim,
        block_size=case.block_size,
        num_blocks=num_blocks,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype,
        window=19 if case.feature == "window" else None,
        causal=case.feature != "full",
        reproducible=case.reproducible and bench.backend.limits.reproducible,
    )
    memory = poisoned((num_blocks, 2, 2, case.block_size, case.head_dim), spec.cache_dtype, bench.device)
    kv = ops.PagedKV(memory[:, 0], memory[:, 1])
    contexts = torch.tensor([context for _, context in case.lens], dtype=torch.int32)
    position = torch.cat([torch.arange(context) for _, context in case.lens])
    sequence = torch.arange(len(contexts)).repeat_interleave(contexts)
    slots = tables[sequence, position // case.block_size].long() * case.block_size + position % case.block_size
    new = torch.randn(2, len(slots), 2, case.head_dim, generator=generator).to(case.dtype).to(bench.device)
    writing = bench.backend.plan(spec, _starts(contexts), contexts, tables, slots)
    bench.backend.write_kv(new[0], new[1], kv, writing)
    rows = torch.tensor([count for count, _ in case.lens], dtype=torch.int32)
    plan = bench.backend.plan(spec, _starts(rows), contexts, tables)
    q = torch.randn(int(rows.sum()), 2 * case.group, case.head_dim, generator=generator).to(case.dtype)
    return Step(spec, kv, plan, tables, q.to(bench.device))


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])


def check_case(bench: Bench, case: Case) -> dict[str, Any]:
    """Attention against float64, twice for the same bits."""
    here = step(bench, case)
    heads = torch.arange(1, 2 * case.group + 1, device=bench.device)
    options: dict[str, Any] = {}
    if case.feature == "softcap":
        options["softcap"] = 2.5
    if case.feature == "alibi":
        options["alibi_slopes"] = 2.0 ** (-heads.float() / 2)
    if case.feature == "sinks":
        options["sinks"] = heads.float() / 3 - 1
    if case.feature != "sinks":
        options["return_lse"] = True
    attention: Any = bench.backend.attention
    first, again = (attention(here.q, here.kv, here.plan, **options) for _ in range(2))
    out, lse = first if isinstance(first, tuple) else (first, None)
    pairs = zip(first, again, strict=True) if isinstance(first, tuple) else [(first, again)]
    same = all(torch.equal(a, b) for a, b in pairs)
    expected, expected_lse = expected_attention(here, case, options)
    error = difference(out, expected)
    seen = expected_lse > -math.inf
    lse_error = 0.0
    if lse is not None:
        same_empty = bool(torch.equal(lse == -math.inf, ~seen))
        lse_error = float((lse.double() - expected_lse)[seen].abs().max()) if seen.any() and same_empty else 0.0
        lse_error = lse_error if same_empty and math.isfinite(lse_error) else math.inf
    empty_is_zero = case.feature == "sinks" or not bool(out[~seen].any())
    passed = error < TOLERANCE[case.dtype] and lse_error < 2e-3 and same and empty_is_zero
    return {"passed": passed, "value": error, "lse_value": lse_error, "same_twice": same}


def difference(out: Tensor, expected: Tensor) -> float:
    """|out - expected| / |expected|; infinite where anything is not finite."""
    if not bool(out.isfinite().all()):
        return math.inf
    return float((out.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def expected_attention(here: Step, case: Case, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The contract in float64, over what the cache holds: out [T, Hq, D], LSE [T, Hq]."""
    outs, lses, start = [], [], 0
    for s, (rows, context) in enumerate(case.lens):
        position = torch.arange(context)
        block = here.tables[s, position // case.block_size].long().to(here.q.device)
        offset = (position % case.block_size).to(here.q.device)
        k, v = (
            _rows(cache, block, offset).repeat_interleave(case.group, 1).transpose(0, 1)
            for cache in (here.kv.k, here.kv.v)
        )  # [Hq, context, D]
        q = here.q[start : start + rows].double().transpose(0, 1)
        start += rows
        score = q @ k.mT * here.spec.default_scale
        if "softcap" in options:
            score = options["softcap"] * torch.tanh(score / options["softcap"])
        away = (position[None, :] - torch.arange(context - rows, context)[:, None]).to(q.device)  # [rows, context]
        if "alibi_slopes" in options:
            score = score + options["alibi_slopes"].double()[:, None, None] * away
        seen = torch.ones_like(away, dtype=torch.bool) if not here.spec.causal else away <= 0
        if here.spec.window is not None:
            seen = seen & (away > -here.spec.window)
        score = score.masked_fill(~seen, -math.inf)
        lse = score.logsumexp(-1)
        total = lse
        if "sinks" in options:
            total = torch.logaddexp(lse, options["sinks"].double()[:, None])
        weight = torch.exp(score - total.masked_fill(total == -math.inf, 0.0)[..., None])
        outs.append((weight @ v).transpose(0, 1))
        lses.append(lse.transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def _rows(cache: Tensor, block: Tensor, offset: Tensor) -> Tensor:
    """What stands in these slots, in float64; fp8 is moved as bytes, which every device can."""
    if cache.dtype.itemsize == 1:
        return cache.view(torch.uint8)[block, :, offset].view(cache.dtype).double()
    return cache[block, :, offset].double()


def check_invariance(bench: Bench, rows: int) -> dict[str, Any]:
    """With reproducible=True a row's bits do not depend on its company, nor on the chunk that it comes in."""
    if not bench.backend.limits.reproducible:
        return {"skipped": "the backend does not serve it"}
    scale = 1 if bench.settings.tiny else 50
    contexts = (40 * scale, 7 * scale, 61 * scale)
    lens = tuple((rows or context, context) for context in contexts)
    dim = 16 if bench.settings.tiny else 128
    here = step(bench, Case(torch.bfloat16, None, 4, dim, 16, "plain", True, lens))
    together = bench.backend.attention(here.q, here.kv, here.plan)
    same, start = True, 0
    for s, (count, context) in enumerate(lens):
        pieces = [count] if count == 1 else [count // 3, 1, count - count // 3 - 1]
        end = context - count
        parts: list[Tensor] = []
        for piece in pieces:
            end += piece
            plan = bench.backend.plan(
                here.spec,
                torch.tensor([0, piece], dtype=torch.int32),
                torch.tensor([end], dtype=torch.int32),
                here.tables[s : s + 1],
            )
            at = start + sum(map(len, parts))
            parts.append(bench.backend.attention(here.q[at : at + piece].contiguous(), here.kv, plan))
        same = same and torch.equal(torch.cat(parts), together[start : start + count])
        start += count
    return {"passed": same}


def check_far_blocks(bench: Bench) -> dict[str, Any]:
    """A cache of more than 2**31 numbers, its last blocks in use."""
    size, dim = 16, 128
    num_blocks = 40 if bench.settings.tiny or not bench.on_gpu else 2**31 // (2 * 8 * size * dim) + 500
    spec = bench.spec(
        num_heads=32, num_kv_heads=8, head_dim=dim, block_size=size, num_blocks=num_blocks, dtype=torch.bfloat16
    )
    memory = torch.full((num_blocks, 2, 8, size, dim), math.nan, dtype=torch.bfloat16, device=bench.device)
    kv = ops.PagedKV(memory[:, 0], memory[:, 1])
    tables = torch.arange(num_blocks - 1, num_blocks - 21, -1, dtype=torch.int32)[None]
    lens = torch.tensor([20 * size - 3], dtype=torch.int32)
    slots = (tables[0].long()[:, None] * size + torch.arange(size)).flatten()[: int(lens)]
    new = torch.randn(2, len(slots), 8, dim).bfloat16().to(bench.device)
    starts = torch.tensor([0, len(slots)], dtype=torch.int32)
    bench.backend.write_kv(new[0], new[1], kv, bench.backend.plan(spec, starts, lens, tables, slots))
    errors = []
    for rows in (1, 40):
        q = torch.randn(rows, 32, dim).bfloat16().to(bench.device)
        plan = bench.backend.plan(spec, torch.tensor([0, rows], dtype=torch.int32), lens, tables)
        here = Step(spec, kv, plan, tables, q)
        case = Case(torch.bfloat16, None, 4, dim, size, "plain", False, ((rows, int(lens)),))
        errors.append(difference(bench.backend.attention(q, kv, plan), expected_attention(here, case, {})[0]))
    return {"passed": max(errors) < TOLERANCE[torch.bfloat16], "value": max(errors)}


def check_far_rows(bench: Bench) -> dict[str, Any]:
    """Queries of more than 2**31 numbers: one long sequence with a window."""
    heads, dim, size = 32, 128, 256
    length = 300 if bench.settings.tiny or not bench.on_gpu else 2**31 // (heads * dim) + 1000
    num_blocks = -(-length // size)
    spec = bench.spec(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=dim,
        block_size=size,
        num_blocks=num_blocks,
        dtype=torch.bfloat16,
        window=32,
    )
    memory = torch.randn(num_blocks, 2, 1, size, dim, device=bench.device).bfloat16()
    kv = ops.PagedKV(memory[:, 0], memory[:, 1])
    tables = torch.arange(num_blocks, dtype=torch.int32)[None]
    lens = torch.tensor([length], dtype=torch.int32)
    q = torch.empty(length, heads, dim, dtype=torch.bfloat16, device=bench.device)
    q[:] = torch.randn(1, heads, dim, device=bench.device)
    plan = bench.backend.plan(spec, torch.tensor([0, length], dtype=torch.int32), lens, tables)
    out = bench.backend.attention(q, kv, plan)
    last = 40  # rows that are checked, over the keys that they see
    first = (length - last - 40) // size
    tail = Step(spec, kv, plan, tables[:, first:], q[-last:])
    case = Case(torch.bfloat16, None, heads, dim, size, "window", False, ((last, length - first * size),))
    error = difference(out[-last:], expected_attention(tail, case, {})[0])
    return {"passed": error < TOLERANCE[torch.bfloat16], "value": error}


def check_merge_and_copy(bench: Bench) -> dict[str, Any]:
    """States merge into the state over all keys; a copied block is the same."""
    a, b = (torch.randn(50, 6, 32, device=bench.device).bfloat16() for _ in range(2))
    lse_a, lse_b = (torch.randn(50, 6, device=bench.device) * 3 for _ in range(2))
    lse_a[0] = lse_b[:2] = -math.inf
    out, lse = bench.backend.merge_states(a, lse_a, b, lse_b)
    wide, wide_lse = REFERENCE.merge_states(a.double(), lse_a.double(), b.double(), lse_b.double())
    error = difference(out, wide)
    seen = wide_lse > -math.inf
    lse_error = float((lse.double() - wide_lse)[seen].abs().max())
    memory = torch.randn(9, 2, 2, 16, 24, device=bench.device).bfloat16()
    kv, before = ops.PagedKV(memory[:, 0], memory[:, 1]), memory.clone()
    bench.backend.copy_blocks(kv, src=[3, 0], dst=[7, 8])
    before[7], before[8] = before[3], before[0]
    passed = error < 1e-2 and lse_error < 1e-4 and torch.equal(memory, before)
    return {"passed": passed and not bool(out[0].any()), "value": error}


def check_small(bench: Bench) -> dict[str, Any]:
    """The small operators against the reference in float64, each in bf16 and in fp32."""
    worst = 0.0
    for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float32, 1e-5)):
        for name, out, expected in _small(bench, dtype):
            error = difference(out, expected.double())
            if not error < tolerance:
                return {"passed": False, "value": error, "note": f"{name} in {dtype}"}
            worst = max(worst, error)
    logits = torch.randn(5, 1000, device=bench.device)
    same = torch.equal(bench.backend.top_k(logits, 9).cpu(), REFERENCE.top_k(logits.cpu(), 9))
    return {"passed": same, "value": worst}


def _small(bench: Bench, dtype: torch.dtype) -> list[tuple[str, Tensor, Tensor]]:
    """Each operator's name, its result and what it should be."""
    mine, theirs = bench.backend, REFERENCE

    def random_rows(*shape: int) -> Tensor:
        return torch.randn(shape, device=bench.device).to(dtype)

    x, other, weight, bias = random_rows(13, 768), random_rows(13, 768), random_rows(768), random_rows(768)
    wide = [tensor.double() for tensor in (x, other, weight, bias)]
    residual, wide_residual = other.clone(), wide[1].clone()
    q, k = random_rows(13, 6, 64), random_rows(13, 2, 64)
    wide_q, wide_k = q.double(), k.double()
    angles = torch.arange(32, device=bench.device)[:, None] / 100.0 ** torch.linspace(0, 1, 32, device=bench.device)
    positions = torch.arange(13, device=bench.device)
    results = [
        ("rms_norm", mine.rms_norm(x, weight, 1e-6), theirs.rms_norm(wide[0], wide[2], 1e-6)),
        (
            "add_rms_norm",
            mine.add_rms_norm(x, residual, weight, 1e-6),
            theirs.add_rms_norm(wide[0], wide_residual, wide[2], 1e-6),
        ),
        ("add_rms_norm's residual", residual, wide_residual),
        ("layer_norm", mine.layer_norm(x, weight, bias, 1e-5), theirs.layer_norm(wide[0], wide[2], wide[3], 1e-5)),
        ("swiglu", mine.swiglu(x), theirs.swiglu(wide[0])),
        ("gelu", mine.gelu(x, "none"), theirs.gelu(wide[0], "none")),
        ("gelu tanh", mine.gelu(x, "tanh"), theirs.gelu(wide[0], "tanh")),
        ("logsumexp", mine.logsumexp(x.float()), x.double().logsumexp(-1)),
    ]
    mine.rope(q, k, positions, angles.cos(), angles.sin())
    theirs.rope(wide_q, wide_k, positions, angles.cos(), angles.sin())
    return [*results, ("rope of q", q, wide_q), ("rope of k", k, wide_k)]
