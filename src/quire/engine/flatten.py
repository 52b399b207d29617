"""Convert a plan to a Batch, laid out in buffers that are reused by every step."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from quire.cache.groups import AnyGroup, CacheGroup, RowGroup, StateGroup, has_states
from quire.cache.manager import Move
from quire.cache.pool import NONE
from quire.cache.scores import MOST_TOP
from quire.engine.constraints import banned_now
from quire.engine.decode_rows import DecodeRows
from quire.engine.philox import uniforms
from quire.engine.plan import GENERATE, DecodeStep, Plan, PlanItem
from quire.engine.sampling_parameters import Parameters, parameters_of
from quire.engine.tally import Tally
from quire.models.batch import (
    Batch,
    DrawnRows,
    EmbedRows,
    GivenRows,
    GroupMoves,
    GroupTables,
    Masks,
    Pairs,
    PromptRows,
    RecurrentTables,
    SamplingRows,
)
from quire.request import Request

Tallies: TypeAlias = WeakKeyDictionary[Request, Tally]

_NO_INTEGERS = torch.empty(0, dtype=torch.int64)
_NO_NUMBERS = torch.empty(0, dtype=torch.float32)
_NO_PROMPTS = PromptRows(_NO_INTEGERS, _NO_INTEGERS, _NO_INTEGERS, [])
_NOTHING_SPECIAL: dict[str, Any] = {
    "penalty_rows": _NO_INTEGERS,
    "penalty_tokens": _NO_INTEGERS,
    "penalty_counts": _NO_NUMBERS,
    "bias_rows": _NO_INTEGERS,
    "bias_tokens": _NO_INTEGERS,
    "bias": _NO_NUMBERS,
    "banned_rows": _NO_INTEGERS,
    "banned_tokens": _NO_INTEGERS,
}


class Drafted(NamedTuple):
    """The draft tokens before a row that draws."""

    tokens: Sequence[int]
    allowed: NDArray[np.int32] | None  # if the request has a guide: the tokens that it allows after them


_NOT_DRAFTED = Drafted((), None)


class Buffers:
    """Host memory for the largest step. The tensors of a Batch are views of it."""

    def __init__(
        self, groups: Sequence[AnyGroup], block_size: int, max_tokens: int, max_seqs: int, max_blocks: int
    ) -> None:
        self.block_size = block_size
        self.groups = tuple(groups)
        self.attention = [g for g, group in enumerate(groups) if isinstance(group, CacheGroup)]
        num_groups = len(self.attention)
        self.token_ids = np.zeros(max_tokens, np.int64)
        self.positions = np.zeros(max_tokens, np.int64)
        self.query_starts = np.zeros(max_seqs + 1, np.int32)
        self.context_lens = np.zeros(max_seqs, np.int32)
        self.slots = np.zeros((num_groups, max_tokens), np.int64)
        self.block_tables = np.zeros((num_groups, max_seqs, max_blocks), np.int32)
        self.one_each = np.arange(max_seqs + 1, dtype=np.int32)  # query_starts if each sequence has one row
        self.uniforms = np.zeros(max_seqs)
        self.tallies: Tallies = WeakKeyDictionary()
        self.forget_requests()

    def forget_requests(self) -> None:
        """Drop the references to the requests of the last steps."""
        self.parameters: Parameters | None = None  # of the last step's rows, except decode rows
        self.decode: Batch | None = None  # of the last step that only decoded; its tensors are views of these buffers
        self.decoding: Sequence[Request] = ()  # its requests: the same list as long as no request joins or leaves
        self.decode_of = False, 0  # whether it was planned ahead, and the columns of its tables
        self.decode_parameters = parameters_of(())  # its sampling parameters


def flatten(plan: Plan, buffers: Buffers, rows: DecodeRows | None = None) -> Batch:
    """Lay out the plan's requests one after the other, first those of its decode step, whose rows are `rows`."""
    step = plan.decode
    if rows is None or step is None:
        return _laid_out(plan, None, plan.items, buffers)
    if plan.rest or plan.moves or step.rows is not None:
        return _laid_out(plan, _decoding(step, rows), plan.rest, buffers)
    return _next_decode(plan, step, rows, buffers)


