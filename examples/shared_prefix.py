"""Sharing a prefix: eight sequences begin with the same 4,096 tokens, which are stored once and read once."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire import ops

S, HKV, G, D, SHARED, OWN = 8, 2, 4, 64, 4096, 32
backend = ops.load("auto")
blocks = torch.randperm(SHARED // 16 + S * OWN // 16)  # of 16 tokens, in any order
k_cache, v_cache = torch.randn(2, len(blocks), HKV, 16, D)
prefix, own = blocks[: SHARED // 16], blocks[SHARED // 16 :].view(S, -1)
q, rows = torch.randn(S, HKV * G, D), torch.arange(S + 1)

# One table a sequence: the plan sees that they begin with the same blocks.
spec = ops.AttentionSpec(
    num_heads=HKV * G, num_kv_heads=HKV, head_dim=D, block_size=16, num_blocks=len(blocks), dtype=torch.float32
)
tables = torch.cat([prefix.expand(S, -1), own], dim=1)
flat = backend.attention(
    q, ops.PagedKV(k_cache, v_cache), backend.plan(spec, rows, torch.full((S,), SHARED + OWN), tables)
)

# Two levels: the prefix for all rows, in a cache of its own with blocks of 128; then what is each sequence's own.
pages = [x[prefix].transpose(1, 2).reshape(-1, 128, HKV, D).transpose(1, 2) for x in (k_cache, v_cache)]
wide = replace(spec, block_size=128, num_blocks=SHARED // 128, causal=False)
together = backend.plan(wide, torch.tensor([0, S]), torch.tensor([SHARED]), torch.arange(SHARED // 128)[None])
levels = [
    ops.CascadeLevel(ops.PagedKV(*pages), together),
    ops.CascadeLevel(ops.PagedKV(k_cache, v_cache), backend.plan(spec, rows, torch.full((S,), OWN), own)),
]
cascade = ops.cascade_attention(q, levels)

stored, apart = len(blocks) * 16, S * (SHARED + OWN)
print(f"{stored:,} tokens stored instead of {apart:,}; both ways agree: {torch.allclose(flat, cascade, atol=1e-5)}")
