"""Every backend against dense attention in float64, and its refusals. A new backend passes this file unchanged."""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import replace

import pytest
import torch

from quire import ops
from quire.errors import BadValue, Unsupported
from quire.ops.spec import MAX_HEAD_DIM
from tests.marks import quick, spread
from tests.ops import cases, dense
from tests.ops.cases import Case, Step, check, half_dtype, naming
from tests.ops.conftest import IN_PYTHON, INTERPRETED

SHARDS = 20
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
)


def seeds(shard: int, budget: int) -> range:
    return range(shard, budget, SHARDS)


# ------------------------------------------------------------------------------------------ the random sweep


@pytest.fixture
def budget(backend, request, long):
    """Random cases: unless all are wanted, fewer in Python, in the interpreter and on further instruction sets."""
    all_of_them, name = backend.limits.case_budget, request.node.callspec.params["backend"]
    if long:
        return all_of_them
    if name in IN_PYTHON:
        return all_of_them // (4 if name in INTERPRETED else 2)
    return all_of_them * 3 // 10 if " on " in name else all_of_them


@pytest.mark.parametrize("shard", quick(range(SHARDS), 1, SHARDS // 10))
def test_random_ragged_batches(backend, device, shard, budget):
    for seed in seeds(shard, budget):
        check(backend, Case.draw(seed, backend.limits), device)


def test_the_shards_are_the_whole_budget(backend):
    budget = backend.limits.case_budget
    assert budget >= 200
    assert sorted(itertools.chain(*(seeds(shard, budget) for shard in range(SHARDS)))) == list(range(budget))


def test_the_reference_has_at_least_2000_cases():
    assert ops.load("reference").limits.case_budget >= 2_000


def test_the_sweep_reaches_everything(backend):
    limits = backend.limits
    drawn = [Case.draw(seed, limits) for seed in range(2_000)]
    for field, choices in {
        "block_size": cases.BLOCK_SIZES,
        "head_dim": [*(d for d in cases.HEAD_DIMS if d <= limits.max_head_dim), limits.max_head_dim],
        "num_kv_heads": cases.KV_HEADS,
        "group_size": cases.GROUP_SIZES,
        "layout": cases.LAYOUTS,
        "row_strides": cases.ROW_STRIDES,
        "out_strides": (None, *cases.ROW_STRIDES),
        "poison": cases.POISONS,
        "window": (None, 1, 2, 3, 2**31 - 1),
        "chunk": (None, 1, 7, 64),
        "causal": (False, True),
        "ahead": (False, True),
        "alibi": (False, True),
        "alibi_each": (False, True),
        "sinks": (False, True),
        "latent": (False, True),
        "return_lse": (False, True),
        "history_first": (False, True),
        "shared_prefix": (False, True),
        "written": (None, 20),
        "int_dtype": (torch.int32, torch.int64),
    }.items():
        missing = set(choices) - {getattr(case, field) for case in drawn}
        assert not missing, f"no case has {field} in {missing}"
    pairs = {(case.dtype, case.kv_dtype or case.dtype) for case in drawn}
    assert pairs == {(dtype, kv) for dtype, served in limits.kv_dtypes.items() for kv in served}
    assert any(case.softcap for case in drawn)
    assert any(case.head_dim != case.dim_v for case in drawn)
    assert any(case.latent and case.kv_dtype == torch.int8 for case in drawn)
    assert any(0 in case.context_lens for case in drawn)
    assert any(n < rows for case in drawn for rows, n in zip(case.query_lens, case.context_lens, strict=True))


# --------------------------------------------------------------------------------- what a backend declares


def test_it_offers_the_whole_protocol(backend, device):
    assert ops.load(backend.name, device) is backend
    names = [name for name, _ in inspect.getmembers(ops.Backend, inspect.isfunction) if not name.startswith("_")]
    assert {"attention", "write_kv", "merge_states", "rope"} <= set(names)
    own = {
        "unavailable",
        "set_prefetch",
        "linears",
        "compile",
        "chain",
        "swap",
        "exchange",
        "exchange_bytes",
    }  # what a backend spells out itself
    for name in set(names) - own:
        assert getattr(type(backend), name) is getattr(ops.Backend, name), f"{name} is checked in one place"


def make_plan(backend: ops.Backend, spec: ops.AttentionSpec) -> list[ops.AttentionPlan]:
    starts, lens, tables = torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[0]])
    return [backend.make_plan(spec, 1, 1, 1), backend.plan(spec, starts, lens, tables)]