def _next_decode(plan: Plan, step: DecodeStep, rows: DecodeRows, buffers: Buffers) -> Batch:
    """Return the batch of a step that only decodes. If the rows are those of the step before, only numbers change."""
    count, size = len(rows), buffers.block_size
    widest = int(step.starts.max()) // size + 1
    batch = buffers.decode
    if batch is None or buffers.decoding is not step.requests or buffers.decode_of != (step.is_ahead, widest):
        decoding = _decoding(step, rows)
        batch = buffers.decode = _laid_out(plan, decoding, (), buffers)
        buffers.decode_of, buffers.decode_parameters = (step.is_ahead, widest), decoding.parameters
        buffers.decoding = step.requests
        return batch
    buffers.token_ids[:count] = 0 if step.is_ahead else rows.last_tokens
    buffers.positions[:count] = step.starts
    if batch.turns is not None:
        batch = replace(batch, turns=torch.from_numpy(step.starts - rows.shifts))
    np.add(step.starts, 1, out=buffers.context_lens[:count], casting="same_kind")
    at, offset = np.divmod(step.starts, size)
    every = buffers.one_each[:count]
    for own, tables, slots in zip(rows.tables, buffers.block_tables, buffers.slots, strict=True):
        tables[:count, :widest] = own[:, :widest]
        np.multiply(own[every, at], size, out=slots[:count], casting="same_kind")
        slots[:count] += offset
    if rows.draws:
        buffers.uniforms[:count] = rows.uniforms(int(step.is_ahead))
    if rows.special:
        aheads = [int(step.is_ahead)] * count
        rest = (buffers.uniforms[:count], buffers.tallies)
        batch = replace(batch, sampling=_sampling_rows(buffers.decode_parameters, aheads, *rest))
    return replace(batch, recurrent=recurrent_tables(plan, buffers.groups)) if batch.recurrent else batch


@dataclass(frozen=True)
class _Decoding:
    """The sequences that merely decode: one row each, which draws a token."""

    step: DecodeStep
    last_tokens: NDArray[np.int64]  # [R]
    tables: NDArray[np.int32]  # [G, R, M]
    lora_slots: NDArray[np.int32]  # [R]
    shifts: NDArray[np.int64]  # [R]
    parameters: Parameters
    uniforms: NDArray[np.float64]  # [R]


def _decoding(step: DecodeStep, rows: DecodeRows) -> _Decoding:
    at = slice(None) if step.rows is None else step.rows
    parameters = Parameters.of_arrays(step.requests, rows.real[at], rows.whole[at])
    uniforms = rows.uniforms(int(step.is_ahead)) if parameters.draws else np.zeros(len(rows))
    return _Decoding(
        step, rows.last_tokens[at], rows.tables[:, at], rows.lora_slots[at], rows.shifts[at], parameters, uniforms[at]
    )


