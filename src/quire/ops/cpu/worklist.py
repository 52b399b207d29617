"""The plan of the CPU backend: a step's metadata and the native work list that every layer processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from ctypes import byref
from functools import partial
from typing import TypeAlias

import torch

from quire.errors import Unsupported
from quire.ops import native
from quire.ops.checks import overlap
from quire.ops.checks.metadata import Step
from quire.ops.plan import AttentionPlan
from quire.ops.recurrent.records import RecurrentCache
from quire.ops.rows import used_strides
from quire.ops.spec import AttentionSpec, PagedKV, check_kv

MAX_CACHES = 1_024  # cached by a plan

Layout: TypeAlias = list[tuple[object, ...]]


def layout(cache: PagedKV | RecurrentCache) -> Layout:
    """Return the address, shape, strides and dtype of each tensor of a layer, which `set_` and `resize_` change."""
    return [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in vars(cache).values() if x is not None]


class Cache:
    """The native structures of a layer's cache, with the addresses and strides of K and V."""

    def __init__(self, kv: PagedKV, forget: Callable[[object], None]) -> None:
        """Describe a PagedKV. `forget` is called when it is freed, since its addresses may then be reused."""
        self.owner = weakref.ref(kv, forget)
        self.layout = layout(kv)
        tensors = kv.tensors()
        self.separate = not (any(map(overlap.repeats, tensors.values())) or overlap.first_shared(tensors, {}))
        self.params = native.CacheParams()
        tensors.pop("kv.index", None)  # no kernel of attention reads it
        for name, x in tensors.items():
            name = name.removeprefix("kv.")
            setattr(self.params, name, x.data_ptr())
            for dim, stride in zip(("block", "head", "slot"), used_strides(x), strict=False):
                setattr(self.params, f"{name}_{dim}", stride)
        self.attention, self.write = native.AttentionParams(self.params), native.WriteParams(self.params)


class CpuPlan(AttentionPlan):
    """An attention plan with its work list: items of rows and keys, the most expensive first.

    Long contexts are cut at multiples of 1,024 keys if there is not enough work for all threads, and at multiples of
    256 where sequences have the same blocks, so that these are read once for all of them. The results have the same
    bits for every division of the work.
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
            kv_dtype=native.INT8 if spec.is_scaled else native.DTYPES[spec.cache_dtype],
            latent=spec.latent,
        )
        library("item_sizes", byref(params))
        handle = library.plan_new(byref(params))
        if not handle:
            raise MemoryError("no memory for an attention plan")
        self.handle = handle  # of the native plan
        # Not at the interpreter's exit, where a thread may still run a kernel that reads the plan.
        weakref.finalize(self, library.plan_free, handle).atexit = False
        self.view = library.plan_view(handle)  # address of the structure that kernels read
        self.step = native.StepParams(
            query_starts=self.query_starts.data_ptr(),
            context_lens=self.context_lens.data_ptr(),
            block_tables=self.block_tables.data_ptr(),
            slots=self.slots.data_ptr(),
            nonfinite=self._nonfinite.data_ptr(),
            table_stride=self.block_tables.stride(0),
        )
        self._set_shapes()
        self._caches: dict[int, Cache] = {}  # by the id of the PagedKV; an entry is removed when that is freed

    def _update(self, step: Step) -> None:
        super()._update(step)
        self.step.num_seqs, self.step.num_threads = self.num_seqs, torch.get_num_threads()
        self.step.key_ends = None if self.key_ends is None else self.key_ends.data_ptr()
        self._set_shapes()
        if status := self.library.plan_update(self.handle, byref(self.step)):
            wanted, self.num_tokens, self.num_seqs, self.writable = self.num_tokens, 0, 0, False
            self._set_shapes()
            if status == native.NO_MEMORY:
                raise MemoryError(f"no memory for the work list of {wanted} query tokens; the plan is empty now")
            raise Unsupported(
                f"the step has {wanted} query tokens of {self.spec.group_size} query heads per KV head; the cpu "
                f"backend numbers such rows, and those over shared keys again, in an int32; the plan is empty now"
            )

    def _set_shapes(self) -> None:
        spec, tokens = self.spec, self.num_tokens
        self.q_shape = (tokens, spec.num_heads, spec.head_dim)
        self.out_shape = (tokens, spec.num_heads, spec.dim_v)
        self.k_shape = (tokens, spec.num_kv_heads, spec.head_dim)
        self.v_shape = (tokens, spec.num_kv_heads, spec.dim_v)

    def check(self, kv: PagedKV) -> Cache:
        """Return the native structures of a layer's cache. Check and describe it again if its tensors have changed."""
        found = self._caches.get(id(kv))
        if found is None or found.layout != layout(kv):
            check_kv(kv, self.spec)
            if len(self._caches) >= MAX_CACHES:
                self._caches.clear()
            found = self._caches[id(kv)] = Cache(kv, partial(_forget, weakref.ref(self), id(kv)))
        return found

    def checked(self, kv: PagedKV) -> Cache:
        """Return the result of an earlier `check` in the same call of an operator."""
        return self._caches[id(kv)]

    @property
    def num_items(self) -> int:
        """Number of items in the work list, for one KV head."""
        return self.library.num_items(self.handle)

    @property
    def num_phases(self) -> int:
        """Number of passes over the work list: more than one if items continue the results of others within a split."""
        return self.library.num_phases(self.handle)

    @property
    def num_parts(self) -> int:
        """Number of query tokens whose keys are divided among items."""
        return self.library.num_parts(self.handle)


def _forget(plan: weakref.ref[CpuPlan], key: int, kv: object) -> None:
    holder = plan()
    if holder is not None:
        holder._caches.pop(key, None)
