"""Every check of `ops.checks` but those of small operators: how to break a good call, and what the error must name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire import ops
from quire.errors import BadDtype, BadShape, BadStride, BadValue, QuireError, Unsupported
from quire.ops.spec import check_supported
from tests.ops.conftest import checked_once

INT32_MAX = 2**31 - 1
Call = dict[str, Any]


def refuses(call: Callable[[], object], error: type[QuireError], fragments: tuple[object, ...]) -> None:
    """The call raises exactly that error, which is a ValueError, and its message holds every fragment."""
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    assert isinstance(raised.value, QuireError)
    assert isinstance(raised.value, ValueError)
    missing = [str(fragment) for fragment in fragments if str(fragment) not in str(raised.value)]
    assert not missing, f"{raised.value!s} does not name {missing}"


# -------------------------------------------------------------------------------------------------- the spec


def good_spec(device: str = "cpu", **fields: Any) -> ops.AttentionSpec:
    fields = {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "block_size": 8,
        "num_blocks": 10,
        "dtype": torch.float32,
        **fields,
    }
    return ops.AttentionSpec(device=device, **fields)


COUNTS = {
    "num_heads": INT32_MAX,
    "num_kv_heads": INT32_MAX,
    "head_dim": 1024,
    "head_dim_v": 1024,
    "block_size": 256,
    "num_blocks": INT32_MAX,
    "window": INT32_MAX,
}


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [0, -1, "too large"])
def test_a_count_of_the_spec_out_of_range(field, value):
    value = COUNTS[field] + 1 if value == "too large" else value
    refuses(lambda: good_spec(**{field: value}), BadValue, (f"spec.{field}", value, f"1..{COUNTS[field]}"))


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [True, 4.0, "4", [4], math.nan])
def test_a_count_of_the_spec_that_is_no_integer(field, value):
    refuses(lambda: good_spec(**{field: value}), BadValue, (f"spec.{field}", repr(value), "integer"))


@pytest.mark.parametrize("field", ["num_heads", "num_kv_heads", "head_dim", "block_size", "num_blocks"])
def test_a_count_of_the_spec_that_is_missing(field):
    refuses(lambda: good_spec(**{field: None}), BadValue, (f"spec.{field}", "None"))


@pytest.mark.parametrize(
    ("fields", "error", "fragments"),
    [
        ({"num_heads": 7}, BadValue, ("spec.num_heads", 7, "num_kv_heads", 2)),
        ({"num_heads": 2, "num_kv_heads": 6}, BadValue, ("spec.num_heads", 2, "num_kv_heads", 6)),
        ({"num_blocks": 2**31 // 8}, BadValue, ("num_blocks", "block_size", 2**31, INT32_MAX)),
        ({"window": 5, "causal": False}, BadValue, ("spec.window", 5, "causal")),
        ({"dtype": torch.int32}, BadDtype, ("spec.dtype", "torch.int32")),
        ({"dtype": torch.complex64}, BadDtype, ("spec.dtype", "torch.complex64")),
        ({"dtype": "float32"}, BadDtype, ("spec.dtype", "float32")),
        ({"dtype": None}, BadDtype, ("spec.dtype", None)),
        ({"kv_dtype": torch.uint8}, BadDtype, ("spec.kv_dtype", "torch.uint8")),
        ({"kv_dtype": torch.bool}, BadDtype, ("spec.kv_dtype", "torch.bool")),
    ],
)
def test_a_spec_that_contradicts_itself(fields, error, fragments):
    refuses(lambda: good_spec(**fields), error, fragments)


def test_the_largest_spec():
    spec = good_spec(head_dim=1024, head_dim_v=1024, block_size=1, num_blocks=INT32_MAX, window=INT32_MAX)
    assert (spec.num_blocks, spec.window) == (INT32_MAX, INT32_MAX)


def test_what_the_spec_resolves():
    spec = good_spec(head_dim_v=5, kv_dtype=torch.float16)
    assert (spec.group_size, spec.dim_v, spec.cache_dtype, spec.default_scale) == (3, 5, torch.float16, 0.25)
    spec = good_spec()
    assert (spec.dim_v, spec.cache_dtype) == (16, torch.float32)


@pytest.mark.parametrize(
    ("fields", "fragments"),
    [
        ({"dtype": torch.float64}, ("some", "float64", "float16, torch.float32")),
        ({"kv_dtype": torch.float8_e5m2}, ("some", "float8_e5m2", "torch.float32", "float16")),
        ({"dtype": torch.float16, "kv_dtype": torch.float32}, ("some", "torch.float32", "torch.float16")),
        ({"head_dim": 65}, ("some", 64, 65)),
        ({"head_dim_v": 100}, ("some", 64, 100)),
    ],
)
def test_a_spec_beyond_a_backends_limits(fields, fragments):
    half, single = torch.float16, torch.float32
    served = {single: frozenset((single, half)), half: frozenset((half,))}
    limits = ops.Limits(kv_dtypes=served, max_head_dim=64, reproducible=False, case_budget=1)
    check_supported(good_spec(head_dim=64, kv_dtype=half), "some", limits)
    refuses(lambda: check_supported(good_spec(**fields), "some", limits), Unsupported, fragments)


# ------------------------------------------------------------------------------------------- a step's metadata


def good_metadata() -> Call:
    return {
        "query_starts": torch.tensor([0, 2, 2, 5]),
        "context_lens": torch.tensor([2, 9, 16]),
        "block_tables": torch.tensor([[3, -1], [0, 1], [9, 4]]),
        "slots": torch.tensor([24, 25, -1, 38, 39]),
    }


METADATA = {
    "starts a list": ("query_starts", [0, 2, 2, 5], BadDtype, ("query_starts", "list")),
    "starts floats": ("query_starts", torch.tensor([0.0, 2, 2, 5]), BadDtype, ("query_starts", "float32", "int64")),
    "lens int16": ("context_lens", torch.tensor([2, 9, 16]).short(), BadDtype, ("context_lens", "int16")),
    "tables bools": ("block_tables", torch.zeros(3, 2).bool(), BadDtype, ("block_tables", "bool")),
    "slots floats": ("slots", torch.zeros(5), BadDtype, ("slots", "float32")),
    "starts elsewhere": ("query_starts", torch.zeros(4, device="meta").int(), BadValue, ("query_starts", "meta")),
    "tables elsewhere": ("block_tables", torch.zeros(3, 2, device="meta").int(), BadValue, ("block_tables", "meta")),
    "starts of 2 dims": ("query_starts", torch.zeros(2, 2).int(), BadShape, ("query_starts", "(2, 2)", "1 dim")),
    "lens a number": ("context_lens", torch.tensor(3), BadShape, ("context_lens", "()", "1 dim")),
    "tables of 1 dim": ("block_tables", torch.tensor([3, 0, 9]), BadShape, ("block_tables", "(3,)", "2 dim")),
    "slots of 2 dims": ("slots", torch.zeros(5, 1).int(), BadShape, ("slots", "(5, 1)", "1 dim")),
    "starts empty": ("query_starts", torch.zeros(0).int(), BadShape, ("query_starts", 0, "context_lens", 3, "S + 1")),
    "starts too few": ("query_starts", torch.tensor([0, 2, 5]), BadShape, ("query_starts", 3, "context_lens", "S + 1")),
    "lens too few": ("context_lens", torch.tensor([2, 9]), BadShape, ("query_starts", 4, "context_lens", 2)),
    "tables too few": ("block_tables", torch.tensor([[3, -1], [0, 1]]), BadShape, ("block_tables", 2, 3)),
    "starts at 1": ("query_starts", torch.tensor([1, 2, 2, 5]), BadValue, ("query_starts[0]", 1)),
    "starts at -1": ("query_starts", torch.tensor([-1, 2, 2, 5]), BadValue, ("query_starts[0]", -1)),
    "starts fall": (
        "query_starts",
        torch.tensor([0, 3, 2, 5]),
        BadValue,
        ("query_starts", "from 3 to 2", "sequence 1"),
    ),
    "starts fall below 0": ("query_starts", torch.tensor([0, 0, 0, -7]), BadValue, ("from 0 to -7", "sequence 2")),
    "a length negative": ("context_lens", torch.tensor([2, -9, 16]), BadValue, ("context_lens[1]", -9, "0..16")),
    "a length too long": (
        "context_lens",
        torch.tensor([2, 9, 17]),
        BadValue,
        ("context_lens[2]", 17, "sequence 2", "0..16"),
    ),
    "a length beyond int32": (
        "context_lens",
        torch.tensor([2, 2**32 + 9, 16]),
        BadValue,
        ("context_lens[1]", 2**32 + 9),
    ),
    "a length far beyond": ("context_lens", torch.tensor([2, 2**63 - 1, 16]), BadValue, ("context_lens[1]", 2**63 - 1)),
    "an id -1 that is read": (
        "block_tables",
        torch.tensor([[3, -1], [0, -1], [9, 4]]),
        BadValue,
        ("block_tables[1, 1]", -1, "sequence 1", 9, "0..9"),
    ),
    "an id N": ("block_tables", torch.tensor([[3, -1], [0, 1], [10, 4]]), BadValue, ("block_tables[2, 0]", 10, "0..9")),
    "an id beyond int32": (
        "block_tables",
        torch.tensor([[3, -1], [0, 2**32 + 1], [9, 4]]),
        BadValue,
        ("block_tables[1, 1]", 2**32 + 1),
    ),
    "too few slots": ("slots", torch.tensor([24, 25, -1, 38]), BadShape, ("slots", 4, 5)),
    "too many slots": ("slots", torch.tensor([24, 25, -1, 38, 39, 40]), BadShape, ("slots", 6, 5)),
    "a slot -2": ("slots", torch.tensor([24, -2, -1, 38, 39]), BadValue, ("slots[1]", -2, "0..79")),
    "a slot N * B": ("slots", torch.tensor([24, 25, -1, 80, 39]), BadValue, ("slots[3]", 80, "0..79")),
    "a slot beyond int32": ("slots", torch.tensor([24, 25, -1, 38, 2**32]), BadValue, ("slots[4]", 2**32)),
    "a slot twice": ("slots", torch.tensor([24, 39, -1, 38, 39]), BadValue, ("slots[1]", "slots[4]", 39)),
}


@checked_once
@pytest.mark.parametrize("int_dtype", [torch.int32, torch.int64])
def test_good_metadata_is_taken(backend, device, int_dtype):
    plan = backend.plan(good_spec(device), **{name: x.to(int_dtype) for name, x in good_metadata().items()})
    assert (plan.num_seqs, plan.num_tokens, plan.writable) == (3, 5, True)


@checked_once
@pytest.mark.parametrize("how", METADATA)
def test_metadata(backend, device, how):
    name, value, error, fragments = METADATA[how]
    call = {**good_metadata(), name: value}
    refuses(lambda: backend.plan(good_spec(device), **call), error, fragments)
    roomy = backend.make_plan(good_spec(device), 100, 10, 10)
    refuses(lambda: roomy.update(**call), error, fragments)
    assert roomy.num_seqs == 0


@checked_once
@pytest.mark.parametrize("last", [2**31, 2**40])
def test_more_rows_than_int32_numbers(backend, device, last):
    """Refused before room is made for them."""
    call = {**good_metadata(), "query_starts": torch.tensor([0, 2, 2, last])}
    refuses(lambda: backend.plan(good_spec(device), **call), BadValue, ("query_starts[3]", last))
    roomy = backend.make_plan(good_spec(device), 100, 10, 10)
    refuses(lambda: roomy.update(**call), BadShape, (last, "tokens", 100))


@checked_once
@pytest.mark.parametrize("name", ["query_starts", "context_lens", "block_tables", "slots"])
def test_strided_metadata_is_read_right(backend, device, name):
    call = good_metadata()
    call[name] = torch.stack([call[name], torch.full_like(call[name], 77)], dim=-1)[..., 0]
    plan = backend.plan(good_spec(device), **call)
    packed = backend.plan(good_spec(device), **good_metadata())
    assert torch.equal(getattr(plan, name), getattr(packed, name))


@checked_once
def test_tables_below_the_window_are_not_read(backend, device):
    """Sequence of 33 tokens, 2 rows, window 9: the first row stands at 31 and sees 23.., that is from block 2 on."""
    call = {"query_starts": torch.tensor([0, 2]), "context_lens": torch.tensor([33])}
    spec = good_spec(device, window=9)
    backend.plan(spec, **call, block_tables=torch.tensor([[-1, 99, 2, 3, 4, -5]]))
    for at in (2, 3, 4):
        tables = torch.tensor([[-1, 99, 2, 3, 4, -5]])
        tables[0, at] = 10
        fragments = (f"block_tables[0, {at}]", 10, "sequence 0", 33)
        refuses(lambda tables=tables: backend.plan(spec, **call, block_tables=tables), BadValue, fragments)
    wider = good_spec(device, window=17)  # sees 15.., so block 1 too
    refuses(
        lambda: backend.plan(wider, **call, block_tables=torch.tensor([[-1, 99, 2, 3, 4, -5]])),
        BadValue,
        ("block_tables[0, 1]", 99),
    )


@checked_once
def test_a_window_that_begins_with_a_block_does_not_read_the_one_before(backend, device):
    """The first row stands at 31 and sees 24.., the whole of block 3 and nothing of block 2."""
    call = {"query_starts": torch.tensor([0, 2]), "context_lens": torch.tensor([33])}
    backend.plan(good_spec(device, window=8), **call, block_tables=torch.tensor([[-1, -1, 99, 3, 4]]))


@checked_once
@pytest.mark.parametrize("int_dtype", [torch.int32, torch.int64])
def test_the_widest_window_of_a_row_before_the_start_does_not_overflow(backend, device, int_dtype):
    """The first row stands at -7: less 2^31 - 1 it is no int32 any more."""
    spec = good_spec(device, window=INT32_MAX)
    starts, lens, tables = (torch.tensor(x, dtype=int_dtype) for x in ([0, 9], [2], [[-1]]))
    refuses(lambda: backend.plan(spec, starts, lens, tables), BadValue, ("block_tables[0, 0]", -1))


@checked_once
def test_the_widest_window_does_not_overflow(backend, device):
    spec = good_spec(device, window=INT32_MAX)
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([17], dtype=torch.int32)
    bad = torch.tensor([[-1, 1, 2]], dtype=torch.int32)
    backend.plan(spec, starts, lens, torch.tensor([[0, 1, 2]], dtype=torch.int32))
    refuses(lambda: backend.plan(spec, starts, lens, bad), BadValue, ("block_tables[0, 0]", -1))


@checked_once
@pytest.mark.parametrize(
    ("room", "fragments"),
    [((4, 3, 2), (5, "4", "tokens")), ((5, 2, 2), (3, "2", "sequences")), ((5, 3, 1), (2, "1", "columns"))],
)
def test_a_step_larger_than_the_plan(backend, device, room, fragments):
    backend.make_plan(good_spec(device), 5, 3, 2).update(**good_metadata())
    plan = backend.make_plan(good_spec(device), *room)
    refuses(lambda: plan.update(**good_metadata()), BadShape, fragments)


# --------------------------------------------------------------------------------------------- tensors of a call


def cache_tensors(device: str, **changes: torch.Tensor) -> ops.PagedKV:
    shape = (10, 2, 8, 16)
    return ops.PagedKV(**{"k": torch.zeros(shape, device=device), "v": torch.zeros(shape, device=device), **changes})


def strided(*shape: int) -> torch.Tensor:
    """A tensor whose last stride is 2."""
    return torch.zeros(*shape, 2)[..., 0]


ATTENTION = {
    "q rows": ({"q": torch.zeros(4, 6, 16)}, BadShape, ("q", "(4, 6, 16)", "(5, 6, 16)")),
    "q heads": ({"q": torch.zeros(5, 2, 16)}, BadShape, ("q", "(5, 2, 16)", "(5, 6, 16)")),
    "q dim": ({"q": torch.zeros(5, 6, 17)}, BadShape, ("q", "(5, 6, 17)")),
    "q flat": ({"q": torch.zeros(5, 96)}, BadShape, ("q", "(5, 96)")),
    "q dtype": ({"q": torch.zeros(5, 6, 16).half()}, BadDtype, ("q", "float16", "float32")),
    "q strides": ({"q": strided(5, 6, 16)}, BadStride, ("q", "(192, 32, 2)")),
    "q device": ({"q": torch.zeros(5, 6, 16, device="meta")}, BadValue, ("q", "meta")),
    "k shape": ({"k": torch.zeros(10, 8, 2, 16)}, BadShape, ("kv.k", "(10, 8, 2, 16)", "(10, 2, 8, 16)")),
    "k blocks": ({"k": torch.zeros(9, 2, 8, 16)}, BadShape, ("kv.k", "(9, 2, 8, 16)")),
    "k dtype": ({"k": torch.zeros(10, 2, 8, 16).double()}, BadDtype, ("kv.k", "float64", "float32")),
    "k strides": ({"k": strided(10, 2, 8, 16)}, BadStride, ("kv.k", "(512, 256, 32, 2)")),
    "v shape": ({"v": torch.zeros(10, 2, 8, 15)}, BadShape, ("kv.v", "(10, 2, 8, 15)", "(10, 2, 8, 16)")),
    "v dtype": ({"v": torch.zeros(10, 2, 8, 16).bfloat16()}, BadDtype, ("kv.v", "bfloat16")),
    "v strides": ({"v": strided(10, 2, 8, 16)}, BadStride, ("kv.v", "2)")),
    "v device": ({"v": torch.zeros(10, 2, 8, 16, device="meta")}, BadValue, ("kv.v", "meta")),
    "out shape": ({"out": torch.zeros(5, 6, 15)}, BadShape, ("out", "(5, 6, 15)", "(5, 6, 16)")),
    "out dtype": ({"out": torch.zeros(5, 6, 16).double()}, BadDtype, ("out", "float64", "float32")),
    "out strides": ({"out": strided(5, 6, 16)}, BadStride, ("out", "2)")),
    "slopes shape": ({"alibi_slopes": torch.zeros(2)}, BadShape, ("alibi_slopes", "(2,)", "(6,)")),
    "slopes dims": ({"alibi_slopes": torch.zeros(5, 6)}, BadShape, ("alibi_slopes", "(5, 6)", "(6,) or (3, 6)")),
    "slopes of all": ({"alibi_slopes": torch.zeros(2, 1)}, BadShape, ("alibi_slopes", "(2, 1)", "(6,) or (3, 6)")),
    "slopes of each": ({"alibi_slopes": strided(3, 6)}, BadStride, ("alibi_slopes", "(12, 2)")),
    "slopes dtype": ({"alibi_slopes": torch.zeros(6).half()}, BadDtype, ("alibi_slopes", "float16", "float32")),
    "slopes strides": ({"alibi_slopes": strided(6)}, BadStride, ("alibi_slopes", "(2,)")),
    "sinks shape": ({"sinks": torch.zeros(1)}, BadShape, ("sinks", "(1,)", "(6,)")),
    "sinks dtype": ({"sinks": torch.zeros(6).double()}, BadDtype, ("sinks", "float64", "float32")),
    "sinks strides": ({"sinks": strided(6)}, BadStride, ("sinks", "(2,)")),
    "scale nan": ({"scale": math.nan}, BadValue, ("scale", "nan", "finite")),
    "scale inf": ({"scale": math.inf}, BadValue, ("scale", "inf", "finite")),
    "scale -inf": ({"scale": -math.inf}, BadValue, ("scale", "-inf")),
    "softcap 0": ({"softcap": 0.0}, BadValue, ("softcap", "0.0", "finite")),
    "softcap negative": ({"softcap": -30.0}, BadValue, ("softcap", "-30.0")),
    "softcap nan": ({"softcap": math.nan}, BadValue, ("softcap", "nan")),
    "softcap inf": ({"softcap": math.inf}, BadValue, ("softcap", "inf")),
    "chunk 0": ({"chunk": 0}, BadValue, ("chunk", "0", "1..")),
    "chunk of a fraction": ({"chunk": 2.5}, BadValue, ("chunk", "2.5", "integer")),
    "sinks and lse": ({"sinks": torch.zeros(6), "return_lse": True}, BadValue, ("sinks", "LSE", "apply_sinks")),
}


def on(device: str, arguments: Call) -> Call:
    """The arguments on the backend's device, strides and all, those aside that are meant to lie elsewhere."""
    moved = dict(arguments)
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor) and x.device.type == "cpu":
            moved[name] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
    return moved