def _laid_out(plan: Plan, decoding: _Decoding | None, items: Sequence[PlanItem], buffers: Buffers) -> Batch:
    flat = array("i")
    unknown: list[tuple[int, str]] = []
    # Request, row to draw from, and the number of tokens up to that row that the request does not have yet.
    drawn: list[tuple[Request, int, int]] = []
    drafted: dict[int, Drafted] = {}  # by index in `drawn`
    num_decoding = 0 if decoding is None else len(decoding.last_tokens)
    for request, start, num_new, drafts, masks in items:
        ahead = start + num_new - len(request.tokens)
        if ahead > 0:
            flat += request.tokens[start:]
            unknown.append((num_decoding + len(flat), request.id))
            flat.append(0)
        else:
            flat += request.tokens[start : start + num_new]
        if ahead >= 0 and request.task is GENERATE:
            row = num_decoding + len(flat) - 1
            if drafts:
                each = zip_longest(range(1, len(drafts) + 1), masks)
                drafted |= {len(drawn) + i: Drafted(drafts[:i], mask) for i, mask in each}
            drawn += [(request, row + i, ahead + i) for i in range(len(drafts) + 1)]
        flat.extend(drafts)
    s, t = num_decoding + len(items), num_decoding + len(flat)
    token_ids, position = buffers.token_ids[:t], buffers.positions[:t]
    if items or decoding is None:
        computed = np.array([item.start for item in items], np.int64)
        num_rows = np.array([num_new + len(drafts) for _, _, num_new, drafts, _ in items], np.int64)
        if decoding is not None:
            computed = np.concatenate([decoding.step.starts, computed])
            num_rows = np.concatenate([np.ones(num_decoding, np.int64), num_rows])
        starts = buffers.query_starts[: s + 1]
        np.cumsum(num_rows, out=starts[1:])
        np.add(computed, num_rows, out=buffers.context_lens[:s], casting="same_kind")
        sequence = np.repeat(np.arange(s), num_rows)
        np.add((computed - starts[:-1])[sequence], np.arange(t), out=position)
    else:
        starts, sequence = buffers.one_each[: s + 1], np.arange(s)
        position[:] = decoding.step.starts
        np.add(position, 1, out=buffers.context_lens[:s], casting="same_kind")
    if decoding is not None:
        token_ids[:num_decoding] = 0 if decoding.step.is_ahead else decoding.last_tokens
    token_ids[num_decoding:] = np.frombuffer(flat, np.int32)
    given = _given_rows(items, starts[num_decoding:])
    if given is not None:
        np.maximum(token_ids, 0, out=token_ids)
    known: list[int] = []  # rows with K and V in the cache: shared blocks are never written
    for first, (request, start, num_new, *_) in zip(starts[num_decoding:-1].tolist(), items, strict=True):
        if start < request.cache.num_cached:
            known += range(first, first + min(request.cache.num_cached - start, num_new))
    own = [[item.request.cache.block_ids[g] for item in items] for g in buffers.attention]
    widest = max((len(ids) for of_group in own for ids in of_group), default=0)
    if decoding is not None:
        widest = max(widest, int(position[:num_decoding].max(initial=-1)) // buffers.block_size + 1)
    at, offset = np.divmod(position, buffers.block_size)
    for g, (of_group, tables, slots) in enumerate(zip(own, buffers.block_tables, buffers.slots, strict=True)):
        if decoding is not None:
            held = decoding.tables[g, :, :widest]
            tables[:num_decoding, : held.shape[1]] = held
        if of_group:
            rows = b"".join([ids.tobytes().ljust(4 * widest, b"\0") for ids in of_group])
            tables[num_decoding:s, :widest] = np.frombuffer(rows, np.int32).reshape(len(of_group), widest)
        np.multiply(tables[sequence, at], buffers.block_size, out=slots[:t], casting="same_kind")
        slots[:t] += offset
        slots[known] = -1
    embedded = [
        (item.request.id, _pooled_rows(item, end))
        for item, end in zip(items, starts[num_decoding + 1 :].tolist(), strict=True)
        if item.embeds
    ]
    windows = [buffers.groups[g].window for g in buffers.attention]
    key_ends = _key_ends(items, starts[num_decoding:], position, windows)
    unknown_rows, unknown_ids = _columns(unknown)
    logit_rows, drawing = [row for _, row, _ in drawn], [request for request, _, _ in drawn]
    aheads = [ahead for _, _, ahead in drawn]
    logit_ids = [request.id for request in drawing]
    buffers.parameters = parameters = parameters_of(drawing, buffers.parameters)
    random = _uniforms(drawing, aheads) if parameters.draws else np.zeros(len(drawing))
    if decoding is not None:
        step = decoding.step
        logit_rows, logit_ids = [*range(num_decoding), *logit_rows], [*step.ids, *logit_ids]
        parameters = decoding.parameters.followed_by(parameters)
        buffers.uniforms[:num_decoding] = decoding.uniforms
        random = np.concatenate([decoding.uniforms, random]) if items else buffers.uniforms[:num_decoding]
        aheads = [int(step.is_ahead)] * num_decoding + aheads
        drafted = {num_decoding + row: drafts for row, drafts in drafted.items()}
        if step.is_ahead:
            unknown_rows, unknown_ids = [*range(num_decoding), *unknown_rows], [*step.ids, *unknown_ids]
    adapters = np.array([item.request.lora_slot for item in items], np.int32)
    if decoding is not None:
        adapters = np.concatenate([decoding.lora_slots, adapters])
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(position),
        query_starts=torch.from_numpy(starts),
        context_lens=torch.from_numpy(buffers.context_lens[:s]),
        moves=tuple(
            GroupMoves(
                swap_out=_pairs(plan.swap_out, g),
                swap_in=_pairs(plan.swap_in, g),
                copies=_in_turns([move for move in plan.copies if move.group == g]),
            )
            for g in range(len(buffers.groups))
        ),
        groups=tuple(
            GroupTables(torch.from_numpy(slots[:t]), torch.from_numpy(tables[:s, :widest]), ends)
            for slots, tables, ends in zip(buffers.slots, buffers.block_tables, key_ends, strict=True)
        ),
        recurrent=recurrent_tables(plan, buffers.groups),
        drawn=DrawnRows(_integers(unknown_rows), unknown_ids),
        logit_rows=_integers(logit_rows),
        logit_ids=logit_ids,
        sampling=_sampling_rows(parameters, aheads, random, buffers.tallies, drafted),
        prompt=prompt_rows(items, starts[num_decoding:]),
        embed=EmbedRows(
            _integers([row for _, rows in embedded for row in rows]),
            [name for name, _ in embedded],
            [len(rows) for _, rows in embedded],
        ),
        lora_slots=torch.from_numpy(adapters[sequence]) if (adapters >= 0).any() else None,
        num_decoding=num_decoding,
        given=given,
        turns=_turns(decoding, items, starts, position),
    )