def small_spec(device: str, **fields) -> ops.AttentionSpec:
    fields = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "block_size": 4, "num_blocks": 3, **fields}
    return ops.AttentionSpec(device=device, **fields)


@pytest.mark.parametrize(("dtype", "kv_dtype"), list(itertools.product(DTYPES[:-1], DTYPES)))
def test_it_serves_the_declared_dtypes_and_no_other(backend, device, dtype, kv_dtype):
    spec = small_spec(device, dtype=dtype, kv_dtype=kv_dtype)
    if kv_dtype in backend.limits.kv_dtypes.get(dtype, ()):
        assert all(plan.spec == spec for plan in make_plan(backend, spec))
        return
    at_fault = str(dtype if dtype not in backend.limits.kv_dtypes else kv_dtype)
    with pytest.raises(Unsupported, match=at_fault):
        backend.make_plan(spec, 1, 1, 1)
    with pytest.raises(Unsupported, match=at_fault):
        backend.plan(spec, torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[0]]))


@pytest.mark.parametrize("field", ["head_dim", "head_dim_v"])
def test_it_serves_head_dims_up_to_its_largest(backend, device, field):
    largest = backend.limits.max_head_dim
    dtype = next(iter(backend.limits.kv_dtypes))
    assert all(make_plan(backend, small_spec(device, dtype=dtype, **{field: largest})))
    refusal = BadValue if largest == MAX_HEAD_DIM else Unsupported  # the spec itself refuses what no backend serves
    with pytest.raises(refusal, match=str(largest + 1)):
        make_plan(backend, small_spec(device, dtype=dtype, **{field: largest + 1}))


# -------------------------------------------------------------------------------------- contexts of every kind


def test_sequences_without_rows_between_others(backend, device):
    for lens in ((0, 3, 0, 5, 0), (0, 0, 2), (4, 0, 0)):
        check(backend, Case(query_lens=lens, context_lens=tuple(n + 7 for n in lens), return_lse=True), device)
    check(backend, Case(query_lens=(0, 2, 0), context_lens=(0, 2, 0)), device)
    check(backend, Case(query_lens=(0, 0), context_lens=(9, 0), return_lse=True), device)


def test_an_empty_batch(backend, device):
    step = Step(Case(query_lens=(), context_lens=(), return_lse=True), device)
    plan = step.write(backend)
    out, lse = step.attend(backend, plan)
    assert out.shape == (0, 6, 16)
    assert lse.shape == (0, 6)
    step.check_cache()


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"sinks": True}, {"alibi": True}, {"causal": False}])
def test_rows_before_the_start_of_their_sequence_see_nothing(backend, device, options):
    case = Case(query_lens=(5, 4, 9), context_lens=(2, 0, 8), return_lse="sinks" not in options, **options)
    step = Step(case, device)
    out, lse = step.attend(backend, step.write(backend))
    step.dense().check(out, lse, case.dtype)
    assert not out[5:9].any()  # the second sequence holds no key at all
    if case.causal:
        assert not out[[0, 1, 2, 9]].any()
        assert lse is None or (lse[[0, 1, 2, 9]] == -torch.inf).all()


LONG_CONTEXTS = [
    (255, {"return_lse": True}),
    (256, {"sinks": True}),
    (257, {"alibi": True}),
    (1023, {"softcap": 3.0, "size": 5.0}),
    (1024, {"return_lse": True, "window": 300}),
    (1025, {"return_lse": True}),
    (2048, {"causal": False}),
    (2600, {"return_lse": True, "size": 5.0}),
    (2600, {"sinks": True, "window": 1030}),
    (2600, {"alibi": True}),
]


