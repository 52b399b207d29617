"""How the native kernels cut their work never shows in the result: bits are compared, on every instruction set here."""

from __future__ import annotations

import collections
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.ops.activation import Activation
from quire.ops.weights.rounding import quantised_rows
from tests.marks import spread
from tests.ops.cases import Case, Step
from tests.ops.integers import as_bits

OPTIONS: list[dict[str, Any]] = [
    {"return_lse": True},
    {"window": 700, "return_lse": True},
    {"ahead": True, "return_lse": True},
    {"ahead": True, "window": 700},
    {"window": 700, "chunk": 700, "return_lse": True},
    {"alibi": True, "sinks": True},
    {"softcap": 3.0, "size": 5.0, "return_lse": True},
    {"causal": False, "return_lse": True},
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHES = (None, torch.int8)  # None: of the dtype of q


def attend(backend: ops.Backend, step: Step, threads: int = 1) -> tuple[list[torch.Tensor], ops.AttentionPlan]:
    """Output and LSE as integers, so that -0 is not 0, and the plan."""
    torch.set_num_threads(threads)
    plan = step.write(backend)
    return [as_bits(x) for x in step.attend(backend, plan) if x is not None], plan


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("options", "dtype", "kv_dtype"), spread(2, OPTIONS, DTYPES, CACHES))
def test_long_contexts_over_many_threads(backend, dtype, kv_dtype, options):
    case = Case(
        query_lens=(1, 5, 0, 2), context_lens=(2_500, 1_030, 9, 2_048), dtype=dtype, kv_dtype=kv_dtype, block_size=32,
        **options,
    )  # fmt: skip
    step = Step(case)
    whole, plan = attend(backend, step)
    assert plan.num_parts == 0
    for threads in (2, 7, 16):
        parts, plan = attend(backend, step, threads)
        assert plan.num_parts > 0 or threads == 2
        assert same(whole, parts), f"{threads} threads"


@pytest.mark.parametrize(("options", "dtype", "block_size", "kv_dtype"), spread(2, OPTIONS, DTYPES, [16, 100], CACHES))
def test_blocks_that_sequences_share_are_read_for_all_of_them(backend, dtype, kv_dtype, options, block_size):
    """Each sequence alone has no one to share with; 3 and 5 have other lengths than the rest."""
    case = Case(
        query_lens=(1, 3, 1, 1, 2, 1),
        context_lens=(2_300, 2_290, 2_110, 1_500, 2_200, 900),
        shared_prefix=True,
        num_kv_heads=1,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        **options,
    )
    step = Step(case)
    together, plan = attend(backend, step)
    assert (plan.num_parts > 0) == ("window" not in options)
    for s, (begin, end) in enumerate(itertools.pairwise(step.query_starts.tolist())):
        alone = backend.plan(
            step.spec, torch.tensor([0, end - begin]), step.context_lens[s : s + 1], step.block_tables[s : s + 1],
            key_ends=step.ends_of(begin, end),
        )  # fmt: skip
        assert alone.num_parts == 0
        result = backend.attention(
            step.q[begin:end], step.kv, alone, scale=case.scale, alibi_slopes=step.alibi_slopes,
            softcap=case.softcap, sinks=step.sinks, chunk=case.chunk, return_lse=case.return_lse,
        )  # fmt: skip
        result = result if isinstance(result, tuple) else (result,)
        assert same([as_bits(x) for x in result], [x[begin:end] for x in together]), f"sequence {s}"


