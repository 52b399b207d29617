"""A work list made on the device, from lengths and tables that the host does not read.

The host launches the largest possible number of tiles; unused ones have nothing to do. Contexts are not cut or shared,
since that requires the lengths. The metadata is not checked: with invalid values, rows stay within the step and block
ids within the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.spec import AttentionSpec
from quire.ops.triton.partition import ITEM, most_tiles
from quire.ops.triton.tiles import Tile

INT32_MAX = 2**31 - 1


def items(
    spec: AttentionSpec,
    tile: Tile,
    tokens: int,  # of a tile
    num_tokens: int,  # T
    query_starts: Tensor,  # int [S+1]
    context_lens: Tensor,  # int [S]
    width: int,  # blocks of a table, M
) -> Tensor:
    """Return items in the form of `partition`, for the largest possible number of tiles: int64 [tiles, 8]."""
    num_seqs = len(context_lens)
    if num_seqs == 0:
        return torch.zeros(0, ITEM, dtype=torch.int64, device=query_starts.device)
    starts = query_starts.long().clamp(0, num_tokens)
    starts[:1], starts[-1:] = 0, num_tokens  # so that every row belongs to a sequence and is written
    starts = starts.cummax(0).values
    lens = context_lens.long().clamp(0, min(width * spec.block_size, INT32_MAX))
    rows = starts.diff().clamp(min=0)
    ends = ((rows + tokens - 1) // tokens).cumsum(0)
    number = torch.arange(most_tiles(num_tokens, num_seqs, tokens), device=starts.device)
    seq = torch.searchsorted(ends, number, right=True)
    live = seq < num_seqs
    seq = seq.clamp(max=num_seqs - 1)
    step = (number - torch.where(seq > 0, ends[(seq - 1).clamp(min=0)], 0)) * tokens
    token = starts[seq] + step
    count = torch.minimum((rows[seq] - step).clamp(0, tokens), (num_tokens - token).clamp(min=0))
    first = lens[seq] - rows[seq] + step  # position of the first row
    last = first + count - 1
    hi = sure_hi = lens[seq]
    if spec.causal:
        hi, sure_hi = (torch.minimum(x.clamp(min=0), lens[seq]) for x in (last + 1, first + 1))
    lo = free_lo = torch.zeros_like(hi)
    if spec.window is not None:
        lo = torch.minimum((first - spec.window + 1).clamp(min=0), hi)
        free_lo = ((last - spec.window + 1).clamp(min=0) + tile.block_n - 1) // tile.block_n * tile.block_n
        free_lo = torch.minimum(torch.maximum(free_lo, lo), hi)
    free_hi = torch.minimum(torch.maximum(sure_hi // tile.block_n * tile.block_n, free_lo), hi)
    table = torch.where(live, seq * width, -1)
    return torch.stack((table, token, count, lo, hi, free_lo, free_hi, 0 * lo), 1)


def sequences(
    num_tokens: int,  # T
    query_starts: Tensor,  # int [S+1]
) -> Tensor:
    """Return the sequence of each query row: int64 [T], in 0..S - 1."""
    starts = query_starts.long()
    token = torch.arange(num_tokens, device=starts.device)
    return (torch.searchsorted(starts, token, right=True) - 1).clamp(0, len(starts) - 2)


def positions(
    sequences: Tensor,  # int64 [T]
    query_starts: Tensor,  # int [S+1]
    context_lens: Tensor,  # int [S]
) -> Tensor:
    """Return the position of each query row in its sequence: int64 [T]."""
    token = torch.arange(len(sequences), device=sequences.device)
    first = context_lens.long()[sequences] - query_starts.long()[sequences + 1]
    return (first + token).clamp(-INT32_MAX, INT32_MAX)
