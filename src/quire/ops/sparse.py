"""Sparse attention over the keys that an indexer chooses (DeepSeek Sparse Attention, DeepSeek-V3.2).

The indexer has its own small key per token, stored next to the latent. The score of a key is the sum over the indexer's
heads of weight * max(0, q·k), in fp32; positive factors that all scores of a row share are left out. A row attends to
the k visible keys with the largest scores, ties to the lower position, or to all of them if they are k at most.

Attention over chosen keys is ordinary attention in which each row is a separate sequence, with blocks of one token.
So its bits depend on the row's keys alone, and a row that chooses all of its keys has the bits of dense attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.ops.plan import AttentionPlan
from quire.ops.spec import PagedKV

if TYPE_CHECKING:
    from quire.ops.backend import Backend

MOST_SCORES = 2**24  # fp32 numbers of scores and packed queries that are computed together


class Selection:
    """The keys that each row of a step attends to, for layers of any cache group."""

    def __init__(
        self,
        backend: Backend,
        positions: Tensor,  # int64 [T, k], host, ascending in each row
        counts: Tensor,  # int64 [T], host: the number of valid positions of each row, from the first on
        sequences: Tensor,  # int64 [T], host
    ) -> None:
        self._backend, self._positions, self._counts, self._sequences = backend, positions, counts, sequences
        self._plans: dict[int, AttentionPlan] = {}  # by the key of the step's plan

    def attention(
        self,
        q: Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: AttentionPlan,
        scale: float | None,
    ) -> Tensor:
        """Compute attention of each row to its chosen keys: [T, Hq, Dv]."""
        key = int(plan.key)
        if key not in self._plans:
            self._plans[key] = self._plan(plan)
        return self._backend.attention(q, _by_slot(kv), self._plans[key], scale=scale)

    def mask(self, width: int) -> Tensor:
        """Return 1 for each key that a row attends to, at its position, else 0: [T, width], fp32."""
        columns = torch.arange(self._positions.shape[1])
        chosen = (columns < self._counts[:, None]).float()
        return torch.zeros(len(chosen), width).scatter_add_(1, self._positions, chosen)

    @classmethod
    def of_mask(cls, backend: Backend, mask: Tensor) -> Selection:
        """Return the keys of a mask, for the rows of one sequence that has no earlier ones."""
        counts = mask.sum(1).long()
        order = mask.sort(dim=1, descending=True, stable=True).indices
        return cls(backend, order[:, : max(1, int(counts.max()))], counts, torch.zeros_like(counts))

    def _plan(self, plan: AttentionPlan) -> AttentionPlan:
        """Return a plan with a sequence for each row."""
        spec, (rows, most) = plan.spec, self._positions.shape
        with plan.lock:
            tables = plan.block_tables.long()
        slots = _slots(tables[self._sequences], self._positions, spec.block_size)
        # Only the first ones of each row are read; the others may be any slots.
        slots = torch.where(torch.arange(most) < self._counts[:, None], slots, 0).int()
        by_slot = replace(spec, block_size=1, num_blocks=spec.num_blocks * spec.block_size)
        found = self._backend.make_plan(by_slot, rows, rows, most)
        found.update_trusted(torch.arange(rows + 1, dtype=torch.int32), self._counts.int(), slots, None)
        return found


def select(
    backend: Backend,
    q: Tensor,  # [T, Hi, Di], rotated
    k: Tensor,  # [T, Di], rotated
    weights: Tensor,  # fp32 [T, Hi]
    index: Tensor,  # [N, 1, B, Di], written
    plan: AttentionPlan,  # updated for this step, with slots
    top_k: int,
) -> Selection | None:
    """Store the rows' index keys and choose the keys that each row attends to. Return None if all see few keys."""
    with plan.lock:
        starts, lens = plan.query_starts[: plan.num_seqs + 1].long(), plan.context_lens[: plan.num_seqs].long()
        slots, tables = plan.slots[: plan.num_tokens].long(), plan.block_tables[: plan.num_seqs]
    size, written = plan.spec.block_size, torch.nonzero(slots >= 0).flatten()
    at = slots[written].to(index.device)
    index[at // size, 0, at % size] = k[written.to(k.device)].to(index.dtype)
    sequences = torch.repeat_interleave(torch.arange(plan.num_seqs), starts.diff())  # [T]
    counts = (lens - starts[1:])[sequences] + torch.arange(plan.num_tokens) + 1  # visible keys of each row
    counts = counts.clamp(min=0)
    many = torch.nonzero(counts > top_k).flatten()
    if not len(many):
        return None
    positions = torch.arange(top_k).repeat(plan.num_tokens, 1)
    each = int(counts.max()) + q.shape[1] * (q.shape[2] + 1)
    for rows in torch.split(many, max(1, MOST_SCORES // each)):
        own = rows.to(q.device)
        scores = backend.index_scores(q[own], weights[own], index, tables, sequences[rows], counts[rows])
        positions[rows] = backend.top_k(scores, top_k).sort(-1).values.cpu()
    return Selection(backend, positions, counts.clamp(max=top_k), sequences)


def reference_scores(
    q: Tensor,  # [R, Hi, Di]
    weights: Tensor,  # [R, Hi]
    index: Tensor,  # [N, 1, B, Di]
    tables: Tensor,  # int32 [S, M], host
    sequences: Tensor,  # int64 [R], host
    counts: Tensor,  # int64 [R], host
) -> Tensor:
    """Compute `Backend.index_scores` in PyTorch, in fp32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.full((len(q), int(counts.max()) if len(q) else 0), -torch.inf, dtype=wide, device=q.device)
    for i, (sequence, count) in enumerate(zip(sequences.tolist(), counts.tolist(), strict=True)):
        at = _slots(tables[sequence].long()[None], torch.arange(count)[None], index.shape[2])[0].to(index.device)
        keys = index[at // index.shape[2], 0, at % index.shape[2]].to(wide)  # [keys, Di]
        scores[i, :count] = weights[i].to(wide) @ (q[i].to(wide) @ keys.T).relu()
    return scores.float()


def _slots(
    tables: Tensor,  # int64 [R, M]
    positions: Tensor,  # int64 [R, keys]
    block_size: int,
) -> Tensor:
    """Return the slots of positions of sequences: [R, keys]."""
    columns = (positions // block_size).clamp(max=tables.shape[1] - 1)
    return tables.gather(1, columns) * block_size + positions % block_size


def _by_slot(kv: PagedKV) -> PagedKV:
    """Return a view of a latent cache in which each token is a block: [N B, 1, 1, D]."""
    k, v = (x.transpose(1, 2).view(-1, 1, 1, x.shape[3]) for x in (kv.k, kv.v))
    return PagedKV(k, v)
