"""HeadDrafter: draft tokens from a head that reads the model's hidden states (multi-token prediction, EAGLE)."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.cache.storage import KVCache
from quire.engine.speculation import NOTHING, Acceptance, Asked, Draft, Room
from quire.models.batch import Batch
from quire.models.model import Head
from quire.ops.program import Plan
from quire.request import Request

log = logging.getLogger("quire")

STEPS_KEPT = 2  # steps of the most tokens whose hidden states are kept
LONG = 256  # rows: a step with more has parts of prompts
LATELY = 16  # steps: after more steps without a draft, prompts wait for the next one, too
LOST = -(2**62)  # in place of the number of a row whose hidden state is not known


@dataclass(frozen=True)
class Chosen:
    """A request to draft tokens for."""

    index: int  # among those that were asked for
    request: Request
    count: int  # draft tokens
    first: int  # of its positions whose K and V the head has to compute
    num_rows: int  # from there on: up to its last token, or fewer


class HeadDrafter:
    """Runs a draft head: before a step, over the rows that it has not computed yet, and then to propose tokens.

    The hidden states of the last rows of the model are kept in a ring. While no tokens are asked for, as with many
    requests, the head computes nothing. A row whose predecessor's hidden state is not kept, or was computed by another
    engine, gets zeros in its place: then drafts may be worse.
    """

    name = "head"

    def __init__(self, head: Head, cache: KVCache, plans: Sequence[Plan], block_size: int) -> None:
        """plans: of the runner; one of each cache group of model and head."""
        self._cache, self._plans, self._block_size = cache, plans, block_size
        first = plans[head.plans[0]]
        self._max_tokens = first.max_tokens
        self._num_slots = int(getattr(first.spec, "num_blocks", 0)) * block_size
        self.use(head)

    def use(self, head: Head) -> None:
        """Draft with this head from now on, without the rows that were computed so far."""
        self.head = head
        self._hidden = torch.empty(0)  # [STEPS_KEPT * max_tokens, W], a ring
        self._num_rows = 0  # that the model has computed so far
        # By slot in the head's first group: the number of the row that the model computed last, and whether the head
        # has yet to compute it.
        self._row_of = np.full(self._num_slots, LOST, np.int64)
        self._pending = np.zeros(self._num_slots, np.bool_)
        # The number of tokens up to which nothing is pending, in these blocks.
        self._done: WeakKeyDictionary[Request, tuple[list[array[int]], int]] = WeakKeyDictionary()
        self._idle = 0  # steps since the last draft
        self._failed = False
        self.num_computed = 0  # rows
        self._acceptance = Acceptance(0.0)

    # ------------------------------------------------------------------------------------------ after each step

    def move(self, batch: Batch) -> None:
        """Follow the blocks that a step moves first."""
        moves, size = batch.moves[self.head.plans[0]], np.arange(self._block_size)
        for block in moves.swap_in.dst:
            self._pending[block * self._block_size + size] = False
            self._row_of[block * self._block_size + size] = LOST
        for pairs in moves.copies:
            for src, dst in zip(pairs.src, pairs.dst, strict=True):
                for known in (self._pending, self._row_of):
                    known[dst * self._block_size + size] = known[src * self._block_size + size]

    def follow(
        self,
        batch: Batch,
        token_ids: Tensor,  # int64 [T]
        positions: Tensor,  # int64 [T]
        hidden: Tensor,  # [T, W], the model's
    ) -> None:
        """Keep the hidden states of a step's rows. The head computes parts of prompts at once, with the step's plans.

        An error ends the head's work, and not the step: its requests continue without the head's draft tokens.
        """
        if self._failed:
            return
        try:
            self._follow(batch, token_ids, positions, hidden)
        except Exception:
            log.exception("the draft head has failed; from here on it proposes nothing")
            self._failed, self._hidden = True, torch.empty(0)

    def _follow(self, batch: Batch, token_ids: Tensor, positions: Tensor, hidden: Tensor) -> None:
        if not len(self._hidden):
            self._hidden = hidden.new_zeros(STEPS_KEPT * self._max_tokens, hidden.shape[1])
        group, at = batch.groups[self.head.plans[0]], batch.positions.numpy()
        sequence = np.repeat(np.arange(len(group.block_tables)), np.diff(batch.query_starts.numpy()))
        tables = group.block_tables.numpy()
        slots = _slots(tables, sequence, at, self._block_size)
        self._idle += 1
        if self._idle <= LATELY and len(at) > LONG:
            rows = self._row_of[_slots(tables, sequence, np.maximum(at - 1, 0), self._block_size)]
            same = np.r_[False, sequence[1:] == sequence[:-1]]
            before = self._before(rows, at)
            before[torch.from_numpy(same)] = hidden[:-1][torch.from_numpy(same[1:])]
            self._compute(token_ids, positions, before, torch.tensor([len(at) - 1]))
            self._pending[slots] = False
        else:
            self._pending[slots[group.slots.numpy() >= 0]] = True
        numbers = self._num_rows + np.arange(len(at))
        self._hidden[torch.from_numpy(numbers % len(self._hidden))] = hidden
        self._row_of[slots] = numbers
        self._num_rows += len(at)

    # ----------------------------------------------------------------------------------------- before each step

    @torch.inference_mode()
    def propose(self, asked: Sequence[Asked], room: Room) -> list[Draft]:
        """Return draft tokens of each request."""
        drafts: list[Draft] = [NOTHING] * len(asked)
        chosen: list[Chosen] = []
        for i, (request, most) in enumerate(asked):
            count = 0 if self._failed else min(most, self._acceptance.cheap(request))
            last = self._slots_of(request, len(request.tokens) - 2, len(request.tokens) - 1) if count else None
            if last is not None and self._is_kept(self._row_of[last]).all():
                first = self._first_pending(request)
                chosen.append(Chosen(i, request, count, first, len(request.tokens) - first))
        if chosen:
            self._idle = 0
            ready, before = self._caught_up(chosen)
            has_room = [room(one.request, one.count) for one in ready]  # only now: others keep their blocks
            ready, before = [one for one, has in zip(ready, has_room, strict=True) if has], before[has_room]
            made = self._drafts(ready, before).tolist() if ready else []
            for one, tokens in zip(ready, made, strict=True):
                drafts[one.index] = tokens[: one.count]
        return drafts

    def judge(self, request: Request, num_drafts: int, num_right: int) -> None:
        """Record the numbers of a request's last draft tokens, and of those that were accepted."""
        self._acceptance.judge(request, num_drafts, num_right)

    def _first_pending(self, request: Request) -> int:
        """Return the first position that the head has not computed yet, at most that of the last token."""
        cache, last = request.cache, len(request.tokens) - 1
        blocks, done = self._done.get(request, (None, 0))
        start = min(last, done) if blocks is cache.block_ids else 0
        start = max(start, *(cache.num_freed[plan] * self._block_size for plan in self.head.plans), 0)
        found = self._pending[self._slots_of(request, start, last)]
        return start + int(found.argmax()) if found.any() else last

    def _caught_up(self, chosen: Sequence[Chosen]) -> tuple[list[Chosen], Tensor]:
        """Compute the rows that the head lacks, as many as fit into a step.

        Return the requests whose rows are complete, those with the most draft tokens first, and the head's hidden
        states at their last tokens.
        """
        left, parts = self._max_tokens, list[Chosen]()
        for one in sorted(chosen, key=lambda one: one.num_rows):
            if left:
                parts.append(Chosen(one.index, one.request, one.count, one.first, min(one.num_rows, left)))
                left -= parts[-1].num_rows
        ends = np.array([one.first + one.num_rows for one in parts])
        ready = [one for one, end in zip(parts, ends.tolist(), strict=True) if end == len(one.request.tokens)]
        ready.sort(key=lambda one: -one.count)  # so that those that still draft are always the first
        rows = np.array([one.num_rows for one in parts])
        starts = torch.from_numpy(np.r_[0, rows.cumsum()].astype(np.int32))
        sequence = np.repeat(np.arange(len(parts)), rows)
        at = np.concatenate([np.arange(one.first, one.first + one.num_rows) for one in parts])
        token_ids = np.concatenate([one.request.tokens[one.first : one.first + one.num_rows] for one in parts])
        np.maximum(token_ids, 0, out=token_ids)  # the rows of images, which a head sees in the hidden states alone
        self._plan([one.request for one in parts], starts, torch.from_numpy(ends.astype(np.int32)), sequence, at)
        tables = self._tables([one.request for one in parts], self.head.plans[0], int(ends.max()))
        before = self._before(self._row_of[_slots(tables, sequence, np.maximum(at - 1, 0), self._block_size)], at)
        order = {one.index: int(end) - 1 for one, end in zip(parts, starts[1:], strict=True)}
        wanted = sorted(order[one.index] for one in ready) or [len(at) - 1]
        found = self._compute(
            torch.from_numpy(token_ids.astype(np.int64)), torch.from_numpy(at), before, torch.tensor(wanted)
        )
        self._pending[_slots(tables, sequence, at, self._block_size)] = False
        for one, end in zip(parts, ends.tolist(), strict=True):
            self._done[one.request] = one.request.cache.block_ids, end
        return ready, found[torch.tensor([wanted.index(order[one.index]) for one in ready], dtype=torch.int64)]

    def _drafts(
        self,
        chosen: Sequence[Chosen],
        before: Tensor,  # [R, H], the head's hidden states at their last tokens
    ) -> NDArray[np.int64]:
        """Return the draft tokens of each request: int64 [R, most]; undefined after its own count."""
        requests = [one.request for one in chosen]
        known = np.array([len(request.tokens) for request in requests], np.int64)
        counts = np.array([one.count for one in chosen])
        found = np.empty((len(chosen), int(counts[0])), np.int64)
        token_ids = self.head.choose(before)
        found[:, 0] = token_ids.numpy()
        for k in range(1, found.shape[1]):
            active = int((counts > k).sum())
            every, at = np.arange(active), known[:active] + (k - 1)
            lengths = torch.from_numpy((at + 1).astype(np.int32))
            self._plan(requests[:active], torch.arange(active + 1, dtype=torch.int32), lengths, every, at)
            before = self._compute(token_ids[:active], torch.from_numpy(at), before[:active], None)
            token_ids = self.head.choose(before)
            found[:active, k] = token_ids.numpy()
        return found

    # ------------------------------------------------------------------------------------------------- its rows

    def _compute(self, token_ids: Tensor, positions: Tensor, before: Tensor, rows: Tensor | None) -> Tensor:
        self.num_computed += len(token_ids)
        return self.head.forward(token_ids, positions, before, self._cache, self._plans, rows)

    def _plan(
        self,
        requests: Sequence[Request],
        starts: Tensor,  # int32 [R + 1]
        lengths: Tensor,  # int32 [R]
        sequence: NDArray[np.int64],  # [T]
        at: NDArray[np.int64],  # [T], positions
    ) -> None:
        """Update the plans of the head's cache groups for these rows."""
        for plan in self.head.plans:
            tables = self._tables(requests, plan, int(lengths.max()))
            slots = torch.from_numpy(_slots(tables, sequence, at, self._block_size))
            self._plans[plan].update_trusted(starts, lengths, torch.from_numpy(tables), slots)

    def _before(
        self,
        rows: NDArray[np.int64],  # [T], numbers of the rows of the tokens before
        at: NDArray[np.int64],  # [T], positions
    ) -> Tensor:
        """Return the model's hidden states of these rows, and zeros for those that are not kept: [T, W]."""
        found = self._hidden[torch.from_numpy(rows % len(self._hidden))]
        found[torch.from_numpy(~self._is_kept(rows) | (at == 0))] = 0.0
        return found

    def _is_kept(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        kept: NDArray[np.bool_] = rows >= max(0, self._num_rows - len(self._hidden))
        return kept

    def _slots_of(self, request: Request, first: int, end: int) -> NDArray[np.int64]:
        """Return the slots of these positions in the head's first group."""
        at, table = np.arange(first, end), np.frombuffer(request.cache.block_ids[self.head.plans[0]], np.int32)
        return table[at // self._block_size].astype(np.int64) * self._block_size + at % self._block_size

    def _tables(self, requests: Sequence[Request], group: int, num_tokens: int) -> NDArray[np.int32]:
        """Return the block tables of a cache group: int32 [R, M]."""
        own = [request.cache.block_ids[group] for request in requests]
        widest = min(-(-num_tokens // self._block_size), max(map(len, own)))
        tables = np.zeros((len(own), widest), np.int32)
        for row, ids in zip(tables, own, strict=True):
            row[: len(ids)] = np.frombuffer(ids, np.int32)[:widest]
        return tables


def _slots(
    tables: NDArray[np.int32],  # [S, M]
    sequence: NDArray[np.int64],  # [T]
    at: NDArray[np.int64],  # [T], positions
    block_size: int,
) -> NDArray[np.int64]:
    """Return the slots of these positions: int64 [T]."""
    return tables[sequence, at // block_size].astype(np.int64) * block_size + at % block_size
