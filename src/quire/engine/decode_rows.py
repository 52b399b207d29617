"""DecodeRows: the running requests that merely decode, as arrays that persist from step to step.

Such a request gets one token in each step until it ends. Its lengths, blocks and sampling parameters are entries of
arrays, one row per request, in the order of their ranks. A step changes all rows at once. Python looks at one row only
when its request joins or leaves, needs a block, fills one, or ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from quire.cache.manager import BlockManager
from quire.engine.philox import uniforms
from quire.engine.plan import GENERATE, INVALID_TOKEN, DecodeStep, Plan
from quire.errors import BadValue, OutOfBlocks
from quire.request import CacheState, Request, SamplingParams

DRAWN_AHEAD = 16  # steps whose random numbers are computed together, which takes little more time than one step's
KEEP_ALL = 2**31 - 1  # a top_k that keeps every token
FAR = 2**40  # a length that no request has: its row has no random numbers yet


class DecodeRows:
    """The rows of all requests that merely decode.

    A scheduler calls `note` for a request that may have changed and `drop` for one that stopped running. `settle` then
    applies these changes.
    """

    def __init__(self, manager: BlockManager, longest: Callable[[Request], int]) -> None:
        """longest: the number of tokens at which a request ends."""
        self._manager = manager
        self._longest = longest
        self._make_empty()

    def _make_empty(self) -> None:
        self._is_changing = False  # True while rows change, and after that has raised
        self.requests: list[Request] = []  # replaced by `settle`, never changed: steps refer to it
        self.ids: list[str] = []
        self.special: list[int] = []  # rows whose sampling needs more than the numbers of their parameters
        self.draws = False  # whether any row has a temperature
        self._caches: list[CacheState] = []
        self._appends: list[Callable[[int], None]] = []
        self._row: dict[Request, int] = {}
        self._noted: dict[Request, None] = {}
        self._dropped: set[Request] = set()
        self.lengths = self._limits = self._rooms = self._dues = np.empty(0, np.int64)  # in tokens
        self.last_tokens = np.empty(0, np.int64)
        self.lora_slots = np.empty(0, np.int32)
        self.shifts = np.empty(0, np.int64)  # see `ImageTurns`
        self._endings = np.empty((0, 1), np.int64)  # the last column has INVALID_TOKEN in each row
        self._seeds = self._samples = np.empty(0, np.uint64)
        self.real = np.empty((0, 6), np.float32)  # see `sampling_numbers`
        self.whole = np.empty((0, 3), np.int64)
        self.tables = np.empty((len(self._manager.attention_groups), 0, 1), np.int32)  # [G, R, M or more]
        self._drawn = np.empty((DRAWN_AHEAD, 0))  # random numbers of the coming steps
        self._drawn_from = np.empty(0, np.int64)  # [R], the length that the first of them is for

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._row

    def _widen(self, width: int) -> None:
        """Make room for tables of that many blocks."""
        if width > self.tables.shape[2]:
            wider = np.zeros((*self.tables.shape[:2], max(8, width, 2 * self.tables.shape[2])), np.int32)
            wider[:, :, : self.tables.shape[2]] = self.tables
            self.tables = wider

    # ----------------------------------------------------------------------------------------------- membership

    def note(self, request: Request) -> None:
        """Make the next `settle` look at a request: it may merely decode now, or its row may have changed."""
        self._noted[request] = None

    def drop(self, request: Request) -> None:
        """Make the next `settle` remove the request's row, if it has one."""
        self._noted.pop(request, None)
        if request in self._row:
            self._dropped.add(request)

    def settle(self) -> None:
        """Apply the changes since the last call."""
        if self._is_changing:  # a change raised, as without memory: lists and arrays may not agree
            self._begin_again()
        before, self._is_changing = self.requests, True
        self._dropped.update(one for one in self._noted if one in self._row and not _merely_decodes(one))
        if self._dropped:
            self._reorder([row for row, request in enumerate(self.requests) if request not in self._dropped])
        if self._noted:
            noted = [request for request in self._noted if _merely_decodes(request)]
            for row in [self._row[request] for request in noted if request in self._row]:
                self._load_counts(row, self.requests[row])
                self._load_blocks(row)
            joining = [request for request in noted if request not in self._row]
            if joining:
                self._join(joining)
        if self.special:
            self._lift_bans()
        if self.requests is not before:
            self.special = self.whole[:, 2].nonzero()[0].tolist()  # a row that stays has the same parameters
            self.draws = bool(self.real[:, 0].any())
        self._dropped.clear()
        self._noted.clear()
        self._is_changing = False

    def _lift_bans(self) -> None:
        """Make the rows ordinary ones whose requests were special only until they had min_tokens."""
        early = self.whole[:, 2].nonzero()[0].tolist()
        lifted = [row for row in early if not _is_special(self.requests[row])]
        if lifted:
            self.whole[lifted, 2] = False
            self.requests = [*self.requests]  # a new list, so that the parameters of its rows are computed again

    def _begin_again(self) -> None:
        """Forget all rows, and note their requests."""
        noted = dict.fromkeys([*self.requests, *self._row, *self._noted])
        self._make_empty()
        self._noted = noted

    def _join(self, joining: list[Request]) -> None:
        """Add rows for these requests, where their ranks belong."""
        first = len(self.requests)
        self._set_requests([*self.requests, *joining])
        self._resize(len(self.requests))
        for row, request in enumerate(joining, first):
            self._load(row, request)
        self._drawn_from[first:] = FAR
        keys = [request.schedule.sort_key for request in self.requests]
        if any(a > b for a, b in zip(keys[max(0, first - 1) :], keys[max(1, first) :], strict=False)):
            self._reorder(sorted(range(len(keys)), key=keys.__getitem__))

    def _set_requests(self, requests: list[Request]) -> None:
        self.requests = requests
        self.ids = [request.id for request in requests]
        self._caches = [request.cache for request in requests]
        self._appends = [request.tokens.append for request in requests]
        self._row = {request: row for row, request in enumerate(requests)}

    def _resize(self, rows: int) -> None:
        """Append rows to all arrays."""
        for name in _ARRAYS:
            old = getattr(self, name)
            new = np.zeros((rows, *old.shape[1:]), old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
        tables = np.zeros((len(self.tables), rows, self.tables.shape[2]), np.int32)
        tables[:, : self.tables.shape[1]] = self.tables
        self.tables = tables
        drawn = np.zeros((DRAWN_AHEAD, rows))
        drawn[:, : self._drawn.shape[1]] = self._drawn
        self._drawn = drawn

    def _reorder(self, rows: list[int]) -> None:
        """Keep these rows, in this order. All arrays are new, since steps refer to the old ones."""
        self._set_requests([self.requests[row] for row in rows])
        index = np.array(rows, np.int64)
        for name in _ARRAYS:
            setattr(self, name, getattr(self, name)[index])
        self.tables, self._drawn = self.tables[:, index], self._drawn[:, index]

    def _load(self, row: int, request: Request) -> None:
        """Fill a new row."""
        self._limits[row] = self._longest(request)
        self._seeds[row], self._samples[row] = request.seed, request.sample_index
        self.lora_slots[row] = request.lora_slot
        turns = None if request.images is None else request.images.turns
        self.shifts[row] = 0 if turns is None else turns.shift
        endings = sorted(request.ending_tokens)
        if len(endings) >= self._endings.shape[1]:
            wider = np.full((len(self._endings), len(endings) + 1), INVALID_TOKEN, np.int64)
            wider[:, : self._endings.shape[1]] = self._endings
            self._endings = wider
        self._endings[row] = INVALID_TOKEN
        self._endings[row, : len(endings)] = endings
        self.real[row], self.whole[row] = sampling_numbers(request)
        self._load_counts(row, request)
        self._load_blocks(row)

    def _load_counts(self, row: int, request: Request) -> None:
        self.lengths[row], self.last_tokens[row] = len(request.tokens), request.tokens[-1]

    def _load_blocks(self, row: int) -> None:
        """Copy a request's block tables, and where they end, to its row."""
        request = self.requests[row]
        self._widen(max(map(len, request.cache.block_ids)))
        for g, tables in zip(self._manager.attention_groups, self.tables, strict=True):
            ids = request.cache.block_ids[g]
            tables[row, : len(ids)] = np.frombuffer(ids, np.int32) if ids else 0
        self._rooms[row] = request.cache.room
        self._dues[row] = self._manager.next_due(request)

    def audit(self, running: Iterable[Request]) -> None:
        """Apply all changes and compare the rows with the requests. Raises BadValue for a difference."""
        self.settle()
        if self.requests != [request for request in running if request in self._row]:
            raise BadValue(f"the decode rows {self.ids} do not run, or are in another order")
        for row, request in enumerate(self.requests):
            cache = request.cache
            found = int(self.lengths[row]), int(self.last_tokens[row]), int(self._rooms[row]), int(self._dues[row])
            right = len(request.tokens), request.tokens[-1], cache.room, self._manager.next_due(request)
            if found != right:
                raise BadValue(f"length, last token, room and due of request {request.id} are {right}, not {found}")
            for g, tables in zip(self._manager.attention_groups, self.tables, strict=True):
                first, ids = cache.num_freed[g], cache.block_ids[g]
                if tables[row, first : len(ids)].tolist() != ids[first:].tolist():
                    raise BadValue(f"the block table of request {request.id} in group {g} differs in its row")

    def look_later(self, request: Request) -> None:
        """Set when the block manager has to look at a request again, unless it has ended."""
        row = self._row.get(request)
        if row is not None and request.cache.block_ids:
            self._dues[row] = self._manager.next_due(request)

    # --------------------------------------------------------------------------------------------------- a step

    def short(self, num_ahead: int, going: NDArray[np.bool_] | None = None) -> list[int]:
        """Return those of these rows, None: all, that need a block for their next token. num_ahead: see `grow`."""
        short = self.lengths + num_ahead > self._rooms
        found: list[int] = (short if going is None else short & going).nonzero()[0].tolist()
        return found

    def most_taken(self, short: list[int], num_ahead: int) -> int:
        """Return the most blocks of each group that these rows take for their next token. num_ahead: see `grow`."""
        requests = [self.requests[row] for row in short]
        return sum(self._manager.most_taken(request, len(request.tokens) + num_ahead) for request in requests)

    def grow(
        self, short: list[int], num_ahead: int, plan: Plan, going: NDArray[np.bool_] | None = None
    ) -> DecodeStep | None:
        """Give the rows `short` the blocks that they need. Return the step of the rows that are `going`, None: all.

        num_ahead: 1 if another step is drawing the tokens before it. There are enough free blocks. If an allocation
        raises, the request is added to `plan.failed` and is not part of the step. Return None if no row is left.
        """
        requests = [self.requests[row] for row in short]
        # First, since an exception after an allocation would lose blocks that must be copied.
        self._widen(1 + max((len(ids) for one in requests for ids in one.cache.block_ids), default=0))
        self._is_changing = True
        if short and self._grow_each(requests):
            self._add_block(short)
            short = []
        for row in short:
            request = self.requests[row]
            try:
                if not self._manager.grow(request, len(request.tokens) + num_ahead, plan.copies):
                    raise OutOfBlocks(f"request {request.id} was planned with too few free blocks")
            except Exception as error:
                plan.failed.append((request, error))
                going = np.ones(len(self), np.bool_) if going is None else going
                going[row] = False
            else:
                self._load_blocks(row)
        self._is_changing = False
        return self._step(num_ahead, going) if going is None or going.any() else None

    def _grow_each(self, requests: list[Request]) -> bool:
        """Give each of these requests one more block, if that is all they need and it does not fail."""
        try:
            return self._manager.can_grow_each(requests) and self._manager.grow_each(requests)
        except Exception:  # nothing was allocated; one by one, only those that fail end
            return False

    def _add_block(self, rows: list[int]) -> None:
        """Copy the last block of these rows' tables, which they just got."""
        for g, tables in zip(self._manager.attention_groups, self.tables, strict=True):
            owned = [self.requests[row].cache.block_ids[g] for row in rows]
            tables[rows, [len(ids) - 1 for ids in owned]] = [ids[-1] for ids in owned]
        self._rooms[rows] = [self.requests[row].cache.room for row in rows]

    def going(self) -> NDArray[np.bool_]:
        """Return which rows do not end with the token that is being drawn: bool [R]."""
        return self.lengths + 1 < self._limits

    def _step(self, num_ahead: int, going: NDArray[np.bool_] | None = None) -> DecodeStep:
        """Return a step of these rows, None: all."""
        starts = self.lengths + (num_ahead - 1)
        if going is None:
            return DecodeStep(
                self.requests,
                self.ids,
                self._caches,
                self._appends,
                starts,
                self._limits,
                self._dues.copy(),
                self._endings,
                None,
                num_ahead > 0,
            )
        index = np.flatnonzero(going)
        rows = index.tolist()
        return DecodeStep(
            [self.requests[row] for row in rows],
            [self.ids[row] for row in rows],
            [self._caches[row] for row in rows],
            [self._appends[row] for row in rows],
            starts[index],
            self._limits[index],
            self._dues[index],
            self._endings[index],
            index,
            num_ahead > 0,
        )

    def committed(self, step: DecodeStep, tokens: NDArray[np.int64]) -> None:
        """Record that each request of a step has its token."""
        if step.requests is self.requests:
            np.add(step.starts, 2, out=self.lengths)
            self.last_tokens[:] = tokens
            return
        pairs = [(row, at) for at, one in enumerate(step.requests) if (row := self._row.get(one)) is not None]
        if pairs:
            rows, places = np.array(pairs).T
            self.lengths[rows], self.last_tokens[rows] = step.starts[places] + 2, tokens[places]

    def uniforms(self, num_ahead: int) -> NDArray[np.float64]:
        """Return a random number for each row's next token, [R]. num_ahead: see `grow`."""
        lengths = self.lengths + num_ahead
        at = lengths - self._drawn_from
        every = np.arange(len(at))
        if len(at) and at.view(np.uint64).max() >= DRAWN_AHEAD:  # as a negative one is, too
            self._draw(lengths, every if at.max() >= DRAWN_AHEAD else np.flatnonzero(at < 0))  # else only new rows
            at = lengths - self._drawn_from
        drawn: NDArray[np.float64] = self._drawn[at, every]
        return drawn

    def _draw(self, lengths: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Compute the random numbers of these rows for the next steps."""
        self._drawn_from[rows] = lengths[rows]
        positions = (lengths[rows] + np.arange(DRAWN_AHEAD)[:, None]).astype(np.uint64)
        seeds, samples = (np.broadcast_to(x[rows], positions.shape).ravel() for x in (self._seeds, self._samples))
        self._drawn[:, rows] = uniforms(seeds, positions.ravel(), samples).reshape(positions.shape)


_ARRAYS = (
    "lengths",
    "_limits",
    "_rooms",
    "_dues",
    "last_tokens",
    "lora_slots",
    "shifts",
    "_endings",
    "_seeds",
    "_samples",
    "real",
    "whole",
    "_drawn_from",
)


def _merely_decodes(request: Request) -> bool:
    """Return whether a request gets one token in each step, which the sampler draws from its own row alone."""
    return (
        request.num_missing == 1
        and request.num_generated > 0
        and request.finish_reason is None
        and bool(request.cache.block_ids)
        and request.guide is None
        and not request.driven
        and not request.to_check
        and request.task is GENERATE
        and isinstance(request.tokens, array)
    )


def sampling_numbers(request: Request) -> tuple[tuple[float, ...], tuple[int, int, bool]]:
    """Return the numbers of a request's row.

    The first are temperature, top_p, min_p and the penalties; the others are top_k, the number of logprobs (-1: none),
    and whether the row needs more than these numbers.
    """
    p: SamplingParams = request.sampling
    return (
        (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty),
        (
            p.top_k if p.top_k > 0 else KEEP_ALL,
            -1 if p.logprobs is None else p.logprobs,
            _is_special(request),
        ),
    )


def _is_special(request: Request) -> bool:
    """Return whether the sampler needs more for the request's next tokens than the numbers of its parameters."""
    return (
        request.num_generated < request.sampling.min_tokens
        or request.sampling.has_penalty
        or any(one is not None for one in (request.constraints, request.guide, request.schedule.allowed))
    )