def _given_rows(items: Sequence[PlanItem], starts: NDArray[np.int32]) -> GivenRows | None:
    """Return the rows of images. starts: [S+1], the first row of each item."""
    rows, values, axes = [], [], []
    for item, start in zip(items, starts.tolist(), strict=False):
        if (images := item.request.images) is not None:
            first, end = np.searchsorted(images.positions, [item.start, item.start + item.num_new])
            if first < end:
                rows.append(images.positions[first:end] + (start - item.start))
                values.append(images.values[first:end])
                if images.turns is not None:
                    axes.append(images.turns.of_images[first:end])
    if not rows:
        return None
    positions = torch.from_numpy(np.concatenate(axes)) if axes else None
    return GivenRows(torch.from_numpy(np.concatenate(rows)), torch.cat(values), positions)


def _key_ends(
    items: Sequence[PlanItem],
    starts: NDArray[np.int32],  # [S+1], the first row of each item
    positions: NDArray[np.int64],  # [T]
    windows: Sequence[int | None],
) -> list[torch.Tensor | None]:
    """Return the keys before which each row attends in the groups with these windows: None, those up to its own."""
    ends, only_windowed = None, False
    for item, start in zip(items, starts.tolist(), strict=False):
        if item.request.images is None:
            continue
        only_windowed |= item.request.images.only_windowed
        for first, stop in item.request.images.runs:
            if item.start <= first and stop <= item.start + item.num_new:
                ends = positions.astype(np.int32) + 1 if ends is None else ends
                ends[start + first - item.start : start + stop - item.start] = stop
    found = None if ends is None else torch.from_numpy(ends)
    return [None if only_windowed and window is None else found for window in windows]


def _turns(
    decoding: _Decoding | None,
    items: Sequence[PlanItem],
    starts: NDArray[np.int32],  # [S+1]
    positions: NDArray[np.int64],  # [T]
) -> torch.Tensor | None:
    """Return the positions by which rows are rotated if that of any row differs from its position."""
    turned = [(item, item.request.images.turns) for item in items if item.request.images is not None]
    shifts = np.zeros(0, np.int64) if decoding is None else decoding.shifts
    if not shifts.any() and all(turns is None for _, turns in turned):
        return None
    turns = positions.copy()
    turns[: len(shifts)] -= shifts
    for item, (start, end) in zip(items, pairwise(starts[len(shifts) :].tolist()), strict=True):
        images = item.request.images
        if images is not None and images.turns is not None:
            known = images.turns.of_tokens[item.start : item.start + end - start]
            turns[start:end] -= images.turns.shift
            turns[start : start + len(known)] = known
    return torch.from_numpy(turns)