@pytest.mark.parametrize(("long_context", "rows"), spread(2, LONG_CONTEXTS, [1, 3]))
def test_contexts_at_and_beyond_the_edges_of_tiles_and_splits(backend, device, long_context, rows):
    context_len, options = long_context
    case = Case(
        query_lens=(rows, 1), context_lens=(context_len, 40), block_size=64, row_strides="packed", written=20, **options
    )
    whole_and_half = [case, replace(case, dtype=half_dtype(backend))]
    turn = LONG_CONTEXTS.index(long_context) % 2
    for one in [whole_and_half[turn]] if backend.name in INTERPRETED else whole_and_half:
        check(backend, one, device)


@pytest.mark.parametrize(
    "options",
    [
        {"return_lse": True},
        {"window": 50},
        {"alibi": True, "sinks": True},
        {"causal": False},
        {"softcap": 2.0, "window": 200},
        {"chunk": 60},
        {"chunk": 128, "window": 128, "return_lse": True},
    ],
)
def test_chunks_of_more_rows_than_a_tile_has(backend, device, options):
    lens = ((257, 3, 130), (257, 90, 700))
    if backend.name in INTERPRETED:
        lens = ((45, 3, 24), (45, 45, 160))
    case = Case(
        query_lens=lens[0],
        context_lens=lens[1],
        block_size=32,
        row_strides="padded",
        written=20,
        **options,
    )
    check(backend, case, device)


@pytest.mark.parametrize("group_size", [16, 17, 24, 71])
def test_large_groups(backend, device, group_size):
    check(backend, Case(query_lens=(1, 6), context_lens=(30, 20), group_size=group_size), device)


@pytest.mark.parametrize(
    ("chunks", "options"),
    spread(
        2,
        [(1,) * 23, (7, 8, 8), (8, 8, 7), (22, 1), (1, 22), (5, 0, 18)],
        [{}, {"window": 5}, {"alibi": True}, {"softcap": 1.0}, {"chunk": 6}],
    ),
)
def test_prefill_in_chunks_equals_prefill_at_once(backend, device, chunks, options):
    """What lies after a chunk is still NaN when it attends. Chunks of one are decode."""
    step = Step(Case(query_lens=(23,), context_lens=(23,), return_lse=True, poison="mixed", **options), device)
    tables = step.block_tables.clone()
    tables[0, :3] = torch.tensor([2, 0, 3])
    slots = tables[0, torch.arange(23) // 8] * 8 + torch.arange(23) % 8
    out, lse, end = [], [], 0
    for rows in chunks:
        at, end = slice(end, end + rows), end + rows
        plan = backend.plan(step.spec, torch.tensor([0, rows]), torch.tensor([end]), tables, slots[at])
        backend.write_kv(step.k_new[at], step.v_new[at], step.kv, plan)
        result = backend.attention(
            step.q[at], step.kv, plan, alibi_slopes=step.alibi_slopes, softcap=step.case.softcap,
            chunk=step.case.chunk, return_lse=True,
        )  # fmt: skip
        out.append(result[0])
        lse.append(result[1])
    step.dense().check(torch.cat(out), torch.cat(lse), step.case.dtype)


@pytest.mark.triton(cases=0)
def test_the_same_call_gives_the_same_bits(backend, device):
    step = Step(Case(query_lens=(1, 12), context_lens=(530, 30), return_lse=True), device)
    plan = step.write(backend)
    first, second = step.attend(backend, plan), step.attend(backend, plan)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"window": 40}, {"softcap": 2.0, "return_lse": True}, {"sinks": True, "group_size": 20}]
)
@pytest.mark.parametrize(
    "lens",
    [
        ((1, 0, 3, 1, 40, 2), (1, 0, 9, 0, 71, 1)),
        ((1, 1, 2, 1), (600, 590, 560, 30)),  # long enough to be shared and cut
    ],
    ids=["short", "shared"],
)
def test_each_sequence_with_slopes_of_its_own(backend, device, lens, options, monkeypatch):
    if backend.name in ("triton", "hopper"):
        monkeypatch.setattr("quire.ops.triton.partition.WORTH_SHARING", 0)
    query_lens, context_lens = lens
    case = Case(
        query_lens=query_lens, context_lens=context_lens, block_size=32, num_kv_heads=1, alibi=True, alibi_each=True,
        shared_prefix=True, written=20, **options,
    )  # fmt: skip
    check(backend, case, device)
    step = Step(case, device)
    plan = step.write(backend)
    same = step.alibi_slopes[:1].expand(step.num_seqs, -1)
    each, of_all = (step.attend(backend, plan, alibi_slopes=slopes)[0] for slopes in (same, same[0]))
    assert torch.equal(each, of_all)


