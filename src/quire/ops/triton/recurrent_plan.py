"""The plan of layers with a recurrent state, with its lists on the device."""

from __future__ import annotations

import numpy as np

from quire.ops.recurrent.plan import RecurrentPlan, RecurrentStep
from quire.ops.recurrent.records import PIECE, RecurrentSpec
from quire.ops.triton.lists import DeviceLists


class TritonRecurrentPlan(RecurrentPlan):
    """A plan with its lists: int32 views of one tensor on the device.

    starts, lens: query_starts and context_lens. offsets: the entry of `records` for each sequence's first piece.
    records: the state record and the row record of each piece that a sequence reaches in the step. slots: the index of
    each sequence among the num_passing that begin a piece whose state has no record; -1 for the others.
    """

    def __init__(self, spec: RecurrentSpec, max_tokens: int, max_seqs: int, max_pieces: int) -> None:
        super().__init__(spec, max_tokens, max_seqs, max_pieces)
        sizes = {
            "starts": max_seqs + 1,
            "lens": max_seqs,
            "offsets": max_seqs,
            "slots": max_seqs,
            "nonfinite": max_tokens,  # always 0 on the host: each update clears it
            "records": 2 * max_seqs * max_pieces,  # last, since only the used part is copied
        }
        self._lists = DeviceLists(spec.device, sizes)
        device = self._lists.sent
        self.starts, self.lens, self.offsets = device["starts"], device["lens"], device["offsets"]
        self.slots, self.records, self._nonfinite = device["slots"], device["records"], device["nonfinite"]
        self.num_pieces = 0  # largest number of pieces of a sequence in the last update
        self.num_passing = 0  # sequences of the last update, see the class

    def _update(self, step: RecurrentStep) -> None:
        self._lists.open()
        super()._update(step)
        starts, lens = self.query_starts[: self.num_seqs + 1].numpy(), self.context_lens[: self.num_seqs].numpy()
        rows = np.diff(starts)
        begins = (lens - rows) // PIECE
        pieces = np.where(rows > 0, lens // PIECE - begins + 1, 0)
        self.num_pieces = int(pieces.max(initial=0))
        piece = np.arange(self.num_pieces)
        states, kept = (x[: self.num_seqs, : self.num_pieces].numpy() for x in (self.state_tables, self.row_tables))
        reached = piece < pieces[:, None]  # [S, pieces]
        records = np.stack([states[reached], kept[reached]], axis=1)
        with_rows = reached & (piece < (-(-lens // PIECE) - begins)[:, None])
        passing = (with_rows & (piece > 0) & (states < 0)).any(axis=1)  # [S]
        self.num_passing = int(passing.sum())
        written = self._lists.written
        written["starts"][: len(starts)] = starts
        written["lens"][: len(lens)] = lens
        written["offsets"][: len(lens)] = np.cumsum(pieces) - pieces
        written["slots"][: len(lens)] = np.where(passing, np.cumsum(passing) - 1, -1)
        written["nonfinite"][:] = 0
        written["records"][: records.size] = records.reshape(-1)
        self._lists.send(records.size)
