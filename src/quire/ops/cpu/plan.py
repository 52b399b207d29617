"""The plan of the CPU backend: a step's metadata and the native work list that every layer drains."""

from __future__ import annotations

import weakref
from ctypes import byref

import torch
from torch import Tensor

from quire.ops.cpu import native
from quire.ops.interface import AttentionSpec
from quire.ops.plan import AttentionPlan


class CpuPlan(AttentionPlan):
    """An attention plan with its work list: items of rows and keys, the most expensive first.

    Long contexts are cut at multiples of 1,024 keys where there would not be work for every thread otherwise, and
    where sequences have the same blocks, so that these are read once for all of them. How the work is cut does not
    change a bit of the results.
    """

    def __init__(
        self, spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int, library: native.Library
    ) -> None:
        super().__init__(spec, max_tokens, max_seqs, max_blocks)
        self.library = library
        params = native.SpecParams(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            head_dim_v=spec.dim_v,
            block_size=spec.block_size,
            causal=spec.causal,
            window=spec.window or 0,
            dtype=native.DTYPES[spec.dtype],
        )
        handle = library.plan_new(byref(params))
        if not handle:
            raise MemoryError("no memory for an attention plan")
        self._handle = handle
        weakref.finalize(self, library.plan_free, handle)
        self.view = library.plan_view(handle)  # what the kernels take
        self.attention_params = native.AttentionParams()
        self.write_params = native.WriteParams()

    def update(
        self,
        query_starts: Tensor,  # int32 [S+1], host
        context_lens: Tensor,  # int32 [S], host
        block_tables: Tensor,  # int32 [S, M], host
        slots: Tensor | None = None,  # int64 [T], host
    ) -> None:
        """Take over the metadata of one step and cut its work into items."""
        super().update(query_starts, context_lens, block_tables, slots)
        step = native.StepParams(
            query_starts=self.query_starts.data_ptr(),
            context_lens=self.context_lens.data_ptr(),
            block_tables=self.block_tables.data_ptr(),
            slots=self.slots.data_ptr(),
            table_stride=self.block_tables.stride(0),
            num_seqs=self.num_seqs,
            num_threads=torch.get_num_threads(),
        )
        if self.library.plan_update(self._handle, byref(step)):
            raise MemoryError(f"no memory for the work list of {self.num_tokens} query tokens")

    @property
    def num_items(self) -> int:
        """Items of the work list, for one KV head."""
        return self.library.num_items(self._handle)

    @property
    def num_parts(self) -> int:
        """Query tokens whose keys are divided among items."""
        return self.library.num_parts(self._handle)