class Branches:
    """Sequences that begin as others do: each copies the table of an earlier one up to some block."""

    def __init__(self, backend: ops.Backend, seed: int) -> None:
        rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
        block_size, num_kv_heads, group_size = rng.choice((1, 16, 32, 100, 256)), rng.choice((2, 4)), rng.choice((1, 3))
        dtype, head_dim = rng.choice(DTYPES), rng.choice((16, 40))
        lens, tables, num_blocks = [], [], 0
        for _ in range(rng.randint(8, 20)):
            n = rng.choice((256, 512, 768, 856, 1024, 1100, 1280)) + rng.choice((0, 1, rng.randint(0, 900)))
            blocks, own = -(-n // block_size), []
            if tables and rng.random() < 0.9:
                own = rng.choice(tables)[: min(blocks, rng.choice((256, 512, 768, 856, 1024, 1300)) // block_size)]
            tables.append(own + list(range(num_blocks, num_blocks + blocks - len(own))))
            lens.append(n)
            num_blocks = max(num_blocks, tables[-1][-1] + 1)
        rows = [rng.choice((1, 1, 1, 3)) for _ in lens]
        width = max(map(len, tables))
        self.tables = torch.tensor([table + [-1] * (width - len(table)) for table in tables])
        self.lens, self.starts = torch.tensor(lens), torch.tensor([0, *rows]).cumsum(0)
        shape = num_blocks, num_kv_heads, block_size, head_dim
        k, v = (torch.randn(shape, generator=gen).to(dtype) for _ in range(2))
        self.kv, kv_dtype = ops.PagedKV(k, v), rng.choice(CACHES)
        if kv_dtype is torch.int8:
            (k, k_scale), (v, v_scale) = quantised_rows(k), quantised_rows(v)
            self.kv = ops.PagedKV(k, v, k_scale, v_scale)
        heads = num_kv_heads * group_size
        self.q = torch.randn(sum(rows), heads, head_dim, generator=gen).to(dtype)
        slopes = 0.5 ** torch.arange(heads)
        each = slopes * torch.linspace(1, -0.5, len(rows))[:, None]
        self.options = rng.choice(({}, {"alibi_slopes": slopes}, {"alibi_slopes": each}, {"softcap": 2.0}))
        self.spec = ops.AttentionSpec(
            num_heads=heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
            num_blocks=num_blocks, dtype=dtype, kv_dtype=kv_dtype,
        )  # fmt: skip
        self.backend = backend

    def attend(self, first: int, last: int) -> tuple[list[Tensor], ops.AttentionPlan]:
        """Output and LSE of the sequences first..last - 1, and their plan."""
        starts = self.starts[first : last + 1]
        plan = self.backend.plan(self.spec, starts - starts[0], self.lens[first:last], self.tables[first:last])
        q = self.q[starts[0] : starts[-1]]
        options = dict(self.options)
        if options.get("alibi_slopes", q).dim() == 2:
            options["alibi_slopes"] = options["alibi_slopes"][first:last]
        out, lse = self.backend.attention(q, self.kv, plan, return_lse=True, **options)
        return [as_bits(out), as_bits(lse)], plan


def test_sequences_that_branch_anywhere(backend):
    """Blocks are shared from tile to tile, and what follows within a split goes on from there: not a bit changes."""
    phases = collections.Counter()
    for seed in range(12):
        branches = Branches(backend, seed)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            together, plan = branches.attend(0, len(branches.lens))
            phases[plan.num_phases] += 1
            for s in range(len(branches.lens)):
                alone, single = branches.attend(s, s + 1)
                assert single.num_phases == 1
                begin, end = branches.starts[s : s + 2].tolist()
                assert same(alone, [x[begin:end] for x in together]), f"seed {seed}, sequence {s}, {threads} threads"
    torch.set_num_threads(1)
    assert len(phases) > 1, phases
    assert max(phases) >= 3, phases


def test_a_common_prompt_below_a_split_is_read_once(backend):
    """64 decoding sequences of 856 common tokens: 768 of them, three tiles, are one item a KV head; it pays off."""
    spec = ops.AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8, block_size=8, num_blocks=300, dtype=torch.float32)
    tables = torch.cat([torch.arange(107).expand(64, -1), 107 + torch.arange(128).view(64, 2)], dim=1)
    starts, lens = torch.arange(65), torch.full((64,), 872)
    plan = backend.plan(spec, starts, lens, tables)
    assert (plan.num_phases, plan.num_items) == (2, 65)
    few = backend.plan(spec, starts[:3], lens[:2], tables[:2])  # a single sequence's keys saved: not worth waiting for
    assert (few.num_phases, few.num_parts) == (1, 0)


@pytest.mark.parametrize(
    ("options", "dtype", "sizes", "kv_dtype"),
    spread(3, OPTIONS[:-1], DTYPES, [(1, 64), (3, 80), (8, 128), (71, 20)], CACHES),
)
def test_a_row_alone_and_in_chunks(backend, dtype, kv_dtype, options, sizes):
    """Decoding token after token, prefill at once, and anything between; rows that see each other stay together."""
    length, (group_size, head_dim) = 300, sizes
    case = Case(
        query_lens=(length,), context_lens=(length,), num_kv_heads=1, group_size=group_size, head_dim=head_dim,
        dtype=dtype, kv_dtype=kv_dtype, block_size=16, **options,
    )  # fmt: skip
    step = Step(replace(case, history_first=False))
    whole, _ = attend(backend, step)
    [ends] = step.key_ends
    for chunk in (1, 7, 64, 130):
        for begin in range(0, length, chunk) if chunk > 1 else (0, 1, 63, 64, 127, 255, 256, 257, 299):
            begin, end = (int(ends[at - 1]) if at else 0 for at in (begin, min(length, begin + chunk)))
            plan = backend.plan(
                step.spec, torch.tensor([0, end - begin]), torch.tensor([end]), step.block_tables,
                key_ends=step.ends_of(begin, end),
            )  # fmt: skip
            result = backend.attention(
                step.q[begin:end], step.kv, plan, alibi_slopes=step.alibi_slopes, softcap=case.softcap,
                sinks=step.sinks, chunk=case.chunk, return_lse=case.return_lse,
            )  # fmt: skip
            result = result if isinstance(result, tuple) else (result,)
            assert same([as_bits(x) for x in result], [x[begin:end] for x in whole]), f"rows {begin}..{end - 1}"


def test_the_layout_of_the_cache_does_not_show(backend):
    for dtype, kv_dtype in itertools.product(DTYPES, CACHES):
        case = Case(query_lens=(1, 40), context_lens=(300, 77), dtype=dtype, kv_dtype=kv_dtype, return_lse=True)
        first, _ = attend(backend, Step(case))
        for changes in (
            {"layout": "NHD"},
            {"layout": "padded"},
            {"layout": "side by side"},
            {"row_strides": "head-major"},
        ):
            other, _ = attend(backend, Step(replace(case, **changes)))
            assert same(first, other), f"{dtype}, {kv_dtype}, {changes}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_operators_row_by_row(backend, dtype):
    gen = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(300, 576, generator=gen).to(dtype) for _ in range(2))
    weight, bias = torch.randn(576, generator=gen), torch.randn(576, generator=gen)
    operators = {
        "rms_norm": lambda rows: backend.rms_norm(x[rows], weight, 1e-6),
        "add_rms_norm": lambda rows: backend.add_rms_norm(x[rows], residual[rows].clone(), weight, 1e-6),
        "layer_norm": lambda rows: backend.layer_norm(x[rows], weight, bias, 1e-6),
        "swiglu": lambda rows: backend.swiglu(x[rows]),
        "gelu": lambda rows: backend.gelu(x[rows], "none"),
        "gelu_tanh": lambda rows: backend.gelu(x[rows], "tanh"),
        "activate": lambda rows: backend.activate(x[rows], Activation("silu", slope=1.702, limit=1.0, offset=1.0)),
    }
    for name, operator in operators.items():
        torch.set_num_threads(1)
        whole = operator(slice(None))
        for threads, rows in ((2, slice(None)), (1, slice(5, 6)), (2, slice(100, 290))):
            torch.set_num_threads(threads)
            assert torch.equal(as_bits(operator(rows)), as_bits(whole[rows])), f"{name}, {threads} threads, {rows}"
