"""Chooses the draft tokens of a head in one native call: each is computed from the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, c_int32, c_void_p, pointer
from typing import cast

import torch
from torch import Tensor

from quire.errors import BadValue
from quire.ops import native
from quire.ops.cpu.executor import NativeExecutor
from quire.ops.cpu.linear import PackedEmbedding, PackedLinear
from quire.ops.cpu.worklist import CpuPlan
from quire.ops.program import Executor, LayerCaches, Plan
from quire.ops.weights.linear import Embedding, Linear, PlainEmbedding


class NativeChain:
    """A head in the form of the native library. It has the bits of its executor, its embedding and its projection."""

    def __init__(self, executor: NativeExecutor, embedding: Embedding, head: PackedLinear, targets: Tensor | None):
        """See `Backend.chain`."""
        self._executor, self._head, self._targets = executor, head, targets
        self._embedding = embedding.head if isinstance(embedding, PackedEmbedding) else None
        self._rows = embedding.weight if isinstance(embedding, PlainEmbedding) else None
        self._library = native.default()

    @staticmethod
    def of(executor: Executor, embedding: Embedding, head: Linear, targets: Tensor | None) -> NativeChain | None:
        """Return the chain, or None if the library does not support one of the parts."""
        if not isinstance(executor, NativeExecutor) or not isinstance(head, PackedLinear):
            return None
        program = executor.program
        size, dtype, narrow = program.output.size, program.dtype, False
        if isinstance(embedding, PackedEmbedding):
            narrow = embedding.head.narrow is not None
            found = embedding.head.dtype, embedding.head.in_size
        elif isinstance(embedding, PlainEmbedding) and embedding.weight.is_contiguous():
            narrow = embedding.weight.dtype is not embedding.dtype
            found = embedding.dtype, embedding.weight.shape[1]
        else:
            return None
        fits = found == (dtype, size) and program.input.size == 2 * size and program.output.first == 0
        fits = fits and program.input.buffer != program.output.buffer and head.out_dtype is torch.float32
        return NativeChain(executor, embedding, head, targets) if fits and not narrow else None

    def __call__(
        self,
        x: Tensor,  # [T, 2 H], contiguous: the joined rows; overwritten
        positions: Tensor,  # int64 [T]; changed
        caches: LayerCaches,
        plans: Sequence[Plan],  # updated for these rows, with blocks for those of the draft tokens
        rows: Tensor,  # int64 [R], ascending: the last rows of the first R sequences
        counts: Tensor,  # int64 [R], descending, 1 or more: draft tokens of each of these
    ) -> Tensor:
        """Run the rows and return the draft tokens: int64 [counts[0], R], undefined after a sequence's count."""
        own, width, dtype = cast(list[CpuPlan], list(plans)), x.shape[1] // 2, x.dtype
        head, embedding = self._head.params(), None if self._embedding is None else self._embedding.params()
        logits = torch.empty(len(rows), self._head.out_size)
        copy = torch.empty(self._head.copy_size(len(rows), width))
        head.out, head.out_stride, head.copy = logits.data_ptr(), logits.shape[1], copy.data_ptr()
        tokens = torch.empty(int(counts[0]), len(rows), dtype=torch.int64)
        given = [x, torch.empty(len(x), width, dtype=dtype)]
        with self._executor.prepared(given, positions, caches, own, rows) as program:
            failed = self._library(
                "chain",
                native.ChainParams(
                    program=pointer(program),
                    embedding=None if embedding is None else pointer(embedding),
                    rows=None if self._rows is None else self._rows.data_ptr(),
                    head=pointer(head),
                    targets=None if self._targets is None else self._targets.data_ptr(),
                    plans=(c_void_p * len(own))(*(plan.handle for plan in own)),
                    steps=(POINTER(native.StepParams) * len(own))(*(pointer(plan.step) for plan in own)),
                    block_sizes=(c_int32 * len(own))(*(plan.spec.block_size for plan in own)),
                    num_plans=len(own),
                    counts=counts.data_ptr(),
                    tokens=tokens.data_ptr(),
                ),
            )
        if failed == -2:
            raise MemoryError(f"no memory for the work list of {len(rows)} draft tokens")
        if failed >= 0:
            raise BadValue(f"operator {failed} of the head failed at positions {positions.tolist()}")
        return tokens
