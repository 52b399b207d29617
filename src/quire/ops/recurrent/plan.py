"""The plan of a step for the layers of one state kind. The formulas are in the package's docstring."""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import BadShape, BadValue, check_integer
from quire.ops.checks.metadata import MAX_CONTEXT, check_query_starts
from quire.ops.checks.tensors import INT32_MAX, host_integers
from quire.ops.recurrent.records import PIECE, RecurrentSpec


class RecurrentStep(NamedTuple):
    """The arguments of `RecurrentPlan.update`."""

    query_starts: Tensor  # int32 [S+1], host
    context_lens: Tensor  # int32 [S], host
    state_tables: Tensor  # int32 [S, P], host
    row_tables: Tensor  # int32 [S, P], host


class RecurrentPlan:
    """The metadata of one step, validated once and then used by every layer of a state kind.

    Use `Backend.recurrent_plan` or `Backend.make_recurrent_plan` to make one. The tensors are allocated once and keep
    their addresses over all `update`s. Only their first `num_tokens` / `num_seqs` entries are valid: T and S of the
    last update. Several threads may use one plan: operators and updates lock it.

    Args:
        spec: of the layers that use the plan.
        max_tokens: largest T of an update.
        max_seqs: largest S of an update.
        max_pieces: largest P of an update, pieces per sequence.

    Raises:
        BadValue: for a size that does not fit an int32.
    """

    def __init__(self, spec: RecurrentSpec, max_tokens: int, max_seqs: int, max_pieces: int) -> None:
        sizes = {"max_tokens": max_tokens, "max_seqs": max_seqs, "max_pieces": max_pieces}
        for name, value in sizes.items():
            check_integer(BadValue, name, value, 0, INT32_MAX)
        self.spec = spec
        self.max_tokens, self.max_seqs, self.max_pieces = max_tokens, max_seqs, max_pieces
        self.num_tokens = 0  # T of the last update
        self.num_seqs = 0  # S of the last update
        self.query_starts = torch.zeros(max_seqs + 1, dtype=torch.int32)  # [max_seqs + 1]
        self.context_lens = torch.zeros(max_seqs, dtype=torch.int32)  # [max_seqs]
        self.state_tables = torch.zeros(max_seqs, max_pieces, dtype=torch.int32)  # [max_seqs, max_pieces]
        self.row_tables = torch.zeros(max_seqs, max_pieces, dtype=torch.int32)  # [max_seqs, max_pieces]
        self._nonfinite = torch.zeros(max_tokens, dtype=torch.int32)  # [max_tokens]
        self.lock = Lock()  # held while the plan is read or changed

    def update(
        self,
        query_starts: Tensor,  # int32 [S+1], host: sequence s has the query rows query_starts[s]:[s+1]
        context_lens: Tensor,  # int32 [S], host: tokens of each sequence, including this step's
        state_tables: Tensor,  # int32 [S, P], host: record of the state before each piece, -1: none
        row_tables: Tensor,  # int32 [S, P], host: record of the rows of each piece, -1: none
    ) -> None:
        """Set the metadata of one step.

        Entry j of a table is for piece c + j, where c is the piece of the sequence's first row in this step. Entries
        beyond the piece context_len // C are not read.

        The step reads the state before piece c unless c is 0, and the rows of piece c if it begins within that piece.
        It writes the state before each later piece that it reaches and that has a record, and the rows of each piece
        with a record. The last piece needs a row record unless the step ends where that piece begins.

        Raises:
            BadShape, BadDtype, BadValue: naming the argument, the sequence and the value. The plan is then unchanged.
        """
        step = RecurrentStep(query_starts, context_lens, state_tables, row_tables)
        with self.lock:
            _check_step(self.spec, (self.max_tokens, self.max_seqs, self.max_pieces), step)
            self._update(step)

    def update_trusted(
        self,
        query_starts: Tensor,  # int32 [S+1], host
        context_lens: Tensor,  # int32 [S], host
        state_tables: Tensor,  # int32 [S, P], host
        row_tables: Tensor,  # int32 [S, P], host
    ) -> None:
        """Set the metadata of one step without a check, see `AttentionPlan.update_trusted`."""
        with self.lock:
            self._update(RecurrentStep(query_starts, context_lens, state_tables, row_tables))

    def _update(self, step: RecurrentStep) -> None:
        query_starts, context_lens, state_tables, row_tables = step
        num_seqs, num_pieces = state_tables.shape
        self.query_starts[: num_seqs + 1].copy_(query_starts)
        self.context_lens[:num_seqs].copy_(context_lens)
        self.state_tables[:num_seqs, :num_pieces].copy_(state_tables)
        self.row_tables[:num_seqs, :num_pieces].copy_(row_tables)
        self.num_tokens, self.num_seqs = int(query_starts[-1]), num_seqs
        self._nonfinite[: self.num_tokens].zero_()

    @property
    def nonfinite(self) -> Tensor:
        """Flags of rows whose key, update or decay was not finite, in any layer since the last update.

        int32 [T], 1 for such a row and 0 for others. States after such a row must not be shared with other requests.
        """
        return self._nonfinite[: self.num_tokens]


def num_pieces(first: int, context_len: int) -> int:
    """Return the P of a step that computes the tokens `first`..`context_len` - 1 of a sequence."""
    return context_len // PIECE - first // PIECE + 1


