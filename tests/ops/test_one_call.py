"""Operators that make a plan in each call, inside torch.compile: the bits and the errors are those of an eager call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from quire import ops
from quire.errors import BadDtype, BadShape, BadValue, QuireError, Unsupported
from tests.marks import of_long_runs
from tests.ops.conftest import DEVICES, choose

pytestmark = pytest.mark.slow

USUAL = next(name for name in ops.BACKENDS if ops.unavailable(name, DEVICES[-1]) is None)
S, HEADS, KV_HEADS, DIM, DIM_V, BLOCK, BLOCKS = 3, 4, 2, 32, 16, 16, 9
TABLES = [[5, 0], [1, -1], [7, 2]]
LENS = [20, 3, 31]


@pytest.fixture(params=[*dict.fromkeys((USUAL, "reference", "triton")), of_long_runs("gather")])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ops.Backend:
    return choose(request, monkeypatch)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Inductor's code is scalar: it would compile a program for each instruction set to see whether that works."""
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        yield


def arguments(name: str, device: str = "cpu", extra: int = 0) -> dict[str, Any]:
    """The arguments of an operator, for S + extra sequences."""
    gen = torch.Generator().manual_seed(3)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(device)

    def integers(*values: Any) -> Tensor:
        return torch.tensor(values, device=device)

    num_seqs = S + extra
    lens = [*LENS, *(n + 1 for n in range(extra))]
    tables = [row + [-1] * extra for row in [*TABLES, *([n + 3, -1] for n in range(extra))]]
    q, k_new, v_new = rows(num_seqs, HEADS, DIM), rows(num_seqs, KV_HEADS, DIM), rows(num_seqs, KV_HEADS, DIM_V)
    k_cache, v_cache = rows(BLOCKS, KV_HEADS, BLOCK, DIM), rows(BLOCKS, KV_HEADS, BLOCK, DIM_V)
    nhd = {"k_cache": k_cache.transpose(1, 2).contiguous(), "v_cache": v_cache.transpose(1, 2).contiguous()}
    layer = {"k_new": k_new, "v_new": v_new, "k_cache_layer": k_cache, "v_cache_layer": v_cache}
    layer |= {"block_table": integers(*tables), "context_lens": integers(*lens)}
    return {
        "paged_decode": {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_tables": integers(*tables),
            "context_lens": integers(*lens),
        },
        "paged_prefill": {
            "q": rows(2 * num_seqs + 4, HEADS, DIM),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_tables": integers(*tables),
            "seq_lens": integers(*lens),
            "cum_seq_lens_q": integers(0, *(2 * n + 4 for n in range(1, num_seqs + 1))),
        },
        "varlen_attention": {
            "q": rows(2 * num_seqs, HEADS, DIM),
            "k": rows(5 * num_seqs, KV_HEADS, DIM),
            "v": rows(5 * num_seqs, KV_HEADS, DIM_V),
            "cu_seqlens_q": integers(*range(0, 2 * num_seqs + 1, 2)),
            "cu_seqlens_k": integers(*range(0, 5 * num_seqs + 1, 5)),
            "max_seqlen_q": 2 + extra,
            "max_seqlen_k": 5 + extra,
        },
        "attention_with_kvcache": {
            "q": q[:, None],
            **nhd,
            "k": k_new[:, None],
            "v": v_new[:, None],
            "cache_seqlens": integers(*lens),
            "block_table": integers(*tables),
        },
        "update_and_gather": {
            "key_states": k_new.transpose(0, 1)[None],
            "value_states": v_new.transpose(0, 1)[None],
            **nhd,
            "read_index": integers(*range(30, 40), *[-1] * num_seqs),
            "write_index": integers(-1, *range(31, 30 + num_seqs)),
        },
        "paged_attention_decode": {"q": q, **layer},
        "append_token": layer,
    }[name]


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "append_token": [],
    "paged_attention_decode": [{"scale": 0.3, "block_size": BLOCK}],
    "update_and_gather": [{"read_index": torch.tensor([], dtype=torch.int64)}, {"read_index": torch.arange(30, 37)}],
    "attention_with_kvcache": [
        {"causal": True, "return_lse": True, "window_size": (6, 0), "softcap": 2.0},
        {"k": None, "v": None, "cache_seqlens": 7, "window_size": torch.tensor([3, 0])},
    ],
    "paged_prefill": [{"alibi_slopes": torch.linspace(-0.5, 0.5, S * HEADS).view(S, HEADS), "scale": 0.3}],
    "paged_decode": [{"alibi_slopes": torch.linspace(-0.5, 0.5, HEADS), "scale": 0.3}],
    "varlen_attention": [
        {"causal": True, "return_lse": True, "softcap": 2.0, "softmax_scale": 0.3},
        {"causal": True, "window_size": (2, 0), "alibi_slopes": torch.linspace(-0.5, 0.5, HEADS)},
        {"window_size": torch.tensor([1, 0]), "return_lse": True},
    ],
}


