"""The operators registered with torch, `torch.ops.quire.*`, which a compiled graph calls instead of a backend.

A backend's operators read addresses, which do not exist while torch traces a graph. So a call under `torch.compile` or
`torch.export` becomes one of the operators registered here, with the backend's name as the first argument. torch knows
the written arguments and the shapes of the results, and does not trace into the operator. A call outside of graphs goes
directly to the backend. `one_call` does the same for functions that make a plan in each call, such as `paged_decode`.

A plan is made and updated outside of graphs, and cannot be an operator's argument. The operators take its `key`, a
tensor that never changes: neither an update nor another plan causes a recompilation.

A graph that writes to a cache of int8 needs its integers and its scales in separate memory: torch (2.13) rejects inputs
of different dtypes that share memory, as they do in an engine's cache.

Invalid arguments of a backend's operators are detected when the graph runs, and raise the backend's errors. Functions
that make a plan check all but the values of tensors while torch traces, and refuse tensors that require gradients. The
other operators have no gradients: torch warns if a backward pass reaches one of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._pytree import tree_any, tree_map

from quire.errors import Unsupported
from quire.ops.checks.tensors import begin_alike
from quire.ops.plan import plan_of
from quire.ops.registry import load
from quire.ops.spec import PagedKV

Function = TypeVar("Function", bound=Callable[..., Any])

_ATTENTION = (
    "str backend, Tensor q, Tensor k, Tensor v, Tensor plan, *, "
    "Tensor? k_scale=None, Tensor? v_scale=None, "
    "float? scale=None, Tensor? alibi_slopes=None, float? softcap=None, Tensor? sinks=None, int? chunk=None"
)

# Shapes and dtypes are those of `Backend`; k, v and their scales are a PagedKV's, plan is a plan's key. Results are
# contiguous.
SCHEMAS = {
    "write_kv": "(str backend, Tensor k_new, Tensor v_new, Tensor(a!) k, Tensor(b!) v, Tensor plan, "
    "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> ()",
    "copy_blocks": "(str backend, Tensor(a!) k, Tensor(b!) v, SymInt[] src, SymInt[] dst, "
    "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> ()",
    # out and LSE; the LSE is empty unless requested
    "attention": f"({_ATTENTION}, bool return_lse=False) -> (Tensor, Tensor)",
    "attention_out": f"({_ATTENTION}, Tensor(a!) out, bool return_lse=False) -> Tensor",
    "merge_states": "(str backend, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    "apply_sinks": "(str backend, Tensor out, Tensor lse, Tensor sinks) -> Tensor",
    "rms_norm": "(str backend, Tensor x, Tensor weight, float eps) -> Tensor",
    # These two return the tensors that a backend changes in place: the new residual after the norm, the new q and k.
    # If an operator writes to `k.clone()`, where k is a slice of one row, Inductor (2.13) passes the wrong slice.
    "add_rms_norm": "(str backend, Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    "rope": "(str backend, Tensor q, Tensor k, Tensor positions, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    "layer_norm": "(str backend, Tensor x, Tensor weight, Tensor? bias, float eps) -> Tensor",
    "swiglu": "(str backend, Tensor gate_up) -> Tensor",
    "gelu": "(str backend, Tensor x, str approximate) -> Tensor",
    "logsumexp": "(str backend, Tensor logits) -> Tensor",
    "top_k": "(str backend, Tensor logits, SymInt k) -> Tensor",
    "top_k_softmax": "(str backend, Tensor logits, SymInt k) -> (Tensor, Tensor)",
}


# ------------------------------------------------------------------------------------- when the graph runs


@functools.cache
def _function(backend: str, name: str, device: str) -> Callable[..., Any]:
    """Return the backend's undecorated operator, as another thread may be tracing while this one runs a graph."""
    found = load(backend, device)
    return functools.partial(getattr(type(found), name).__wrapped__, found)


