"""Checks of a step's metadata (tables, lengths, slots) on the host: once per step, in one vectorised pass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.errors import BadShape, BadValue
from quire.ops.checks.tensors import INT32_MAX, host_integers
from quire.ops.spec import AttentionSpec

MAX_CONTEXT = 2**31 - 1024  # tokens: kernels count keys in an int32, up to a tile beyond the last one


class Step(NamedTuple):
    """The arguments of `AttentionPlan.update`, on the host, or of `update_on_device`."""

    query_starts: torch.Tensor  # int32 [S+1]
    context_lens: torch.Tensor  # int32 [S]
    block_tables: torch.Tensor  # int32 [S, M]
    slots: torch.Tensor | None  # int64 [T]
    key_ends: torch.Tensor | None = None  # int32 [T]


def step_sizes(
    query_starts: torch.Tensor,  # int32 [S+1], host
    context_lens: torch.Tensor,  # int32 [S], host
    block_tables: torch.Tensor,  # int32 [S, M], host
) -> tuple[int, int, int]:
    """Return T, S and M of a step whose values are not checked yet. Raises BadShape, BadDtype or BadValue."""
    starts = host_integers("query_starts", query_starts, 1)
    lens = host_integers("context_lens", context_lens, 1)
    tables = host_integers("block_tables", block_tables, 2)
    num_tokens = max(0, int(starts[-1])) if len(starts) else 0
    # Checked before memory is allocated for that many tokens.
    if num_tokens > INT32_MAX:
        raise BadValue(f"query_starts[{len(starts) - 1}] is {num_tokens}; rows are numbered in an int32")
    for name, shape in (("context_lens", lens.shape), ("block_tables", tables.shape)):
        if max(shape) > INT32_MAX:
            raise BadShape(f"{name} has shape {shape}; sequences and their blocks are numbered in an int32")
    return num_tokens, len(lens), tables.shape[1]


def check_lengths(num_starts: int, num_seqs: int, num_tables: int) -> None:
    """Raise BadShape unless the tensors of a step are of the same number of sequences."""
    if num_starts != num_seqs + 1:
        raise BadShape(
            f"query_starts has {num_starts} entries and context_lens {num_seqs}; with S sequences they have S + 1 and S"
        )
    if num_tables != num_seqs:
        raise BadShape(f"block_tables has {num_tables} rows for {num_seqs} sequences; it needs one per sequence")


def check_metadata(
    spec: AttentionSpec,
    room: tuple[int, int, int],  # largest number of query tokens, sequences, and blocks per sequence
    step: Step,
) -> None:
    """Check a step's metadata against a plan's spec and room. Raises BadShape, BadDtype or BadValue."""
    max_tokens, max_seqs, max_blocks = room
    starts = host_integers("query_starts", step.query_starts, 1)
    lens = host_integers("context_lens", step.context_lens, 1)
    tables = host_integers("block_tables", step.block_tables, 2)
    num_seqs = len(lens)
    check_lengths(len(starts), num_seqs, len(tables))
    if num_seqs > max_seqs:
        raise BadShape(f"the step has {num_seqs} sequences; the plan was made for at most {max_seqs}")
    if tables.shape[1] > max_blocks:
        raise BadShape(f"block_tables has {tables.shape[1]} columns; the plan was made for at most {max_blocks}")
    num_tokens = check_query_starts(starts, max_tokens)
    _check_tables(spec, starts, lens, tables)
    if step.slots is not None:
        _check_slots(spec, host_integers("slots", step.slots, 1), num_tokens)
    if step.key_ends is not None:
        _check_key_ends(spec, host_integers("key_ends", step.key_ends, 1), starts, lens)


def check_query_starts(starts: NDArray[np.integer], max_tokens: int) -> int:
    """Return T. Raises BadValue unless the starts ascend from 0, BadShape if T is larger than max_tokens."""
    if starts[0] != 0:
        raise BadValue(f"query_starts[0] is {starts[0]}; the first sequence's rows start at 0")
    falls = np.flatnonzero(starts[1:] < starts[:-1])
    if falls.size:
        s = int(falls[0])
        raise BadValue(f"query_starts falls from {starts[s]} to {starts[s + 1]} at sequence {s}; it must never fall")
    num_tokens = int(starts[-1])
    if num_tokens > max_tokens:
        raise BadShape(f"the step has {num_tokens} query tokens; the plan was made for at most {max_tokens}")
    return num_tokens


def _check_tables(
    spec: AttentionSpec,
    starts: NDArray[np.integer],
    lens: NDArray[np.integer],
    tables: NDArray[np.integer],
) -> None:
    """Raise BadValue for a length that the table cannot hold, or an invalid id in a table entry that may be read."""
    width = tables.shape[1]
    longest = min(width * spec.block_size, MAX_CONTEXT)
    starts, lens = starts.astype(np.int64), lens.astype(np.int64)
    bad = np.flatnonzero((lens < 0) | (lens > longest))
    if bad.size:
        s = int(bad[0])
        raise BadValue(
            f"context_lens[{s}] is {lens[s]}; sequence {s}'s table of {width} blocks of {spec.block_size} holds "
            f"0..{longest} tokens"
        )
    if tables.size == 0 or (tables.min() >= 0 and tables.max() < spec.num_blocks):
        return  # all entries are valid, read or not
    end = -(-lens // spec.block_size)  # first entry that is not read
    begin = np.zeros_like(end)  # first entry that is read
    if spec.window is not None:
        first_row = lens - (starts[1:] - starts[:-1])  # position of the sequence's first query row
        begin = np.maximum(first_row - spec.window + 1, 0) // spec.block_size
    column = np.arange(width, dtype=np.int64)
    read = (column >= begin[:, None]) & (column < end[:, None])
    rows, columns = np.nonzero(read & ((tables < 0) | (tables >= spec.num_blocks)))
    if rows.size:
        s, j = int(rows[0]), int(columns[0])
        raise BadValue(
            f"block_tables[{s}, {j}] is {tables[s, j]}; sequence {s} of {lens[s]} tokens reads that entry, so it "
            f"must be a block id in 0..{spec.num_blocks - 1}"
        )


def _check_slots(spec: AttentionSpec, slots: NDArray[np.integer], num_tokens: int) -> None:
    if len(slots) != num_tokens:
        raise BadShape(f"slots has {len(slots)} entries for {num_tokens} query tokens; it needs one per token")
    num_slots = spec.num_blocks * spec.block_size
    bad = np.flatnonzero((slots < -1) | (slots >= num_slots))
    if bad.size:
        t = int(bad[0])
        raise BadValue(f"slots[{t}] is {slots[t]}; it must be -1 (skip) or lie in 0..{num_slots - 1}")
    written = np.sort(slots[slots >= 0])
    twice = np.flatnonzero(written[1:] == written[:-1])
    if twice.size:
        slot = written[twice[0]]
        t, u = np.flatnonzero(slots == slot)[:2]
        raise BadValue(f"slots[{t}] and slots[{u}] are both {slot}; every row needs its own slot")


def _check_key_ends(
    spec: AttentionSpec, ends: NDArray[np.integer], starts: NDArray[np.integer], lens: NDArray[np.integer]
) -> None:
    num_tokens = int(starts[-1])
    if not spec.causal:
        raise BadValue("key_ends is given, and spec.causal is False; then every row sees all keys of its sequence")
    if len(ends) != num_tokens:
        raise BadShape(f"key_ends has {len(ends)} entries for {num_tokens} query tokens; it needs one per token")
    starts, lens = starts.astype(np.int64), lens.astype(np.int64)
    rows = np.diff(starts)
    least = np.repeat(lens - starts[1:], rows) + np.arange(num_tokens) + 1  # a row's position + 1
    bad = np.flatnonzero((ends < np.maximum(least, 0)) | (ends > np.repeat(lens, rows)))
    if bad.size:
        t = int(bad[0])
        raise BadValue(
            f"key_ends[{t}] is {ends[t]}; the row sees the key at its own position, {least[t] - 1}, and its sequence "
            f"has {np.repeat(lens, rows)[t]} keys, so it must lie in {max(least[t], 0)}..{np.repeat(lens, rows)[t]}"
        )
    sequence = np.repeat(np.arange(len(lens)), rows)
    falls = np.flatnonzero((ends[1:] < ends[:-1]) & (sequence[1:] == sequence[:-1]))
    if falls.size:
        t = int(falls[0])
        raise BadValue(f"key_ends falls from {ends[t]} to {ends[t + 1]} at row {t}; within a sequence it must not fall")