@checked_once
@pytest.mark.parametrize("how", ATTENTION)
def test_attention(backend, device, how):
    changes, error, fragments = ATTENTION[how]
    changes = on(device, changes)
    plan = backend.plan(good_spec(device), **good_metadata())
    good = {"q": torch.zeros(5, 6, 16, device=device)}
    backend.attention(kv=cache_tensors(device), plan=plan, **good)
    kv = cache_tensors(device, **{name: changes.pop(name) for name in ("k", "v") if name in changes})
    refuses(lambda: backend.attention(**{**good, "kv": kv, "plan": plan, **changes}), error, fragments)


WRITE_KV = {
    "k rows": ({"k_new": torch.zeros(6, 2, 16)}, BadShape, ("k_new", "(6, 2, 16)", "(5, 2, 16)")),
    "k heads": ({"k_new": torch.zeros(5, 6, 16)}, BadShape, ("k_new", "(5, 6, 16)", "(5, 2, 16)")),
    "k dtype": ({"k_new": torch.zeros(5, 2, 16).half()}, BadDtype, ("k_new", "float16", "float32")),
    "k strides": ({"k_new": strided(5, 2, 16)}, BadStride, ("k_new", "2)")),
    "v dim": ({"v_new": torch.zeros(5, 2, 8)}, BadShape, ("v_new", "(5, 2, 8)", "(5, 2, 16)")),
    "v dtype": ({"v_new": torch.zeros(5, 2, 16).double()}, BadDtype, ("v_new", "float64")),
    "v device": ({"v_new": torch.zeros(5, 2, 16, device="meta")}, BadValue, ("v_new", "meta")),
    "cache shape": ({"k": torch.zeros(10, 2, 16, 8)}, BadShape, ("kv.k", "(10, 2, 16, 8)", "(10, 2, 8, 16)")),
    "cache dtype": ({"v": torch.zeros(10, 2, 8, 16).half()}, BadDtype, ("kv.v", "float16")),
}


