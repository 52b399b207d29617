"""`prefill`'s algorithm on a CPU, from the arguments of its launch. Gluon has no interpreter.

Programs, their turns, warp groups and tiles are visited as in the kernel; a piece of a block is read as the copy engine
reads it, and weights are rounded where the kernel rounds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LN_2 = 0.6931471805599453


class Emulator:
    """Stands in for the kernel: `emulator[grid](*arguments, **constants)` computes what a launch would."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *arguments, **constants: self.launch(grid[0], *arguments, **constants)

    def launch(
        self, programs, k_desc, v_desc, q, out, lse, part_mix, part_sums, items, rows, ends, tables, sinks,
        reports, num_items, num_heads, num_blocks, turns, q_token, q_head, out_token, out_head, scale,
        G, B, D, N, GROUPS, STAGES, CAUSAL, REGISTERS, COPY_REGISTERS, num_warps, maxnreg,
    ) -> None:  # fmt: skip
        assert (q_token, q_head, out_token, out_head) == (*q.stride()[:2], *out.stride()[:2])
        assert k_desc.block_shape == v_desc.block_shape == [1, 1, min(B, N), 64]
        assert (len(k_desc.base), num_warps) == (num_blocks, 4)
        # The registers of a processor: the compiler's limit for all warps, in fours, and what the groups share of it.
        warps = -(-(4 * GROUPS + 1) // 4) * 4
        assert maxnreg * warps * 32 <= 64 * 1024
        assert maxnreg * warps * 32 >= (REGISTERS * GROUPS + COPY_REGISTERS) * 4 * 32
        self.items = items[: num_items * 8].view(-1, 8).tolist()
        self.rows, self.ends = rows.view(-1, 2), ends
        self.k, self.v, self.tables, self.q = k_desc.base, v_desc.base, tables, q
        self.G, self.B, self.N, self.scale, self.causal = G, B, N, scale, CAUSAL
        heads = num_heads * G
        mixes, sums = (x.view(-1, heads, n) if x.numel() > 1 else None for x, n in ((part_mix, D), (part_sums, 2)))
        visited: Counter[tuple[int, int]] = Counter()
        for program in range(programs):
            for turn in range(turns):
                work = turn * programs + (program if turn % 2 == 0 else programs - 1 - program)
                if work >= num_items * num_heads:
                    continue
                number, head = work % num_items, work // num_items
                visited[number, head] += 1
                item = self.items[number]
                for group in range(GROUPS if item[0] >= 0 else 0):
                    tokens, parts, mix, top, total = self.group(item, head, group)
                    row_heads = slice(head * G, head * G + G)
                    for i, (token, part) in enumerate(zip(tokens, parts, strict=True)):
                        own = slice(i * G, i * G + G)
                        if part >= 0:
                            mixes[part, row_heads] = mix[own]
                            sums[part, row_heads] = torch.stack([top[own], total[own]], 1)
                            continue
                        if lse is not None:
                            lse[token, row_heads] = (top[own] + total[own].log2()) * LN_2
                        whole = total[own]
                        if sinks is not None:
                            least = top[own].masked_fill(top[own] == -torch.inf, 0.0)
                            whole = whole + torch.exp2(sinks[row_heads] / LN_2 - least)
                        share = torch.where(whole == 0, 0.0, 1 / whole)
                        out[token, row_heads] = (mix[own] * share[:, None]).to(out.dtype)
                    if reports is not None and item[2] > 1:
                        at = ((number * num_heads + head) * GROUPS + group) * 64
                        reports[at : at + len(mix)] = (~mix.isfinite().all(1)).to(torch.int8)
        assert visited == Counter((i, head) for i in range(num_items) for head in range(num_heads))
        self.launches.append({"items": self.items, "D": D, "GROUPS": GROUPS, "turns": turns, "programs": programs})

    def tile(self, base: Tensor, table: int, head: int, first: int, hi: int) -> Tensor:
        """Copy the keys or values of a tile, fp32 [N, D]: of each piece of a block, or zeros beyond hi."""
        piece = min(self.B, self.N)
        found = torch.zeros(self.N, base.shape[3])
        for p in range(self.N // piece):
            key = first + p * piece
            if key < hi:
                block = int(self.tables[table + key // self.B])
                slot = first % self.B if self.B > self.N else 0
                found[p * piece : (p + 1) * piece] = base[block, head, slot : slot + piece].float()
        return found

    def group(self, item: list[int], head: int, group: int) -> tuple[list[int], list[int], Tensor, Tensor, Tensor]:
        """Compute a warp group's rows: its tokens, their parts, sums of weighted values, largest scores, weights."""
        table, first_row, count, lo, hi, free_lo, free_hi, _ = item
        G, N, dtype = self.G, self.N, self.q.dtype
        assert lo % N == 0
        assert free_lo == lo or free_hi <= lo
        per_group = 64 // G
        count = max(0, min(count - group * per_group, per_group))
        entries = self.rows[first_row + group * per_group :][:count]
        tokens, parts = entries[:, 0].tolist(), entries[:, 1].tolist()
        q = self.q[tokens, head * G : head * G + G].flatten(0, 1).float()
        limit = torch.full((len(q),), hi)
        if self.causal:
            limit = limit.minimum(self.ends[tokens].repeat_interleave(G))
        mix = torch.zeros(len(q), self.q.shape[2])
        top, total = torch.full((len(q),), -torch.inf), torch.zeros(len(q))
        tiles = max(1, -(-(hi - lo) // N))
        seen_by_all = max(0, (free_hi - lo) // N)
        piece = min(self.B, self.N)
        for t in range(tiles - 1, -1, -1):
            first = lo + t * N
            k, v = (self.tile(x, table, head, first, hi) for x in (self.k, self.v))
            if t == tiles - 1 and hi % piece:
                at = hi % N // piece * piece
                v[at + hi % piece : at + piece] = 0
            s = q @ k.T
            if t == tiles - 1 or t >= seen_by_all:
                s = torch.where(torch.arange(N)[None] < (limit - first)[:, None], s, -torch.inf)
            largest = torch.maximum(top, s.amax(1).nan_to_num(-torch.inf, torch.inf, -torch.inf))
            shift = torch.where(largest == -torch.inf, 0.0, largest * self.scale)
            weight, factor = torch.exp2(s * self.scale - shift[:, None]), torch.exp2(top * self.scale - shift)
            total = total * factor + weight.sum(1)
            mix = mix * factor[:, None] + weight.to(dtype).float() @ v
            top = largest
        return tokens, parts, mix, top * self.scale, total