# ---------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("options", [{"alibi": True}, {"sinks": True}, {"return_lse": True}, {"window": 9}])
def test_huge_logits_do_not_overflow(backend, device, options):
    """Not in fp16 either: q·k before scaling is beyond its largest number, 65,504."""
    for dtype in backend.limits.kv_dtypes:
        case = Case(query_lens=(3, 9), context_lens=(40, 9), size=10_000.0, scale=0.1, dtype=dtype, **options)
        with naming(case):
            step = Step(case, device)
            assert step.dense().lse[0].max() > 66_000 * 0.1
            step.check(backend)


@pytest.mark.parametrize(("softcap", "size"), [(1.0, 5_000.0), (0.01, 100.0), (50.0, 5_000.0), (1e4, 5_000.0)])
def test_softcap_of_huge_scores(backend, device, softcap, size):
    """|score / cap| runs far beyond 88, where exp overflows in fp32 and a tanh made of it gives NaN."""
    for lse in (False, True):
        case = Case(query_lens=(3, 9), context_lens=(40, 9), size=size, softcap=softcap, return_lse=lse)
        check(backend, case, device)


def test_the_lse_is_the_natural_logarithm(backend, device):
    step = Step(Case(query_lens=(4,), context_lens=(7,), size=0.0, return_lse=True), device)
    _, lse = step.attend(backend, step.write(backend))
    for row in range(4):
        dense.check_close("lse", lse[row], torch.full((6,), math.log(row + 4)), 1e-6)


def test_scale_zero_is_the_mean_and_not_the_default(backend, device):
    step = Step(Case(query_lens=(1,), context_lens=(20,), scale=0.0), device)
    out, _ = step.attend(backend, step.write(backend))
    mean = step.values[0].double().mean(0).repeat_interleave(3, dim=0)
    dense.check_close("out", out[0], mean, 1e-5)


def test_block_offsets_beyond_int32(backend, device):
    """Two blocks of one cache, more than 2^31 elements apart; what lies between is never touched."""
    stride, dtype = 2**31 + 8, half_dtype(backend)
    try:
        room = torch.empty(stride + 1024, dtype=dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for 2^31 elements: {error}")
    k = room.as_strided((2, 1, 16, 32), (stride, 512, 32, 1))
    v = room.as_strided((2, 1, 16, 32), (stride, 512, 32, 1), 512)
    spec = ops.AttentionSpec(
        num_heads=2, num_kv_heads=1, head_dim=32, block_size=16, num_blocks=2, dtype=dtype, device=device
    )
    gen = torch.Generator().manual_seed(0)
    q, k_new, v_new = (torch.randn(30, n, 32, generator=gen).to(dtype) for n in (2, 1, 1))
    slots = (torch.arange(30) + 16) % 32
    plan = backend.plan(spec, torch.tensor([0, 30]), torch.tensor([30]), torch.tensor([[1, 0]]), slots)
    kv = ops.PagedKV(k, v)
    backend.write_kv(k_new.to(device), v_new.to(device), kv, plan)
    out = backend.attention(q.to(device), kv, plan)
    dense.attend(q, k_new, v_new).check(out, None, dtype)
    kv.k[0], kv.v[0] = 1.0, 2.0
    backend.copy_blocks(kv, [0], [1])
    assert (k[1] == 1.0).all()
    assert (v[1] == 2.0).all()
