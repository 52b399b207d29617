"""Paged decode by hand: two sequences whose blocks lie anywhere, one new token each."""

from __future__ import annotations

import torch

from quire import ops

B, HKV, G, D = 16, 2, 4, 64
k_cache, v_cache = torch.randn(2, 12, HKV, B, D)  # 12 blocks of 16 tokens, [N, Hkv, B, D] each
block_tables = torch.tensor([[7, 2, 11], [5, -1, -1]])  # 40 tokens in blocks 7, 2 and 11; 3 tokens in block 5
context_lens = torch.tensor([40, 3])
q = torch.randn(2, HKV * G, D)  # one query a sequence
out = ops.paged_decode(q, k_cache, v_cache, block_tables, context_lens)

for s, n in enumerate(context_lens.tolist()):  # the same, gathered and dense
    blocks = block_tables[s, : -(-n // B)]
    k, v = (x[blocks].transpose(1, 2).flatten(0, 1)[:n].repeat_interleave(G, dim=1) for x in (k_cache, v_cache))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q[s], k) / D**0.5, dim=-1)
    error = (out[s] - torch.einsum("hn,nhd->hd", weights, v)).abs().max()
    print(f"sequence {s}: {n} tokens in {len(blocks)} blocks, error below 1e-5: {bool(error < 1e-5)}")