def given(name: str, device: str, options: dict[str, Any], backend: str) -> dict[str, Any]:
    moved = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in options.items()}
    named = {} if name == "update_and_gather" else {"backend": backend}
    return {**arguments(name, device), **moved, **named}


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.mark.triton(cases=4)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_graph_gives_the_bits_of_an_eager_call(backend, device, name):
    function, graph = getattr(ops, name), compiled(getattr(ops, name))
    for options in ({}, *OPTIONS[name]):
        eager, traced = (given(name, device, options, backend.name) for _ in range(2))
        torch.testing.assert_close(graph(**traced), function(**eager), rtol=0, atol=0)
        for key, x in eager.items():
            if isinstance(x, Tensor):
                assert torch.equal(traced[key], x), f"{key} with {options}"


@pytest.mark.parametrize("name", OPTIONS)
def test_torch_agrees_with_the_registered_operator(name):
    for options in ({}, *OPTIONS[name]):
        call = given(name, "cpu", options, "auto")
        call.pop("return_lse", None)
        if isinstance(call.get("window_size"), Tensor):
            call["window"] = call.pop("window_size")
        if isinstance(call.get("cache_seqlens"), int):
            call["cache_seqlens"] = torch.full((S,), call["cache_seqlens"])
        opcheck(getattr(torch.ops.quire, name).default, (), call)


@pytest.mark.parametrize("name", OPTIONS)
def test_they_run_while_another_thread_compiles(name, monkeypatch):
    """Torch reports of the whole process that a graph is being traced."""
    eager, other = arguments(name), arguments(name)
    expected = getattr(ops, name)(**eager)
    for module in ("in_graph", "registered"):
        monkeypatch.setattr(f"quire.ops.{module}.is_compiling", lambda: True)
    torch.testing.assert_close(getattr(ops, name)(**other), expected, rtol=0, atol=0)
    assert all(torch.equal(other[key], x) for key, x in eager.items() if isinstance(x, Tensor))


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", ["paged_prefill", "paged_decode", "varlen_attention", "attention_with_kvcache"])
def test_other_numbers_of_sequences_and_tokens_recompile_once_at_most(name, marked):
    function, counter = getattr(ops, name), CompileCounterWithBackend("eager")
    graph = compiled(function, counter)
    for extra in (0, 1, 2, 3):
        eager, traced = arguments(name, extra=extra), arguments(name, extra=extra)
        if marked and not extra:
            other = arguments(name, extra=1)
            for key, x in traced.items():
                for i in range(x.dim() if isinstance(x, Tensor) else 0):
                    if x.shape[i] != other[key].shape[i]:
                        torch._dynamo.mark_dynamic(x, i)
        torch.testing.assert_close(graph(**traced), function(**eager), rtol=0, atol=0)
    whole_numbers = any(isinstance(x, int) for x in arguments(name).values())  # which no mark makes dynamic
    assert counter.frame_count == (1 if marked and not whole_numbers else 2)


