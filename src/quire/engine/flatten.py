"""Convert a plan to a Batch, laid out in buffers that are reused by every step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import numpy as np
import torch
from numpy.typing import NDArray

from quire.cache.groups import AnyGroup, CacheGroup, RowGroup, StateGroup
from quire.cache.manager import Move
from quire.cache.pool import NONE
from quire.engine.constraints import banned_now
from quire.engine.philox import uniforms
from quire.engine.plan import GENERATE, Plan, PlanItem
from quire.models.batch import (
    Batch,
    DrawnRows,
    EmbedRows,
    GroupMoves,
    GroupTables,
    Masks,
    Pairs,
    PromptRows,
    RecurrentTables,
    SamplingRows,
)
from quire.request import Request, SamplingParams

KEEP_ALL = 2**31 - 1  # a top_k that keeps every token


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
        self.parameters: Parameters | None = None  # of the last step's rows


def flatten(plan: Plan, buffers: Buffers) -> Batch:
    """Lay out the plan's items one after the other."""
    items, num_seqs = plan.items, len(plan.items)
    flat = array("i")
    unknown: list[tuple[int, str]] = []
    # Request, row to draw from, and the number of tokens up to that row that the request does not have yet.
    drawn: list[tuple[Request, int, int]] = []
    for request, start, num_new, drafts in items:
        ahead = start + num_new - len(request.tokens)
        if ahead > 0:
            flat += request.tokens[start:]
            unknown.append((len(flat), request.id))
            flat.append(0)
        else:
            flat += request.tokens[start : start + num_new]
        if ahead >= 0 and request.task is GENERATE:
            drawn += [(request, len(flat) - 1 + i, ahead + i) for i in range(len(drafts) + 1)]
        flat.extend(drafts)
    t = len(flat)
    computed = np.array([item.start for item in items], np.int64)
    num_rows = np.array([num_new + len(drafts) for _, _, num_new, drafts in items], np.int64)
    starts = buffers.query_starts[: num_seqs + 1]
    np.cumsum(num_rows, out=starts[1:])
    np.add(computed, num_rows, out=buffers.context_lens[:num_seqs], casting="same_kind")
    sequence = np.repeat(np.arange(num_seqs), num_rows)
    adapters = np.array([item.request.lora_slot for item in items], np.int32)
    buffers.token_ids[:t] = np.frombuffer(flat, np.int32)
    position = buffers.positions[:t]
    np.add((computed - starts[:-1])[sequence], np.arange(t), out=position)
    known: list[int] = []  # rows with K and V in the cache: shared blocks are never written
    for s, (request, start, num_new, _) in enumerate(items):
        if start < request.cache.num_cached:
            first = int(starts[s])
            known += range(first, first + min(request.cache.num_cached - start, num_new))
    own = [[item.request.cache.block_ids[g] for item in items] for g in buffers.attention]
    widest = max((len(ids) for of_group in own for ids in of_group), default=0)
    for of_group, tables, slots in zip(own, buffers.block_tables, buffers.slots, strict=True):
        rows = b"".join([ids.tobytes().ljust(4 * widest, b"\0") for ids in of_group])
        tables[:num_seqs, :widest] = np.frombuffer(rows, np.int32).reshape(num_seqs, widest)
        block = tables[sequence, position // buffers.block_size]
        slots[:t] = block.astype(np.int64) * buffers.block_size + position % buffers.block_size
        slots[known] = -1
    embedded: list[tuple[str, int]] = []
    if len(drawn) < t:  # else every row draws
        embedded = [
            (item.request.id, end - 1) for item, end in zip(items, starts[1:].tolist(), strict=True) if item.embeds
        ]
    drawing = [request for request, _, _ in drawn]
    buffers.parameters = parameters_of(drawing, buffers.parameters)
    return Batch(
        token_ids=torch.from_numpy(buffers.token_ids[:t]),
        positions=torch.from_numpy(buffers.positions[:t]),
        query_starts=torch.from_numpy(starts),
        context_lens=torch.from_numpy(buffers.context_lens[:num_seqs]),
        moves=tuple(
            GroupMoves(
                swap_out=_pairs(plan.swap_out, g),
                swap_in=_pairs(plan.swap_in, g),
                copies=_in_turns([move for move in plan.copies if move.group == g]),
            )
            for g in range(len(buffers.groups))
        ),
        groups=tuple(
            GroupTables(torch.from_numpy(slots[:t]), torch.from_numpy(tables[:num_seqs, :widest]))
            for slots, tables in zip(buffers.slots, buffers.block_tables, strict=True)
        ),
        recurrent=recurrent_tables(items, buffers.groups),
        drawn=DrawnRows(torch.tensor([row for row, _ in unknown], dtype=torch.int64), [name for _, name in unknown]),
        logit_rows=torch.tensor([row for _, row, _ in drawn], dtype=torch.int64),
        logit_ids=[request.id for request in drawing],
        sampling=sampling_rows(drawing, [ahead for _, _, ahead in drawn], buffers.parameters),
        prompt=prompt_rows(items, starts),
        embed=EmbedRows(torch.tensor([row for _, row in embedded], dtype=torch.int64), [name for name, _ in embedded]),
        lora_slots=torch.from_numpy(adapters[sequence]) if (adapters >= 0).any() else None,
    )


def recurrent_tables(items: Sequence[PlanItem], groups: Sequence[AnyGroup]) -> tuple[RecurrentTables, ...]:
    """Return the tables of the states and rows that a step reads and writes."""
    found = []
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


@dataclass(frozen=True)
class Parameters:
    """Sampling parameters of a step's rows, as tensors. Steps whose rows belong to the same requests share them."""

    params: list[SamplingParams]
    real: tuple[torch.Tensor, ...]  # fp32 [R]: temperature, top_p, min_p, and the penalties
    whole: tuple[torch.Tensor, ...]  # int64 [R]: top_k and num_logprobs
    draws: bool  # any row is not greedy
    has_penalty: bool  # any row has one
    min_tokens: int  # the highest of all rows


def parameters_of(requests: list[Request], known: Parameters | None = None) -> Parameters:
    """Return the parameters of these requests' rows: `known` itself if it has the same."""
    params = [request.sampling for request in requests]
    # Compared by identity, because arrays among their fields cannot be compared.
    if known is not None and len(params) == len(known.params) and all(map(is_, params, known.params)):
        return known
    real = [
        (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params
    ]
    whole = [(p.top_k if p.top_k > 0 else KEEP_ALL, -1 if p.logprobs is None else p.logprobs) for p in params]
    return Parameters(
        params,
        torch.tensor(real, dtype=torch.float32).reshape(-1, 6).T.contiguous().unbind(),
        torch.tensor(whole, dtype=torch.int64).reshape(-1, 2).T.contiguous().unbind(),
        any(p.temperature for p in params),
        any(p.has_penalty for p in params),
        max((p.min_tokens for p in params), default=0),
    )


def sampling_rows(
    requests: list[Request], ahead: Sequence[int] | None = None, parameters: Parameters | None = None
) -> SamplingRows:
    """Return the inputs for drawing each request's next token, or the one `ahead` tokens after that."""
    ahead = ahead or [0] * len(requests)
    parameters = parameters or parameters_of(requests)
    temperature, top_p, min_p, repetition, presence, frequency = parameters.real
    top_k, num_logprobs = parameters.whole
    penalties = []
    if parameters.has_penalty:
        penalties = [_penalised(row, request) for row, request in enumerate(requests) if request.sampling.has_penalty]
    constrained = [(row, of) for row, request in enumerate(requests) if (of := request.constraints) is not None]
    biases = [(row, of) for row, of in constrained if len(of.bias)]
    banned: list[tuple[int, int]] = []
    if constrained or parameters.min_tokens:
        banned = [(row, token) for row, one in enumerate(requests) for token in banned_now(one, ahead[row])]
    banned_rows, banned_tokens = torch.tensor(banned, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    return SamplingRows(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        uniforms=_uniforms(requests, ahead) if parameters.draws else torch.zeros(len(requests), dtype=torch.float64),
        num_logprobs=num_logprobs,
        penalty_rows=_concatenated([rows for rows, _, _ in penalties], torch.int64),
        penalty_tokens=_concatenated([tokens for _, tokens, _ in penalties], torch.int64),
        penalty_counts=_concatenated([counts for _, _, counts in penalties], torch.float32),
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        bias_rows=_concatenated([np.full(len(of.bias), row) for row, of in biases], torch.int64),
        bias_tokens=_concatenated([of.bias_tokens for _, of in biases], torch.int64),
        bias=_concatenated([of.bias for _, of in biases], torch.float32),
        banned_rows=banned_rows,
        banned_tokens=banned_tokens,
        masks=_masks(requests),
    )


def _uniforms(requests: list[Request], ahead: Sequence[int]) -> torch.Tensor:
    """Return a random number for each row, fp64 [R]."""
    return torch.from_numpy(
        uniforms(
            np.array([request.seed for request in requests], np.uint64),
            np.array([len(request.tokens) + n for request, n in zip(requests, ahead, strict=True)], np.uint64),
            np.array([request.sample_index for request in requests], np.uint64),
        )
    )


def _allowed(request: Request) -> NDArray[np.int32] | None:
    """Return the mask of tokens that both its guide and its constraints allow, one bit per token. None: all."""
    guided = request.schedule.allowed
    own = None if request.constraints is None else request.constraints.allowed
    if own is None or guided is None:
        return guided if own is None else own
    size = min(len(own), len(guided))
    return own[:size] & guided[:size]


def _masks(requests: list[Request]) -> Masks | None:
    said = [row for row, one in enumerate(requests) if one.schedule.allowed is not None or one.constraints is not None]
    allowed = {row: mask for row in said if (mask := _allowed(requests[row])) is not None}
    if not allowed:
        return None
    widest = max(mask.nbytes for mask in allowed.values())
    found = bytearray().join([mask.tobytes().ljust(widest, b"\0") for mask in allowed.values()])
    masks = torch.frombuffer(found, dtype=torch.uint8).view(-1, widest)
    return Masks(torch.tensor(list(allowed), dtype=torch.int64), masks)


def _penalised(row: int, request: Request) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Return the row's number, its distinct tokens, and the number of times that each was generated."""
    tokens, inverse = np.unique(np.frombuffer(request.tokens, np.int32), return_inverse=True)
    counts = np.bincount(inverse[request.num_prompt :], minlength=len(tokens))
    return np.full(len(tokens), row, np.int64), tokens, counts


def _concatenated(parts: list[NDArray[np.generic]], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.empty(0, dtype=dtype)


def prompt_rows(items: list[PlanItem], starts: NDArray[np.int32]) -> PromptRows:
    """Return the rows of this step whose next token belongs to a prompt and has to be reported."""
    rows: list[int] = []
    tokens: list[int] = []
    num_logprobs: list[int] = []
    request_ids: list[str] = []
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
                num_logprobs.append(wanted)
                request_ids.append(request.id)
    return PromptRows(
        rows=torch.tensor(rows, dtype=torch.int64),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        num_logprobs=torch.tensor(num_logprobs, dtype=torch.int64),
        request_ids=request_ids,
    )