def _pooled_rows(item: PlanItem, end: int) -> range:
    """Return the rows that make a text's vector, of those that end before `end`."""
    match item.request.pooled:
        case "all":
            return range(end - item.num_new, end)
        case "first":
            return range(end - item.num_new, end - item.num_new + 1)
        case "last":
            return range(end - 1, end)


def _columns(pairs: list[tuple[int, str]]) -> tuple[list[int], list[str]]:
    return [row for row, _ in pairs], [name for _, name in pairs]


def _integers(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64) if numbers else _NO_INTEGERS


def recurrent_tables(plan: Plan, groups: Sequence[AnyGroup]) -> tuple[RecurrentTables, ...]:
    """Return the tables of the states and rows that a step reads and writes."""
    found: list[RecurrentTables] = []
    if not has_states(groups):
        return ()
    items = plan.items
    for g, group in enumerate(groups):
        if isinstance(group, StateGroup):
            [r] = [r for r, other in enumerate(groups) if isinstance(other, RowGroup) and other.layers == group.layers]
            tables = [(item.request.cache.block_ids[g], item.request.cache.block_ids[r]) for item in items]
            first = [item.start // group.piece for item in items]
            last = [(item.start + item.num_rows) // group.piece for item in items]
            width = 1 + max((b - a for a, b in zip(first, last, strict=True)), default=0)
            # The state before a piece is the one at the end of the previous piece.
            states = [_cut(own, at - 1, width) for (own, _), at in zip(tables, first, strict=True)]
            rows = [_cut(own, at, width) for (_, own), at in zip(tables, first, strict=True)]
            found.append(RecurrentTables(*(torch.tensor(x, dtype=torch.int32).view(-1, width) for x in (states, rows))))
    return tuple(found)


def _cut(table: array[int], start: int, width: int) -> list[int]:
    """Return `width` entries from index `start` on, with NONE for missing ones."""
    there = table[max(0, start) : start + width].tolist()
    before = [NONE] * max(0, -start)
    return (before + there + [NONE] * width)[:width]


def _pairs(moves: list[Move], group: int) -> Pairs:
    own = [move for move in moves if move.group == group]
    return Pairs([move.src for move in own], [move.dst for move in own])


def _in_turns(moves: list[Move]) -> list[Pairs]:
    """Return the copies in order, split where one would write a source, or touch a destination, of an earlier one."""
    turns: list[Pairs] = []
    read: set[int] = set()
    written: set[int] = set()
    for move in moves:
        if not turns or move.dst in read or move.dst in written or move.src in written:
            turns.append(Pairs([], []))
            read, written = set(), set()
        turns[-1].src.append(move.src)
        turns[-1].dst.append(move.dst)
        read.add(move.src)
        written.add(move.dst)
    return turns


def sampling_rows(requests: Sequence[Request]) -> SamplingRows:
    """Return the inputs for drawing each request's next token."""
    at_once = [0] * len(requests)
    return _sampling_rows(parameters_of(requests), at_once, _uniforms(requests, at_once), WeakKeyDictionary())


def _sampling_rows(
    parameters: Parameters,
    ahead: Sequence[int],  # [R], tokens before the one that is drawn that its request does not have yet
    random: NDArray[np.float64],  # [R], random numbers
    tallies: Tallies,  # of requests with penalties; those that are missing are added
    drafted: Mapping[int, Drafted] = MappingProxyType({}),  # by row: the draft tokens before the one that is drawn
) -> SamplingRows:
    """Return the inputs for drawing tokens."""
    temperature, top_p, min_p, repetition, presence, frequency = parameters.real
    top_k, num_logprobs = parameters.whole
    dense: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "uniforms": torch.from_numpy(random),
        "num_logprobs": num_logprobs,
        "repetition": repetition,
        "presence": presence,
        "frequency": frequency,
        "draws": parameters.draws,
        "cuts": parameters.cuts,
        "reports": parameters.reports,
    }
    if not parameters.special:
        return SamplingRows(**dense, **_NOTHING_SPECIAL)
    special = [(row, parameters.requests[row], drafted.get(row, _NOT_DRAFTED)) for row in parameters.special]
    penalised = [row for row in special if row[1].sampling.has_penalty]
    penalties = [_tallied(request, tallies).numbers(drafts.tokens) for _, request, drafts in penalised]
    penalty_rows = np.repeat([row for row, *_ in penalised], [len(tokens) for tokens, _ in penalties])
    biases = [(row, of) for row, one, _ in special if (of := one.constraints) is not None and len(of.bias)]
    banned = [(row, token) for row, one, of in special for token in banned_now(one, ahead[row], of.tokens)]
    banned_rows, banned_tokens = torch.tensor(banned, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    return SamplingRows(
        **dense,
        penalty_rows=torch.from_numpy(penalty_rows).to(torch.int64),
        penalty_tokens=_concatenated([tokens for tokens, _ in penalties], torch.int64),
        penalty_counts=_concatenated([counts for _, counts in penalties], torch.float32),
        bias_rows=_concatenated([np.full(len(of.bias), row) for row, of in biases], torch.int64),
        bias_tokens=_concatenated([of.bias_tokens for _, of in biases], torch.int64),
        bias=_concatenated([of.bias for _, of in biases], torch.float32),
        banned_rows=banned_rows,
        banned_tokens=banned_tokens,
        masks=_masks(special),
    )


def _uniforms(requests: Sequence[Request], ahead: Sequence[int]) -> NDArray[np.float64]:
    """Return a random number for each row, [R]."""
    return uniforms(
        np.array([request.seed for request in requests], np.uint64),
        np.array([len(request.tokens) + n for request, n in zip(requests, ahead, strict=True)], np.uint64),
        np.array([request.sample_index for request in requests], np.uint64),
    )


def _allowed(request: Request, drafts: Drafted) -> NDArray[np.int32] | None:
    """Return the mask of tokens that both its guide and its constraints allow, one bit per token. None: all."""
    guided = drafts.allowed if drafts.tokens else request.schedule.allowed
    own = None if request.constraints is None else request.constraints.allowed
    if own is None or guided is None:
        return guided if own is None else own
    size = min(len(own), len(guided))
    return own[:size] & guided[:size]


def _masks(rows: Sequence[tuple[int, Request, Drafted]]) -> Masks | None:
    allowed = {row: mask for row, request, drafts in rows if (mask := _allowed(request, drafts)) is not None}
    if not allowed:
        return None
    widest = max(mask.nbytes for mask in allowed.values())
    found = bytearray().join([mask.tobytes().ljust(widest, b"\0") for mask in allowed.values()])
    masks = torch.frombuffer(found, dtype=torch.uint8).view(-1, widest)
    return Masks(torch.tensor(list(allowed), dtype=torch.int64), masks)


def _tallied(request: Request, tallies: Tallies) -> Tally:
    """Return the tally of the request's tokens, up to date."""
    tally = tallies.get(request)
    if tally is None or not tally.follows(request):
        tally = tallies[request] = Tally(request)
    return tally


def _concatenated(parts: list[NDArray[np.generic]], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.empty(0, dtype=dtype)


def prompt_rows(items: Sequence[PlanItem], starts: NDArray[np.int32]) -> PromptRows:
    """Return the rows of this step whose next token belongs to a prompt and has to be reported."""
    rows: list[int] = []
    tokens: list[int] = []
    num_logprobs: list[int] = []
    request_ids: list[str] = []
    if all(item.request.sampling.prompt_logprobs is None for item in items):
        return _NO_PROMPTS
    for s, item in enumerate(items):
        request, wanted = item.request, item.request.sampling.prompt_logprobs
        if wanted is not None:
            start = int(starts[s])
            # Positions already reported are not reported again when a preempted request is recomputed.
            first = max(item.start, request.next_prompt_logprob)
            last = min(item.start + item.num_new, request.num_prompt - 1)
            for position in range(first, last):
                rows.append(start + position - item.start)
                tokens.append(request.tokens[position + 1])
                num_logprobs.append(max(MOST_TOP, wanted))  # these are stored with the blocks
                request_ids.append(request.id)
    return PromptRows(
        rows=torch.tensor(rows, dtype=torch.int64),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        num_logprobs=torch.tensor(num_logprobs, dtype=torch.int64),
        request_ids=request_ids,
    )
