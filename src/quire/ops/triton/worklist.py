"""The plan of the Triton backend: a step's metadata as a work list on the device.

The host knows all lengths, so it divides the work; a program of the kernel only looks up its item. All lists of a step
are written to one area of pinned memory and sent to the device in one copy, to addresses that never change: a captured
graph replays with the lists of the last `update`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import BadShape
from quire.ops.checks.metadata import Step
from quire.ops.checks.tensors import check_integers
from quire.ops.plan import AttentionPlan
from quire.ops.spec import AttentionSpec
from quire.ops.triton import device_plan
from quire.ops.triton.lists import DeviceLists
from quire.ops.triton.partition import ITEM, Lists, Partitioner
from quire.ops.triton.tiles import Tile, chip_of, processors_of


class TritonPlan(AttentionPlan):
    """An attention plan with its lists: int32 views of one tensor on the device.

    few, many: items for tiles of few rows and of many. rows: their query tokens and parts. merges: the tokens whose
    keys were cut. positions, ends, sequences, device_slots, rows_nonfinite: of each query token. tables: the block ids
    of all sequences, concatenated.
    """

    takes_device_metadata = True

    def __init__(
        self, spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int, many_tile: Tile | None = None
    ) -> None:
        super().__init__(spec, max_tokens, max_seqs, max_blocks)
        chip, processors = chip_of(spec.device), processors_of(spec.device)
        self.partitioner = Partitioner(spec, chip, processors, max_tokens, max_seqs, max_blocks, many_tile)
        room = self.partitioner.room
        sizes = {
            "few": ITEM * room.few,
            "many": ITEM * room.many,
            "merges": 3 * max_tokens,
            "positions": max_tokens,
            "ends": max_tokens,
            "sequences": max_tokens,
            "device_slots": max_tokens,
            "rows_nonfinite": max_tokens,  # always 0 on the host: each update clears it
            "rows": 2 * room.rows,
            "tables": max_seqs * max_blocks,  # last, since only the used part is copied
        }
        self._lists = DeviceLists(spec.device, sizes)
        device = self._lists.sent
        self.few, self.many, self.merges = device["few"], device["many"], device["merges"]
        self.positions, self.ends, self.sequences = device["positions"], device["ends"], device["sequences"]
        self.device_slots, self.rows_nonfinite = device["device_slots"], device["rows_nonfinite"]
        self.rows, self.tables = device["rows"], device["tables"]
        self._no_parts = torch.zeros(1, dtype=torch.float32, device=spec.device)
        self.num_few = self.num_many = self.num_merges = self.num_parts = 0  # of the last update
        self.mixed = False, False

    def _update(self, step: Step) -> None:
        super()._update(step)
        starts = self.query_starts[: self.num_seqs + 1].numpy().astype(np.int64)
        lens = self.context_lens[: self.num_seqs].numpy().astype(np.int64)
        width = int(-(-lens.max(initial=0) // self.spec.block_size))
        tables = self.block_tables[: self.num_seqs, :width].numpy()
        ends = None if self.key_ends is None else self.key_ends.numpy()
        lists = self.partitioner.cut(starts, lens, tables, ends)
        self._lists.open()
        self._write(lists, tables)
        self.num_few, self.num_many, self.num_merges = len(lists.few), len(lists.many), len(lists.merges)
        self.num_parts = lists.num_parts
        self.mixed = self.partitioner.mixes(lists.few), self.partitioner.mixes(lists.many)
        self._lists.send(tables.size)

    def _update_on_device(self, num_tokens: int, step: Step) -> None:
        """Make the lists on the device. Values are not checked: wrong ones give wrong results, all from this cache.

        Raises BadShape or BadDtype.
        """
        query_starts, context_lens, block_tables, *_ = step
        for name, x, dims in (("query_starts", query_starts, 1), ("context_lens", context_lens, 1)):
            check_integers(name, x, dims)
        check_integers("block_tables", block_tables, 2)
        num_seqs, width = block_tables.shape
        if len(context_lens) != num_seqs or len(query_starts) != num_seqs + 1:
            raise BadShape(
                f"query_starts has {len(query_starts)} entries, context_lens {len(context_lens)} and block_tables "
                f"{num_seqs} rows; with S sequences they have S + 1, S and S"
            )
        if num_tokens > 0 and num_seqs == 0:
            raise BadShape(f"the step has {num_tokens} query tokens and no sequence; every row belongs to one")
        if not 0 <= num_tokens <= self.max_tokens or num_seqs > self.max_seqs or width > self.max_blocks:
            raise BadShape(
                f"the step has {num_tokens} query tokens, {num_seqs} sequences and tables of {width} blocks; the plan "
                f"was made for at most {self.max_tokens}, {self.max_seqs} and {self.max_blocks}"
            )
        self._lists.follow()
        tile, tokens = self.partitioner.many_tile, self.partitioner.many_tokens
        made = device_plan.items(self.spec, tile, tokens, num_tokens, query_starts, context_lens, width)
        self.many[: made.numel()].copy_(made.flatten())
        self.rows[: 2 * num_tokens : 2].copy_(torch.arange(num_tokens, device=self.rows.device))
        self.rows[1 : 2 * num_tokens : 2].fill_(-1)
        sequences = device_plan.sequences(num_tokens, query_starts)
        self.sequences[:num_tokens].copy_(sequences)
        positions = device_plan.positions(sequences, query_starts, context_lens)
        self.positions[:num_tokens].copy_(positions)
        self.ends[:num_tokens].copy_(positions + 1)
        ids = block_tables.clamp(0, self.spec.num_blocks - 1)
        self.tables[: ids.numel()].copy_(ids.flatten())
        for nothing in (self.few, self.merges, self.many[made.numel() :], self.device_slots):
            nothing.fill_(-1)
        self.rows_nonfinite.zero_()
        self.num_tokens, self.num_seqs, self.writable = num_tokens, num_seqs, False
        self.num_few, self.num_many, self.num_merges, self.num_parts = 0, len(made), 0, 0
        self.mixed = False, self._may_mix

    def _write(self, lists: Lists, tables: NDArray[np.int32]) -> None:
        views = self._lists.written
        for name, width, entries in (("few", ITEM, lists.few), ("many", ITEM, lists.many), ("merges", 3, lists.merges)):
            view = views[name][: views[name].size // width * width].reshape(-1, width)
            view[: len(entries)] = entries
            view[len(entries) :, 0] = -1  # nothing to do for the other programs of a captured launch
        views["rows"][: lists.rows.size] = lists.rows.reshape(-1)
        views["positions"][: self.num_tokens] = lists.positions
        views["ends"][: self.num_tokens] = lists.ends
        views["sequences"][: self.num_tokens] = lists.sequences
        views["device_slots"][: self.num_tokens] = self.slots[: self.num_tokens].numpy() if self.writable else -1
        views["device_slots"][self.num_tokens :] = -1
        views["rows_nonfinite"][:] = 0  # without a GPU this is also the device's list
        views["tables"][: tables.size] = tables.reshape(-1)

    @property
    def nonfinite(self) -> Tensor:
        """The flags of `AttentionPlan.nonfinite`, on the device."""
        flags: Tensor = self.rows_nonfinite[: self.num_tokens]
        return flags

    @property
    def launched(self) -> tuple[int, int, int]:
        """Numbers of items of few and of many rows, and of merges, that a launch has to cover.

        They are those of the step, or the largest of any later update if the plan is for graphs or one is captured.
        """
        if self._covers_all:
            return self.partitioner.room.few, self.partitioner.room.many, self.max_tokens
        return self.num_few, self.num_many, self.num_merges

    @property
    def launched_again(self) -> tuple[bool, bool]:
        """True for items of few and of many rows if their rows may see different keys, see `attention`."""
        return (self._may_mix, self._may_mix) if self._covers_all else self.mixed

    @property
    def _may_mix(self) -> bool:
        return self.spec.causal and not self.partitioner.decodes

    def parts(self) -> tuple[Tensor, Tensor]:
        """Allocate the parts of a launch: fp32 [parts, Hq, Dv], and [parts, Hq, 2] for largest scores and sums."""
        count = self.partitioner.room.rows if self._covers_all else self.num_parts
        if count == 0:
            return self._no_parts, self._no_parts
        heads, dim = self.spec.num_heads, self.spec.dim_v
        sizes = count * heads * dim, count * heads * 2
        mix, sums = torch.empty(sum(sizes), dtype=torch.float32, device=self._no_parts.device).split(sizes)
        return mix, sums

    @property
    def _covers_all(self) -> bool:
        return self.covers_all or (self._lists.on_gpu and torch.cuda.is_current_stream_capturing())