def step_sizes(
    query_starts: Tensor,  # int32 [S+1], host
    state_tables: Tensor,  # int32 [S, P], host
) -> tuple[int, int, int]:
    """Return T, S and P of a step whose values are not checked yet. Raises BadShape, BadDtype or BadValue."""
    starts = host_integers("query_starts", query_starts, 1)
    tables = host_integers("state_tables", state_tables, 2)
    return (max(0, int(starts[-1])) if len(starts) else 0, *tables.shape)


def _check_step(
    spec: RecurrentSpec,
    room: tuple[int, int, int],  # largest number of query tokens, sequences, and pieces per sequence
    step: RecurrentStep,
) -> None:
    max_tokens, max_seqs, max_pieces = room
    starts = host_integers("query_starts", step.query_starts, 1)
    lens = host_integers("context_lens", step.context_lens, 1).astype(np.int64)
    states = host_integers("state_tables", step.state_tables, 2)
    rows = host_integers("row_tables", step.row_tables, 2)
    num_seqs = len(lens)
    if len(starts) != num_seqs + 1:
        raise BadShape(
            f"query_starts has {len(starts)} entries and context_lens {num_seqs}; with S sequences they have S + 1 "
            f"and S"
        )
    for name, table in (("state_tables", states), ("row_tables", rows)):
        if table.shape != (num_seqs, states.shape[1]):
            raise BadShape(f"{name} has shape {table.shape}; expected ({num_seqs}, P), with the P of state_tables")
    if num_seqs > max_seqs:
        raise BadShape(f"the step has {num_seqs} sequences; the plan was made for at most {max_seqs}")
    if states.shape[1] > max_pieces:
        raise BadShape(f"state_tables has {states.shape[1]} columns; the plan was made for at most {max_pieces}")
    check_query_starts(starts, max_tokens)
    first = lens - (starts[1:] - starts[:-1]).astype(np.int64)  # position of each sequence's first row
    _check_lengths(lens, first, states.shape[1])
    _check_records(spec, lens, first, states, rows)


def _check_lengths(lens: NDArray[np.int64], first: NDArray[np.int64], width: int) -> None:
    for s in np.flatnonzero((first < 0) | (lens > MAX_CONTEXT)):
        raise BadValue(
            f"context_lens[{s}] is {lens[s]}, and sequence {s} has {lens[s] - first[s]} rows in this step; it must lie "
            f"in {lens[s] - first[s]}..{MAX_CONTEXT}"
        )
    pieces = np.where(first < lens, lens // PIECE - first // PIECE + 1, 0)
    for s in np.flatnonzero(pieces > width):
        raise BadValue(
            f"sequence {s} computes the tokens {first[s]}..{lens[s] - 1} in this step; that takes {pieces[s]} entries "
            f"of its tables, which have {width}"
        )


def _check_records(
    spec: RecurrentSpec,
    lens: NDArray[np.int64],
    first: NDArray[np.int64],
    states: NDArray[np.integer],
    rows: NDArray[np.integer],
) -> None:
    """Raise BadValue for an invalid id in an entry that is read or written, and for records that conflict."""
    column = np.arange(states.shape[1])
    last = lens // PIECE - first // PIECE  # entry of the piece that the step ends in
    busy = (first < lens)[:, None]
    used = busy & (column <= last[:, None])
    read_states = busy & (column == 0) & (first >= PIECE)[:, None]
    read_rows = busy & (column == 0) & (first % PIECE > 0)[:, None]
    needed_rows = read_rows | (busy & (column == last[:, None]) & (lens % PIECE > 0)[:, None])
    if spec.num_heads == 0 and spec.taps == 1:  # nothing is kept
        read_states, needed_rows = np.zeros_like(read_states), np.zeros_like(needed_rows)
    for name, table, needed, count in (
        ("state_tables", states, read_states, spec.num_states),
        ("row_tables", rows, needed_rows, spec.num_rows),
    ):
        bad = (needed & (table < 0)) | (used & ((table < -1) | (table >= count)))
        for s, j in np.argwhere(bad):
            piece = first[s] // PIECE + j
            allowed = "the step needs it, so it must be" if needed[s, j] else "it must be -1 (none) or"
            raise BadValue(
                f"{name}[{s}, {j}] is {table[s, j]}, for piece {piece} of sequence {s}, which computes the tokens "
                f"{first[s]}..{lens[s] - 1}; {allowed} a record in 0..{count - 1}"
            )
    written_states = used & (column > 0) & (states >= 0)
    written_rows = used & (rows >= 0)
    _check_written("state_tables", states, written_states, read_states)
    _check_written("row_tables", rows, written_rows, np.zeros_like(written_rows))


def _check_written(name: str, table: NDArray[np.integer], written: NDArray[np.bool_], read: NDArray[np.bool_]) -> None:
    """Raise BadValue if a record is written twice in a step, or written for one piece and read for another."""
    ids, counts = np.unique(table[written], return_counts=True)
    for record in ids[counts > 1]:
        (s, j), (r, i) = np.argwhere(written & (table == record))[:2]
        raise BadValue(f"{name}[{s}, {j}] and {name}[{r}, {i}] are both {record}; every piece needs its own record")
    for s, j in np.argwhere(read & np.isin(table, ids)):
        raise BadValue(f"{name}[{s}, {j}] is {table[s, j]}, which the step reads, and writes for another piece")
