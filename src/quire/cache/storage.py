"""KVCache: the memory of the blocks, and its size."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from quire.cache.groups import NO_STATES, AnyGroup, CacheGroup, Heads, RowGroup, StateGroup, StatePools, StateSizes
from quire.config import CacheConfig
from quire.errors import BadValue
from quire.ops import AttentionSpec, Backend, PagedKV, load
from quire.ops.memory import in_huge_pages
from quire.ops.recurrent.records import PIECE, RecurrentCache, RecurrentSpec
from quire.ops.swap import HostSwap, Swap

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCALE = torch.float32  # of the scale of a row of integers
CACHE_LINE = 64  # bytes
RESIDENT = 64 * 2**20  # bytes touched at the start; more would delay the first request by a fraction of a second
Record: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each tensor


class KVCache:
    """The cache memory of every layer, one pool of blocks for each cache group.

    A layer's memory is [N, 2, Hkv, B, D]: HND, with K and V of a block adjacent, so that copying or swapping a block of
    a layer moves one contiguous range. With integers, the scales [2, Hkv, B] follow them in the same range, aligned for
    fp32. A latent cache is [N, Hkv, B, D + Di], with the scales after it: its V are columns of K, and the Di numbers
    after a token's K are the key of an indexer, if the layer has one. A block of a layer that keeps a state consists of
    the tensors of a record one after the other, each aligned to a cache line. No other module depends on these layouts.
    On a CPU the memory is in huge pages if the system offers them, and its first blocks are touched at the start, so
    that no step waits for page faults there.

    On a GPU blocks are swapped on a separate stream, concurrently with the computation. Accessing a layer makes the
    current stream wait for that layer's blocks only.
    """

    def __init__(
        self,
        groups: Sequence[AnyGroup],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str = "cpu",
        num_host_blocks: int = 0,
        backend: Backend | None = None,
        state_pools: StatePools = NO_STATES,
        model_dtype: torch.dtype | None = None,
    ) -> None:
        """num_host_blocks: blocks on the host for swapped-out requests; they take memory when they are first used.

        dtype: of K and V. backend: moves blocks; None: the fastest one for the device. state_pools: blocks of the
        groups of layers that keep a state. model_dtype: compute dtype of these; None: dtype.
        """
        self._groups = tuple(groups)
        self._sizes = num_blocks, block_size, dtype, device, num_host_blocks, backend, state_pools, model_dtype or dtype
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory of all blocks, with undefined contents."""
        self._memory: list[dict[int, torch.Tensor]] = []  # of each group, by layer
        self._host: list[dict[int, torch.Tensor]] = []
        self._layers: dict[int, PagedKV | RecurrentCache] = {}
        self._swap = self._allocated(*self._sizes)
        self._close = weakref.finalize(self, self._swap.close)  # before any memory is freed
        self._close.atexit = False  # at the interpreter's exit the system frees everything

    def free(self) -> None:
        """Free the memory of all blocks. Until `allocate`, no other method may be called."""
        self._close()
        self._memory, self._host, self._layers = [], [], {}
        self.__dict__.pop("_bytes", None)

    def _allocated(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        num_host_blocks: int,
        backend: Backend | None,
        state_pools: StatePools,
        model_dtype: torch.dtype,
    ) -> Swap:
        """Allocate the memory, and return the means of swapping. See `__init__`."""
        groups = self._groups
        make = partial(in_huge_pages, touched=RESIDENT // max(1, sum(len(group.layers) for group in groups)))
        if device != "cpu":
            make = partial(torch.empty, device=device)
        records: dict[int, dict[str, torch.Tensor]] = {}  # of a layer that keeps a state, by name
        for group in groups:
            if isinstance(group, CacheGroup):
                width, count, hosts = _layer_bytes(block_size, group.heads, dtype), num_blocks, num_host_blocks
                memory = {layer: make((count, width // dtype.itemsize), dtype=dtype) for layer in group.layers}
                self._layers |= {layer: _views(own, block_size, group.heads) for layer, own in memory.items()}
            else:
                record = _record(group, recurrent_spec(group, state_pools, model_dtype, device))
                width, count, hosts = _record_bytes(record), state_pools.of(group), state_pools.hosts
                memory = {layer: make((count, width), dtype=torch.uint8) for layer in group.layers}
                for layer, own in memory.items():
                    records.setdefault(layer, {}).update(_record_views(own, record))
            self._memory.append(memory)
            self._host.append({k: in_huge_pages((hosts, own.shape[1]), own.dtype) for k, own in memory.items()})
        self._layers |= {layer: RecurrentCache(**tensors) for layer, tensors in records.items()}
        if not (num_host_blocks or state_pools.hosts):
            return HostSwap()
        host = [own for by_layer in self._host for own in by_layer.values()]
        return (backend or load("auto", device)).swap(device, host)

    def layer(self, index: int) -> PagedKV | RecurrentCache:
        """Return the cache of a layer, the same object at each call. Must be called in every step that uses it.

        K and V are two views [N, Hkv, B, D], of int8 with scales [N, Hkv, B].
        """
        self._swap.wait(index)
        return self._layers[index]

    def kv(self, index: int) -> PagedKV:
        """Return the K and V of a layer of attention, see `layer`. Raises BadValue for a layer that keeps a state."""
        kept = self.layer(index)
        if not isinstance(kept, PagedKV):
            raise BadValue(f"layer {index} keeps a state; it has no K and V")
        return kept

    def layers(self, group: int) -> list[PagedKV | RecurrentCache]:
        """Return the caches of the layers of cache group `group`."""
        return [self.layer(layer) for layer in self._groups[group].layers]

    def settle(self) -> None:
        """Make the current stream wait for all blocks that are being swapped."""
        for layer in self._layers:
            self.layer(layer)

    def swap_out(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy the blocks `src` of the group's layers to the blocks `dst` on the host."""
        self._copy(group, self._memory, src, self._host, dst)

    def swap_in(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy the blocks `src` on the host to the blocks `dst` of the group's layers."""
        self._copy(group, self._host, src, self._memory, dst)

    def widths(self) -> list[int]:
        """Return the bytes of a block of each group, over all of its layers."""
        return [sum(own.shape[1] * own.itemsize for own in by_layer.values()) for by_layer in self._memory]

    def read_block(
        self,
        group: int,
        block: int,
        out: NDArray[np.uint8],  # [width of the group]
    ) -> None:
        """Copy a block out of the layers' memory, one layer after the other.

        CPU only; may be called from any thread.
        """
        at = 0
        for own in self._bytes[group]:
            out[at : at + own.shape[1]] = own[block]
            at += own.shape[1]

    def write_block(
        self,
        group: int,
        block: int,
        data: NDArray[np.uint8],  # [width of the group]
    ) -> None:
        """Copy a block, in the layout of `read_block`, into the layers' memory. CPU only."""
        at = 0
        for own in self._bytes[group]:
            own[block] = data[at : at + own.shape[1]]
            at += own.shape[1]

    @cached_property
    def _bytes(self) -> list[list[NDArray[np.uint8]]]:
        """The memory of each group's layers, [N, bytes of a block]."""
        return [[own.view(torch.uint8).numpy() for own in by_layer.values()] for by_layer in self._memory]

    def _copy(
        self,
        group: int,
        sources: Sequence[Mapping[int, torch.Tensor]],  # of each group, by layer
        src: Sequence[int],
        targets: Sequence[Mapping[int, torch.Tensor]],  # of each group, by layer
        dst: Sequence[int],
    ) -> None:
        if src:
            pairs = {layer: (source, targets[group][layer]) for layer, source in sources[group].items()}
            self._swap.copy(pairs, src, dst)


def group_spec(
    group: CacheGroup,
    block_size: int,
    num_blocks: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    device: str = "cpu",
    reproducible: bool = False,
) -> AttentionSpec:
    """Return the attention spec of a group's layers.

    dtype: of q; kv_dtype: of the cache, None: the same.
    """
    heads = group.heads
    return AttentionSpec(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        head_dim_v=heads.latent,
        latent=heads.latent is not None,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=dtype,
        kv_dtype=kv_dtype,
        causal=group.causal,
        window=group.window,
        device=device,
        reproducible=reproducible,
    )


def recurrent_spec(
    group: StateGroup | RowGroup, state_pools: StatePools, dtype: torch.dtype, device: str = "cpu"
) -> RecurrentSpec:
    """Return the spec of the layers of a group that keeps a state. dtype: the model's compute dtype."""
    sizes = asdict(group.sizes)
    return RecurrentSpec(**sizes, num_states=state_pools.states, num_rows=state_pools.rows, dtype=dtype, device=device)


def state_groups(layers: tuple[int, ...], sizes: StateSizes) -> tuple[StateGroup, RowGroup]:
    """Return the groups of layers that keep a state: in a model's `groups` they come after those of attention."""
    return StateGroup(layers, PIECE, sizes), RowGroup(layers, PIECE, sizes)


def bytes_per_block(groups: Sequence[AnyGroup], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block id over all layers of attention.

    Each layer takes 2 (K and V) · Hkv · B · (D · bytes of a number + bytes of a scale).
    """
    attention = [group for group in groups if isinstance(group, CacheGroup)]
    return sum(len(group.layers) * _layer_bytes(block_size, group.heads, dtype) for group in attention)


def bytes_of_states(groups: Sequence[AnyGroup], dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a state and of a piece's rows, over all layers that keep a state; zeros if none does."""
    found = {StateGroup: 0, RowGroup: 0}
    for group in groups:
        if not isinstance(group, CacheGroup):
            spec = recurrent_spec(group, NO_STATES, dtype)
            found[type(group)] += len(group.layers) * _record_bytes(_record(group, spec))
    return found[StateGroup], found[RowGroup]


def _record(group: StateGroup | RowGroup, spec: RecurrentSpec) -> Record:
    return spec.state_record if isinstance(group, StateGroup) else spec.row_record


def _record_bytes(record: Record) -> int:
    """Return the bytes of one block of one layer that keeps a state."""
    return sum(_in_lines(math.prod(shape) * dtype.itemsize) for shape, dtype in record.values())


def _in_lines(size: int) -> int:
    """Round a number of bytes up to whole cache lines."""
    return -(-size // CACHE_LINE) * CACHE_LINE


def _record_views(
    memory: torch.Tensor,  # uint8 [N, bytes of a record]
    record: Record,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer's records, [N, ...] each, by name."""
    views, at = {}, 0
    for name, (shape, dtype) in record.items():
        size = math.prod(shape) * dtype.itemsize
        views[name] = memory[:, at : at + size].view(dtype).unflatten(1, shape)  # type: ignore[no-untyped-call]
        at += _in_lines(size)
    return views


def cache_dtype(config: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the cache's dtype for a model that computes in `dtype`."""
    return {"auto": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[config.kv_cache_dtype]


def _layer_bytes(block_size: int, heads: Heads, dtype: torch.dtype) -> int:
    """Return the bytes of one block of one layer."""
    numbers = block_size * heads.numbers
    if dtype != torch.int8:
        return numbers * dtype.itemsize
    return _scales_begin(numbers) + 2 * heads.num_kv_heads * block_size * SCALE.itemsize


def _scales_begin(numbers: int) -> int:
    """Return the byte offset of the scales in a block with that many integers."""
    return -(-numbers // SCALE.itemsize) * SCALE.itemsize


def _views(
    memory: torch.Tensor,  # [N, numbers of a block]
    block_size: int,
    heads: Heads,
) -> PagedKV:
    """Return K and V of a layer, and their scales for integers."""
    num_kv_heads, head_dim = heads.num_kv_heads, heads.head_dim
    sizes = num_kv_heads, block_size, head_dim
    if heads.latent is not None:
        rows = memory[:, : block_size * heads.numbers].unflatten(1, (num_kv_heads, block_size, -1))  # type: ignore[no-untyped-call]
        numbers, k, v = block_size * heads.numbers, rows[..., :head_dim], rows[..., : heads.latent]
        if heads.index_dim:
            return PagedKV(k, v, index=rows[..., head_dim:])
    else:
        numbers = 2 * math.prod(sizes)
        k, v = memory[:, :numbers].unflatten(1, (2, *sizes)).unbind(1)  # type: ignore[no-untyped-call]
    if memory.dtype != torch.int8:
        return PagedKV(k, v)
    scales = memory.view(SCALE)[:, _scales_begin(numbers) // SCALE.itemsize :]
    k_scale, v_scale = scales.unflatten(1, (2, num_kv_heads, block_size)).unbind(1)  # type: ignore[no-untyped-call]
    return PagedKV(k, v, k_scale, v_scale)
