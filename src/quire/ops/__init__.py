"""Attention operators over a paged KV cache, usable without the engine.

    backend = ops.load("auto")
    plan = backend.plan(spec, query_starts, context_lens, block_tables, slots)
    backend.write_kv(k_new, v_new, kv, plan)
    out = backend.attention(q, kv, plan)

`paged_prefill` and `paged_decode` do it in one call. The contract stands in `interface.py`, its meaning in
`reference.py`.
"""

from __future__ import annotations

import importlib
from typing import cast

import torch

from quire.errors import BadDtype, BadShape, Unsupported
from quire.ops.interface import AttentionSpec, Limits, Ops, PagedKV
from quire.ops.plan import AttentionPlan

__all__ = [
    "BACKENDS",
    "AttentionPlan",
    "AttentionSpec",
    "Limits",
    "Ops",
    "PagedKV",
    "load",
    "paged_decode",
    "paged_prefill",
    "unavailable",
]

# Name -> module, the preferred first: "auto" takes the first one that is available.
BACKENDS = {
    "cpu": "quire.ops.cpu",
    "reference": "quire.ops.reference",
    "gather": "quire.ops.gather",
}


def load(name: str = "auto", device: str = "cpu") -> Ops:
    """The backend of that name, or with "auto" the fastest one that serves the device.

    Raises Unsupported where there is no such backend, or it cannot run here; the message says why.
    """
    if name != "auto" and name not in BACKENDS:
        raise Unsupported(f"there is no attention backend {name!r}; there are: auto, {', '.join(BACKENDS)}")
    reasons = []
    for candidate in BACKENDS if name == "auto" else (name,):
        backend = _module(candidate)
        reason = backend.unavailable(device)
        if reason is None:
            return backend
        reasons.append(f"{candidate}: {reason}")
    raise Unsupported(f"no attention backend for device {device!r} ({'; '.join(reasons)})")


def unavailable(name: str, device: str = "cpu") -> str | None:
    """Why the backend of that name cannot serve the device on this machine, or None where it can."""
    return _module(name).unavailable(device)


def _module(name: str) -> Ops:
    return cast(Ops, importlib.import_module(BACKENDS[name]))


def paged_prefill(
    q: torch.Tensor,  # [T, Hq, D]
    k_cache: torch.Tensor,  # [N, Hkv, B, D]
    v_cache: torch.Tensor,  # [N, Hkv, B, Dv]
    block_tables: torch.Tensor,  # int32 or int64 [S, M]
    seq_lens: torch.Tensor,  # int32 or int64 [S]
    cum_seq_lens_q: torch.Tensor,  # int32 or int64 [S+1]
    alibi_slopes: torch.Tensor | None = None,  # fp32 [Hq]
    scale: float | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Causal attention of ragged query rows over a paged cache that already holds their keys: out [T, Hq, Dv].

    Sequence s owns the query rows cum_seq_lens_q[s]:cum_seq_lens_q[s+1]; they are the last ones of its seq_lens[s]
    KV tokens, so a prompt can be prefilled in pieces. Integer tensors on a GPU are copied to the host, which waits
    for it: for a step of many layers make one plan.

    Raises BadShape, BadDtype, BadStride or BadValue, naming the argument, the sequence and the value.
    """
    for name, tensor, dims in (("q", q, 3), ("k_cache", k_cache, 4), ("v_cache", v_cache, 4)):
        if tensor.dim() != dims:
            raise BadShape(f"{name} has shape {tuple(tensor.shape)}; it must have {dims} dimensions")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype != q.dtype:
            raise BadDtype(f"{name} has dtype {tensor.dtype} and q {q.dtype}; they must be the same")
    ops = load(backend, q.device.type)
    spec = AttentionSpec(
        num_heads=q.shape[1],
        num_kv_heads=k_cache.shape[1],
        head_dim=q.shape[2],
        head_dim_v=v_cache.shape[3],
        block_size=k_cache.shape[2],
        num_blocks=k_cache.shape[0],
        dtype=q.dtype,
        device=str(q.device),
    )
    plan = ops.plan(spec, cum_seq_lens_q.cpu(), seq_lens.cpu(), block_tables.cpu())
    return ops.attention(q, PagedKV(k_cache, v_cache), plan, scale=scale, alibi_slopes=alibi_slopes)


def paged_decode(
    q: torch.Tensor,  # [S, Hq, D]
    k_cache: torch.Tensor,  # [N, Hkv, B, D]
    v_cache: torch.Tensor,  # [N, Hkv, B, Dv]
    block_tables: torch.Tensor,  # int32 or int64 [S, M]
    context_lens: torch.Tensor,  # int32 or int64 [S]
    alibi_slopes: torch.Tensor | None = None,  # fp32 [Hq]
    scale: float | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """One query row a sequence, over all of its context_lens[s] KV tokens: out [S, Hq, Dv].

    Else as `paged_prefill`.
    """
    one_row_each = torch.arange(len(q) + 1, dtype=torch.int32)
    return paged_prefill(
        q, k_cache, v_cache, block_tables, context_lens, one_row_each, alibi_slopes, scale, backend=backend
    )