@checked_once
@pytest.mark.parametrize("how", WRITE_KV)
def test_write_kv(backend, device, how):
    changes, error, fragments = WRITE_KV[how]
    changes = on(device, changes)
    plan = backend.plan(good_spec(device), **good_metadata())
    rows = torch.zeros(5, 2, 16, device=device)
    good = {"k_new": rows, "v_new": rows}
    backend.write_kv(kv=cache_tensors(device), plan=plan, **good)
    kv = cache_tensors(device, **{name: changes.pop(name) for name in ("k", "v") if name in changes})
    refuses(lambda: backend.write_kv(**{**good, "kv": kv, "plan": plan, **changes}), error, fragments)


@checked_once
def test_write_kv_on_a_read_only_plan(backend, device):
    metadata = good_metadata()
    del metadata["slots"]
    plan = backend.plan(good_spec(device), **metadata)
    rows = torch.zeros(5, 2, 16, device=device)
    refuses(
        lambda: backend.write_kv(rows, rows, cache_tensors(device), plan), BadValue, ("write_kv", "slots", "read-only")
    )


def test_a_last_dimension_of_one_may_have_any_stride(backend, device):
    spec = good_spec(device, head_dim=1)
    kv = ops.PagedKV(*(torch.zeros(10, 2, 8, 3, device=device)[..., 1:2] for _ in range(2)))
    q = torch.ones(5, 6, 3, device=device)[..., ::3]
    assert q.stride(-1) == 3
    assert not backend.attention(q, kv, backend.plan(spec, **good_metadata())).any()


