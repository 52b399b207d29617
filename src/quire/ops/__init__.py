"""Attention operators over a paged KV cache, usable without the engine.

    backend = ops.load("auto")
    plan = backend.plan(spec, query_starts, context_lens, block_tables, slots)
    backend.write_kv(k_new, v_new, kv, plan)
    out = backend.attention(q, kv, plan)

`paged_prefill` and `paged_decode` do it in one call; `compat` has the interfaces of other libraries. `spec.py` states
the contract, `backends/reference.py` implements it in plain torch, and docs/operators.md shows every operator with an
example.
"""

from __future__ import annotations

from quire.ops import layouts
from quire.ops import registered as registered  # torch.ops.quire
from quire.ops.backend import Backend
from quire.ops.cascade import CascadeLevel, cascade_attention
from quire.ops.compat.decode import append_token, paged_attention_decode
from quire.ops.compat.descriptor import PagedPrefill, PagedPrefillInfo
from quire.ops.compat.flash import attention_with_kvcache, update_and_gather, varlen_attention
from quire.ops.compat.vllm import choose_version, paged_attention, paged_attention_v1, paged_attention_v2
from quire.ops.paged import paged_decode, paged_prefill
from quire.ops.plan import AttentionPlan
from quire.ops.recurrent.calls import Scan
from quire.ops.recurrent.plan import RecurrentPlan
from quire.ops.recurrent.records import RecurrentCache, RecurrentSpec
from quire.ops.registry import BACKENDS, load, unavailable
from quire.ops.spec import AttentionSpec, Limits, PagedKV
from quire.ops.state import AttentionState

__all__ = [
    "BACKENDS",
    "AttentionPlan",
    "AttentionSpec",
    "AttentionState",
    "Backend",
    "CascadeLevel",
    "Limits",
    "PagedKV",
    "PagedPrefill",
    "PagedPrefillInfo",
    "RecurrentCache",
    "RecurrentPlan",
    "RecurrentSpec",
    "Scan",
    "append_token",
    "attention_with_kvcache",
    "cascade_attention",
    "choose_version",
    "layouts",
    "load",
    "paged_attention",
    "paged_attention_decode",
    "paged_attention_v1",
    "paged_attention_v2",
    "paged_decode",
    "paged_prefill",
    "unavailable",
    "update_and_gather",
    "varlen_attention",
]