def _write_kv(
    backend: str,
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    size = v_new.shape[-1]
    if begin_alike(k, v) and k_new.dtype == v_new.dtype and torch.equal(k_new[..., :size], v_new):
        v_new = k_new[..., :size]  # of a latent cache: a compiler may have copied this view
    _function(backend, "write_kv", k.device.type)(k_new, v_new, PagedKV(k, v, k_scale, v_scale), plan_of(plan))


def _copy_blocks(
    backend: str,
    k: Tensor,
    v: Tensor,
    src: list[int],
    dst: list[int],
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    _function(backend, "copy_blocks", k.device.type)(PagedKV(k, v, k_scale, v_scale), src, dst)


def _attention(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    attention = _function(backend, "attention", q.device.type)
    result = attention(q, PagedKV(k, v, k_scale, v_scale), plan_of(plan), return_lse=return_lse, **options)
    return result if return_lse else (result, _no_lse(q))


def _attention_out(*args: Any, **options: Any) -> Tensor:
    return _attention(*args, **options)[1]


def _add_rms_norm(backend: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual.clone(memory_format=torch.contiguous_format)
    normed = _function(backend, "add_rms_norm", x.device.type)(x, total, weight, eps)
    return normed.contiguous(), total


def _rope(backend: str, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    _function(backend, "rope", q.device.type)(q, k, positions, cos, sin)
    return q, k


def _plain(name: str) -> Callable[..., Any]:
    """Return the implementation of an operator that takes tensors, returns new ones and writes to none."""

    def call(backend: str, x: Tensor, *args: Any) -> Any:
        result = _function(backend, name, x.device.type)(x, *args)
        return tuple(y.contiguous() for y in result) if isinstance(result, tuple) else result.contiguous()

    return call


def _no_lse(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=_wide(q.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


CALLS: dict[str, Callable[..., Any]] = {
    "write_kv": _write_kv,
    "copy_blocks": _copy_blocks,
    "attention": _attention,
    "attention_out": _attention_out,
    "add_rms_norm": _add_rms_norm,
    "rope": _rope,
}


# ------------------------------------------------------------------------- shapes and dtypes of the results


def pin(*written: Tensor) -> None:
    """Make all sizes, strides and offsets of written tensors static, except for the first size.

    Inductor (2.13) replaces the dynamic offset of a view that an operator writes to by 0.
    """
    for x in written:
        for number in (x.storage_offset(), *x.stride(), *x.shape[1:]):
            int(number)


def _fake_write_kv(
    backend: str,
    k_new: Tensor,
    v_new: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    pin(*PagedKV(k, v, k_scale, v_scale).tensors().values())


def _fake_copy_blocks(
    backend: str,
    k: Tensor,
    v: Tensor,
    src: Sequence[int],
    dst: Sequence[int],
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    pin(*PagedKV(k, v, k_scale, v_scale).tensors().values())


def _fake_attention(
    backend: str, q: Tensor, k: Tensor, v: Tensor, plan: Tensor, *, return_lse: bool = False, **scores: Any
) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=_wide(q.dtype)) if return_lse else _no_lse(q)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


def _fake_attention_out(*args: Any, out: Tensor, **options: Any) -> Tensor:
    pin(out)
    return _fake_attention(*args, **options)[1]


def _fake_merge_states(
    backend: str, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _fake_norm(backend: str, x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_pair(backend: str, x: Tensor, y: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), y.new_empty(y.shape)


def _fake_swiglu(backend: str, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _fake_logsumexp(backend: str, logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:1])


def _fake_top_k(backend: str, logits: Tensor, k: int) -> Tensor:
    return logits.new_empty(logits.shape[0], k, dtype=torch.int64)


def _fake_top_k_softmax(backend: str, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return _fake_top_k(backend, logits, k), logits.new_empty(logits.shape[0], k)


FAKES: dict[str, Callable[..., Any]] = {
    "write_kv": _fake_write_kv,
    "copy_blocks": _fake_copy_blocks,
    "attention": _fake_attention,
    "attention_out": _fake_attention_out,
    "merge_states": _fake_merge_states,
    "add_rms_norm": _fake_pair,
    "rope": _fake_pair,
    "swiglu": _fake_swiglu,
    "logsumexp": _fake_logsumexp,
    "top_k": _fake_top_k,
    "top_k_softmax": _fake_top_k_softmax,
}


_LIBRARY = torch.library.Library("quire", "DEF")  # type: ignore[no-untyped-call] # operators exist as long as it


def _define(name: str, schema: str, call: Callable[..., Any], fake: Callable[..., Any], *tags: torch.Tag) -> None:
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, call, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"quire::{name}", fake, lib=_LIBRARY)


for _name, _schema in SCHEMAS.items():
    _define(_name, _schema, CALLS.get(_name) or _plain(_name), FAKES.get(_name, _fake_norm))


# ----------------------------------------------------------------------- functions that make a plan in each call


def one_call(
    schema: str,
    shapes: Callable[..., Any],
    in_graph: Callable[..., Any] | None = None,
    convert: Callable[..., Any] = lambda function: function,
) -> Callable[[Function], Function]:
    """Decorate a function that makes a plan: while torch traces a graph, call the operator registered here instead.

    The trace runs the function itself on tensors without values, as examples of the sizes, for its checks.

    Args:
        schema: of the registered operator.
        shapes: returns empty results for the arguments of the registered operator, whose sizes may be symbolic.
        in_graph: calls the registered operator with the function's arguments; None if both take the same.
        convert: returns a function that takes the arguments of the registered operator.
    """

    def decorate(function: Function) -> Function:
        name, registered = function.__name__, convert(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                _check_gradients(function, args, kwargs)
                return function(*args, **kwargs)
            return (in_graph or getattr(torch.ops.quire, name))(*args, **kwargs)

        def fake(*args: Any, **kwargs: Any) -> Any:
            _check_gradients(function, args, kwargs)
            if not tree_any(_is_unknown, (args, kwargs)):
                args_of_check, kwargs_of_check = tree_map(_example, (args, kwargs))
                registered(*args_of_check, **kwargs_of_check)
            return shapes(*args, **kwargs)

        _define(name, schema, registered, fake, torch.Tag.cudagraph_unsafe)  # it copies lengths to the host
        return cast(Function, call)

    return decorate


def _check_gradients(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise Unsupported if an argument requires gradients, which would silently be zero."""
    if torch.is_grad_enabled():
        for i, x in enumerate((*args, *kwargs.values())):
            if isinstance(x, Tensor) and x.requires_grad:
                name = [*list(inspect.signature(function).parameters)[: len(args)], *kwargs][i]
                raise Unsupported(
                    f"{name} requires gradients, and {function.__name__} has no backward pass; call it under "
                    f"torch.no_grad() or torch.inference_mode(), or give {name}.detach()"
                )


def _numbers(x: Any) -> tuple[Any, ...]:
    return (*x.shape, *x.stride()) if isinstance(x, Tensor) else (x,)


def _is_unknown(x: Any) -> bool:
    """Return True if a size depends on the values of a tensor, so that not even an example of it is known."""
    return any(isinstance(n, torch.SymInt | torch.SymFloat) and not n.node.has_hint() for n in _numbers(x))


def _example(x: Any) -> Any:
    """Return a number instead of a symbolic one, and a tensor with such sizes instead of one with symbolic sizes.

    Checks compare them without a guard on the sizes, which would compile the graph again for others.
    """
    if isinstance(x, Tensor):
        size, stride = [_example(n) for n in x.shape], [_example(n) for n in x.stride()]
        return torch.empty_strided(size, stride, dtype=x.dtype, device=x.device)
    return x.node.hint if isinstance(x, torch.SymInt | torch.SymFloat) else x