def test_a_call_between_other_operators_through_inductor():
    """Inductor chooses the strides of what the call gets and gives."""
    call = arguments("paged_decode")
    x, weight = torch.randn(S, 24), torch.randn(24, HEADS * DIM)

    def layer(x: Tensor, *cached: Tensor) -> Tensor:
        q = (x @ weight).view(-1, DIM, HEADS).transpose(1, 2).contiguous()
        return ops.paged_decode(q, *cached).flatten(1).cos()

    cached = [call[key] for key in ("k_cache", "v_cache", "block_tables", "context_lens")]
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x, *cached), layer(x, *cached))


# -------------------------------------------------------------------------------------------------- refusals

WRONG: list[tuple[str, dict[str, Any], type[QuireError]]] = [
    ("paged_decode", {"q": torch.zeros(2, HEADS, DIM)}, BadShape),
    ("paged_decode", {"q": torch.zeros(S, 3, DIM)}, BadValue),
    ("paged_decode", {"q": torch.zeros(S, HEADS, DIM + 1)}, BadShape),
    ("paged_decode", {"k_cache": torch.zeros(BLOCKS, KV_HEADS, BLOCK, DIM).double()}, BadDtype),
    ("paged_decode", {"block_tables": torch.zeros(2, 2, dtype=torch.int64)}, BadShape),
    ("paged_decode", {"context_lens": torch.zeros(S)}, BadDtype),
    ("paged_decode", {"scale": float("inf")}, BadValue),
    ("paged_decode", {"backend": "nope"}, Unsupported),
    ("paged_prefill", {"cum_seq_lens_q": torch.arange(S)}, BadShape),
    ("paged_prefill", {"alibi_slopes": torch.zeros(HEADS + 1)}, BadShape),
    ("varlen_attention", {"v": torch.zeros(4, KV_HEADS, DIM)}, BadShape),
    ("varlen_attention", {"window_size": (3, 2)}, Unsupported),
    ("varlen_attention", {"softcap": -1.0}, BadValue),
    ("attention_with_kvcache", {"v": None}, BadValue),
    ("attention_with_kvcache", {"k": torch.zeros(S, 1, KV_HEADS, DIM - 1)}, BadShape),
    ("update_and_gather", {"write_index": torch.arange(S + 1)}, BadShape),
    ("paged_attention_decode", {"block_size": BLOCK + 1}, BadValue),
    ("paged_attention_decode", {"v_new": torch.zeros(S, KV_HEADS, DIM_V + 1)}, BadShape),
    ("append_token", {"block_table": torch.zeros(S + 1, 2, dtype=torch.int64)}, BadShape),
]
FLOATS = {"paged_decode": ("q", "k_cache"), "varlen_attention": ("v",), "attention_with_kvcache": ("k",)}
WITH_GRADIENTS = [
    (name, {key: arguments(name)[key].requires_grad_()}, Unsupported) for name, keys in FLOATS.items() for key in keys
]


@pytest.mark.parametrize(("name", "change", "error"), [*WRONG, *WITH_GRADIENTS])
def test_what_needs_no_values_is_refused_while_torch_traces(name, change, error):
    function, call = getattr(ops, name), {**arguments(name), **change}
    with pytest.raises(error) as eager:
        function(**call)
    with pytest.raises(RuntimeError) as graph:
        compiled(function, "eager")(**call)
    assert repr(eager.value) in str(graph.value)


def test_tensors_that_require_gradients_are_served_without_them():
    call = arguments("paged_decode") | {"q": torch.randn(S, HEADS, DIM, requires_grad=True)}
    with torch.no_grad():
        found, want = compiled(ops.paged_decode)(**call), ops.paged_decode(**call)
    assert torch.equal(found, want)
    assert not found.requires_grad


def test_what_needs_values_is_refused_when_the_graph_runs():
    graph, call = compiled(ops.paged_decode, dynamic=True), arguments("paged_decode")
    graph(**call)
    wrong = call | {"context_lens": torch.tensor([20, 3, 33])}
    with pytest.raises(BadValue, match=r"context_lens\[2\] is 33") as eager:
        ops.paged_decode(**wrong)
    with pytest.raises(BadValue, match=re.escape(str(eager.value))):
        graph(**wrong)
