"""HeadDrafter: draft tokens from a head that reads the model's hidden states (multi-token prediction, EAGLE)."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Chosen:
    """A request to draft tokens for."""

    index: int  # among those that were asked for
    request: Request
    count: int  # draft tokens
    first: int  # of its positions whose K and V the head has to compute
    end: int  # of these, at most the number of its tokens


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
        written = slots[group.slots.numpy() >= 0]  # the others were in the cache, where the head may lack them
        self._idle += 1
        if self._idle <= LATELY and len(at) > LONG:
            rows = self._row_of[_slots(tables, sequence, np.maximum(at - 1, 0), self._block_size)]
            same = np.r_[False, sequence[1:] == sequence[:-1]]
            before = self._before(rows, at)
            before[torch.from_numpy(same)] = hidden[:-1][torch.from_numpy(same[1:])]
            self._compute(token_ids, positions, before, torch.tensor([len(at) - 1]))
            self._pending[written] = False
        else:
            self._pending[written] = True
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
            if count and self._knows_last(request):
                chosen.append(Chosen(i, request, count, self._first_pending(request), len(request.tokens)))
        if not chosen:
            return drafts
        self._idle, left = 0, self._max_tokens
        drafting, others = list[Chosen](), list[Chosen]()
        for one in sorted(chosen, key=lambda one: one.end - one.first):
            if left >= one.end - one.first:
                # Only those that will draft are given blocks.
                (drafting if room(one.request, one.count) else others).append(one)
            elif left:
                others.append(replace(one, end=one.first + left))
            left = max(0, left - (one.end - one.first))
        drafting.sort(key=lambda one: -one.count)  # so that those that still draft are always the first
        for one, tokens in zip(drafting, self._drafts(drafting, others).tolist(), strict=True):
            drafts[one.index] = tokens[: one.count]
        return drafts

    def judge(self, request: Request, num_drafts: int, num_right: int) -> None:
        """Record the numbers of a request's last draft tokens, and of those that were accepted."""
        self._acceptance.judge(request, num_drafts, num_right)

    def _knows_last(self, request: Request) -> bool:
        """Return whether the hidden state before the request's last token is kept."""
        last = self._slots_of(request, len(request.tokens) - 2, len(request.tokens) - 1)
        return bool(self._is_kept(self._row_of[last]).all())

    def _first_pending(self, request: Request) -> int:
        """Return the first position that the head has not computed yet, at most that of the last token."""
        cache, last = request.cache, len(request.tokens) - 1
        blocks, done = self._done.get(request, (None, 0))
        start = min(last, done) if blocks is cache.block_ids else 0
        start = max(start, *(cache.num_freed[plan] * self._block_size for plan in self.head.plans), 0)
        found = self._pending[self._slots_of(request, start, last)]
        return start + int(found.argmax()) if found.any() else last

    def _drafts(self, drafting: Sequence[Chosen], others: Sequence[Chosen]) -> NDArray[np.int64]:
        """Compute the rows that the head lacks, and return the draft tokens of the requests that draft.

        drafting: those with the most draft tokens first. others: requests that only catch up.

        int64 [R, most], undefined after a request's own count.
        """
        parts = [*drafting, *others]
        ends = np.array([one.end for one in parts])
        rows = ends - [one.first for one in parts]
        starts = np.zeros(len(parts) + 1, np.int64)
        np.cumsum(rows, out=starts[1:])
        sequence = np.repeat(np.arange(len(parts)), rows)
        at = np.concatenate([np.arange(one.first, one.end) for one in parts])
        tokens = np.concatenate([one.request.tokens[one.first : one.end] for one in parts])
        np.maximum(tokens, 0, out=tokens)  # the rows of images, which a head sees in the hidden states alone
        counts = np.array([one.count for one in drafting])
        most = int(counts[0]) if drafting else 1
        tables = self._plan([one.request for one in parts], starts, ends, sequence, at, most - 1)
        before = self._before(self._row_of[_slots(tables, sequence, np.maximum(at - 1, 0), self._block_size)], at)
        slots = _slots(tables, sequence, at, self._block_size)
        given = torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(at), before  # `at` may be changed
        kept = torch.from_numpy(starts[1 : len(drafting) + 1] - 1 if drafting else starts[-1:] - 1)
        found = None
        if drafting:
            found = self.head.drafts(*given, self._cache, self._plans, kept, torch.from_numpy(counts))
        if found is None:
            hidden = self._compute(*given, kept)
        else:
            self.num_computed += len(at) + int(counts.sum()) - len(counts)
        self._pending[slots] = False
        for one in parts:
            self._done[one.request] = one.request.cache.block_ids, one.end
        if found is not None:
            return np.ascontiguousarray(found.numpy().T)
        return self._continued(drafting, counts, hidden)

    def _continued(
        self,
        drafting: Sequence[Chosen],
        counts: NDArray[np.int64],  # [R], descending
        hidden: Tensor,  # [R, H], the head's, at their last tokens
    ) -> NDArray[np.int64]:
        """Return the draft tokens of each request, computed one after the other: int64 [R, most]."""
        requests, known = [one.request for one in drafting], np.array([one.end for one in drafting], np.int64)
        tokens = np.empty((len(drafting), int(counts.max(initial=0))), np.int64)
        for k in range(tokens.shape[1]):
            active = int((counts > k).sum())
            if k:
                every, at = np.arange(active), known[:active] + (k - 1)
                self._plan(requests[:active], np.arange(active + 1), at + 1, every, at)
                last = torch.from_numpy(tokens[:active, k - 1].copy())
                hidden = self._compute(last, torch.from_numpy(at), hidden[:active], None)
            tokens[:active, k] = self.head.choose(hidden).numpy()
        return tokens

    # ------------------------------------------------------------------------------------------------- its rows

    def _compute(self, token_ids: Tensor, positions: Tensor, before: Tensor, rows: Tensor | None) -> Tensor:
        self.num_computed += len(token_ids)
        return self.head.forward(token_ids, positions, before, self._cache, self._plans, rows)

    def _plan(
        self,
        requests: Sequence[Request],
        starts: NDArray[np.int64],  # [R + 1]
        lengths: NDArray[np.int64],  # [R]
        sequence: NDArray[np.int64],  # [T]
        at: NDArray[np.int64],  # [T], positions
        further: int = 0,
    ) -> NDArray[np.int32]:
        """Update the plans of the head's groups for these rows. Return the block tables of the first group: [R, M].

        further: rows after the last ones of each request whose blocks are in the tables, too.
        """
        given = torch.from_numpy(starts.astype(np.int32)), torch.from_numpy(lengths.astype(np.int32))
        every = [self._tables(requests, plan, int(lengths.max()) + further) for plan in self.head.plans]
        for plan, tables in zip(self.head.plans, every, strict=True):
            slots = torch.from_numpy(_slots(tables, sequence, at, self._block_size))
            self._plans[plan].update_trusted(*given, torch.from_numpy(tables), slots)
        return every[0]

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