STATES = {
    "out_a dims": ("out_a", torch.zeros(5, 96), BadShape, ("out_a", "(5, 96)", "[T, Hq, Dv]")),
    "out_a strides": ("out_a", strided(5, 6, 16), BadStride, ("out_a", "2)")),
    "lse_a shape": ("lse_a", torch.zeros(6, 5), BadShape, ("lse_a", "(6, 5)", "(5, 6)")),
    "lse_a dtype": ("lse_a", torch.zeros(5, 6).half(), BadDtype, ("lse_a", "float16", "float32")),
    "lse_a strides": ("lse_a", strided(5, 6), BadStride, ("lse_a", "2)")),
    "out_b shape": ("out_b", torch.zeros(5, 6, 8), BadShape, ("out_b", "(5, 6, 8)", "(5, 6, 16)")),
    "out_b dtype": ("out_b", torch.zeros(5, 6, 16).half(), BadDtype, ("out_b", "float16", "float32")),
    "lse_b shape": ("lse_b", torch.zeros(4, 6), BadShape, ("lse_b", "(4, 6)", "(5, 6)")),
    "lse_b dtype": ("lse_b", torch.zeros(5, 6).double(), BadDtype, ("lse_b", "float64", "float32")),
    "out_b device": ("out_b", torch.zeros(5, 6, 16, device="meta"), BadValue, ("out_b", "meta")),
}


