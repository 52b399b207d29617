"""HeadDrafter: draft tokens from a checkpoint's own draft head (multi-token prediction)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.cache.storage import KVCache
from quire.engine.speculation import NOTHING, Acceptance, Asked, Draft, Room
from quire.models.batch import Batch
from quire.models.model import Head, Model
from quire.ops.program import Plan
from quire.request import Request

log = logging.getLogger("quire")


@dataclass(frozen=True)
class Chosen:
    """A request to draft tokens for."""

    index: int  # among those that were asked for
    request: Request
    count: int  # draft tokens
    row: int  # of the last step, with the hidden state before the request's last token


class HeadDrafter:
    """Runs a model's draft head: after each step over the step's rows, before a step to propose tokens.

    The model's hidden states of the last step are kept, with the cache slot of each row as its key. A row whose
    predecessor was computed earlier, or by another engine, gets zeros in its place: then drafts may be worse.
    """

    def __init__(self, model: Model, head: Head, cache: KVCache, plans: Sequence[Plan], block_size: int) -> None:
        """plans: of the runner; one of each cache group of model and head."""
        self._cache, self._plans, self._block_size = cache, plans, block_size
        self.use(model, head)
        self._shares: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        self._idle: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # steps without a draft that did not pay

    def use(self, model: Model, head: Head) -> None:
        """Draft with this model's head from now on."""
        self._model, self.head = model, head
        self._hidden = torch.empty(0)  # [T, H] of the last step
        self._failed = False
        self._rows: dict[int, int] = {}  # by slot in the head's first group
        self._acceptance = Acceptance()

    # ------------------------------------------------------------------------------------------ after each step

    def follow(
        self,
        batch: Batch,
        token_ids: Tensor,  # int64 [T]
        positions: Tensor,  # int64 [T]
        hidden: Tensor,  # [T, H], the model's
    ) -> None:
        """Compute the head's K and V of a step's rows, with the plans of the step.

        An error ends the head's work, and not the step: its requests continue without the head's draft tokens.
        """
        if self._failed:
            return
        try:
            self._follow(batch, token_ids, positions, hidden)
        except Exception:
            log.exception("the draft head has failed; from here on it proposes nothing")
            self._failed, self._rows, self._hidden = True, {}, torch.empty(0)

    def _follow(self, batch: Batch, token_ids: Tensor, positions: Tensor, hidden: Tensor) -> None:
        starts, size = batch.query_starts[:-1].numpy(), self._block_size
        tables, at = batch.groups[self.head.plans[0]].block_tables.numpy(), batch.positions.numpy()
        before = torch.empty_like(hidden)
        before[1:] = hidden[:-1]
        for s, row in enumerate(starts.tolist()):
            known = self._rows.get(_slot(tables[s], int(at[row]) - 1, size)) if at[row] else None
            before[row] = 0.0 if known is None else self._hidden[known]
        self.head.forward(token_ids, positions, before, self._cache, self._plans, torch.tensor([len(at) - 1]))
        sequence = np.repeat(np.arange(len(starts)), np.diff(batch.query_starts.numpy()))
        slots = tables[sequence, at // size].astype(np.int64) * size + at % size
        self._hidden, self._rows = hidden, {slot: row for row, slot in enumerate(slots.tolist())}

    # ----------------------------------------------------------------------------------------- before each step

    def propose(self, asked: Sequence[Asked], room: Room) -> list[Draft]:
        """Return draft tokens of each request."""
        drafts: list[Draft] = [NOTHING] * len(asked)
        chosen: list[Chosen] = []
        for i, (request, most) in enumerate(asked):
            count = min(most, self._acceptance.worthwhile(request))
            row = self._row_before(request) if count else None
            if row is not None and room(request, count):
                chosen.append(Chosen(i, request, count, row))
        chosen.sort(key=lambda one: -one.count)  # so that those that still draft are always the first
        if chosen:
            made = self._drafts(chosen).tolist()
            for one, tokens in zip(chosen, made, strict=True):
                drafts[one.index] = tokens[: one.count]
        return drafts

    def judge(self, request: Request, num_drafts: int, num_right: int) -> None:
        """Record the numbers of a request's last draft tokens, and of those that were accepted."""
        self._acceptance.judge(request, num_drafts, num_right)

    def _row_before(self, request: Request) -> int | None:
        """Return the row of the last step with the hidden state before the request's last token."""
        table = request.cache.block_ids[self.head.plans[0]]
        return self._rows.get(_slot(table, len(request.tokens) - 2, self._block_size))

    def _drafts(self, chosen: Sequence[Chosen]) -> NDArray[np.int64]:
        """Return the draft tokens of each request: int64 [R, most]; undefined after its own count."""
        size, requests = self._block_size, [one.request for one in chosen]
        known = np.array([len(request.tokens) for request in requests], np.int64)
        counts = np.array([one.count for one in chosen])
        most = int(counts[0])
        starts, every = torch.arange(len(chosen) + 1, dtype=torch.int32), np.arange(len(chosen))
        tables = [self._tables(requests, plan, int(known.max()) + most) for plan in self.head.plans]
        token_ids = torch.tensor([request.tokens[-1] for request in requests])
        before = self._hidden[torch.tensor([one.row for one in chosen])]
        found = np.empty((len(chosen), most), np.int64)
        for k in range(most):
            active = int((counts > k).sum())
            position = known[:active] + (k - 1)
            lengths = torch.from_numpy((position + 1).astype(np.int32))
            for plan, table in zip(self.head.plans, tables, strict=True):
                slots = table[every[:active], position // size].astype(np.int64) * size + position % size
                own = torch.from_numpy(table[:active])
                self._plans[plan].update_trusted(starts[: active + 1], lengths, own, torch.from_numpy(slots))
            at = torch.from_numpy(position)
            before = self.head.forward(token_ids[:active], at, before[:active], self._cache, self._plans)
            token_ids = self.head.choose(before)
            found[:active, k] = token_ids.numpy()
        return found

    def _tables(self, requests: Sequence[Request], group: int, num_tokens: int) -> NDArray[np.int32]:
        """Return the block tables of a cache group: int32 [R, M]."""
        own = [request.cache.block_ids[group] for request in requests]
        widest = min(-(-num_tokens // self._block_size), max(map(len, own)))
        tables = np.zeros((len(own), widest), np.int32)
        for row, ids in zip(tables, own, strict=True):
            row[: len(ids)] = np.frombuffer(ids, np.int32)[:widest]
        return tables


def _slot(table: Sequence[int] | NDArray[np.int32], position: int, block_size: int) -> int:
    """Return the slot of a position."""
    return int(table[position // block_size]) * block_size + position % block_size
