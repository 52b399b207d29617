"""Public operators within a traced graph: each calls the operator of the same name in `registered.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from quire.ops.plan import AttentionPlan
from quire.ops.spec import PagedKV

Function = TypeVar("Function", bound=Callable[..., Any])


class Named(Protocol):
    """A backend."""

    name: str


def operator(in_graph: Callable[..., Any] | None = None) -> Callable[[Function], Function]:
    """Decorate a public operator: while torch traces a graph, call the registered operator instead (`registered.py`).

    `in_graph` calls the registered operator with the arguments of the public one; None if both take the same. The graph
    runs the undecorated operator, `__wrapped__`, since torch may trace in one thread while others run graphs.
    """

    def decorate(operator: Function) -> Function:
        name = operator.__name__

        @functools.wraps(operator)
        def call(backend: Named, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                return operator(backend, *args, **kwargs)
            if in_graph is not None:
                return in_graph(backend.name, *args, **kwargs)
            return getattr(torch.ops.quire, name)(backend.name, *args, **kwargs)

        return cast(Function, call)

    return decorate


def attention(
    backend: str,
    q: Tensor,
    kv: PagedKV,
    plan: AttentionPlan,
    *,
    out: Tensor | None = None,
    return_lse: bool = False,
    **scores: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    arguments = backend, q, kv.k, kv.v, plan.key
    scores |= {"k_scale": kv.k_scale, "v_scale": kv.v_scale}
    if out is None:
        out, lse = torch.ops.quire.attention(*arguments, **scores, return_lse=return_lse)
    else:
        lse = torch.ops.quire.attention_out(*arguments, **scores, out=out, return_lse=return_lse)
    return (out, lse) if return_lse else out


def write_kv(backend: str, k_new: Tensor, v_new: Tensor, kv: PagedKV, plan: AttentionPlan) -> None:
    torch.ops.quire.write_kv(backend, k_new, v_new, kv.k, kv.v, plan.key, kv.k_scale, kv.v_scale)


def copy_blocks(backend: str, kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None:
    torch.ops.quire.copy_blocks(backend, kv.k, kv.v, src, dst, kv.k_scale, kv.v_scale)


def add_rms_norm(backend: str, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed, total = torch.ops.quire.add_rms_norm(backend, x, residual, weight, eps)
    residual.copy_(total)
    return cast(Tensor, normed)


def rope(backend: str, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    turned_q, turned_k = torch.ops.quire.rope(backend, q, k, positions, cos, sin)
    q.copy_(turned_q)
    k.copy_(turned_k)
