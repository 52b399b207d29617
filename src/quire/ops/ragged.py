"""Attention within the sequences of a batch that no cache is kept for: windows to both sides, relative positions.

A sequence is computed alone, in an order that depends on its length alone, with operators of a backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from quire.ops.compat.flash import varlen_attention
from quire.ops.relative import Relative

if TYPE_CHECKING:
    from quire.ops.backend import Backend


def relative_attention(
    backend: Backend,
    qkv: Sequence[Tensor],  # [T, Hq, D] each
    starts: Tensor,  # int32 [S+1], host
    scale: float,
    relative: Relative,
) -> Tensor:
    """Compute attention of all rows of a sequence to all of its keys, with relative positions: [T, Hq, D]."""
    q, k, v = qkv
    out, linears = torch.empty_like(q, memory_format=torch.contiguous_format), backend.linears(str(q.device), True)
    middle = len(relative.numbers) // 2
    for start, end in pairwise(starts.tolist()):
        at = torch.arange(end - start, device=q.device)
        numbers = relative.numbers[at[:, None] - at + middle]
        for head in range(q.shape[1]):
            own_q, own_k, own_v = (x[start:end, head].contiguous() for x in (q, k, v))
            scores = linears.head(own_k)(own_q) * scale + relative.of(head, own_q, own_k, numbers, scale)
            shares = torch.softmax(scores, 1).to(q.dtype)
            out[start:end, head] = linears.head(own_v.T.contiguous())(shares)
    return out


def window_attention(
    backend: Backend,
    qkv: Sequence[Tensor],  # q [T, Hq, D], k and v [T, Hkv, D]
    starts: Tensor,  # int32 [S+1], host
    scale: float,
    window: int,  # keys to each side that a row attends to, its own included
) -> Tensor:
    """Compute attention to the keys of a window to both sides: [T, Hq, D].

    The keys after a row are those before it in the reversed sequence, where each row attends to one key fewer: the
    sequence's first key, which is after no row, is left out.
    """
    q, k, v = qkv
    lens = starts.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lens)), lens)
    turned = (starts[1:] + starts[:-1] - 1)[sequence] - torch.arange(int(starts[-1]))
    after = turned[turned != starts[:-1][sequence]].to(q.device)
    turned = turned.to(q.device)
    fewer = torch.nn.functional.pad((lens - 1).clamp(min=0).cumsum(0), (1, 0))
    longest = int(lens.max())

    def part(q: Tensor, k: Tensor, v: Tensor, starts_k: Tensor, left: int) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], varlen_attention(
            q, k, v, starts, starts_k, longest, longest,
            softmax_scale=scale, causal=True, window_size=(left, 0), return_lse=True, backend=backend.name,
        ))  # fmt: skip

    out, lse = part(q, k, v, starts, window - 1)
    if window == 1 or not len(after):
        return out
    out_after, lse_after = (x[turned] for x in part(q[turned], k[after], v[after], fewer, window - 2))
    return backend.merge_states(out, lse, out_after, lse_after)[0]