@checked_once
@pytest.mark.parametrize("how", STATES)
def test_merge_states(backend, device, how):
    name, value, error, fragments = STATES[how]
    out, lse = torch.zeros(5, 6, 16, device=device), torch.zeros(5, 6, device=device)
    good = {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse}
    backend.merge_states(**good)
    refuses(lambda: backend.merge_states(**{**good, **on(device, {name: value})}), error, fragments)


SINKS = {
    "out dims": ("out", torch.zeros(5, 96), BadShape, ("out", "(5, 96)")),
    "lse shape": ("lse", torch.zeros(5, 16), BadShape, ("lse", "(5, 16)", "(5, 6)")),
    "lse dtype": ("lse", torch.zeros(5, 6).bfloat16(), BadDtype, ("lse", "bfloat16")),
    "sinks shape": ("sinks", torch.zeros(16), BadShape, ("sinks", "(16,)", "(6,)")),
    "sinks dtype": ("sinks", torch.zeros(6).half(), BadDtype, ("sinks", "float16", "float32")),
}


@checked_once
@pytest.mark.parametrize("how", SINKS)
def test_apply_sinks(backend, device, how):
    name, value, error, fragments = SINKS[how]
    good = {"out": torch.zeros(5, 6, 16), "lse": torch.zeros(5, 6), "sinks": torch.zeros(6)}
    good = on(device, good)
    backend.apply_sinks(**good)
    refuses(lambda: backend.apply_sinks(**{**good, **on(device, {name: value})}), error, fragments)


def test_the_kinds_of_error_are_values_errors_of_quire():
    for error in (BadShape, BadDtype, BadStride, BadValue, Unsupported):
        assert issubclass(error, QuireError)
        assert issubclass(error, ValueError)
