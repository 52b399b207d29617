"""KVCache: the memory of the blocks, and how much of it there is."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from quire.cache.manager import CacheGroup, Heads
from quire.config import CacheConfig, parse_memory
from quire.errors import ConfigError
from quire.ops import AttentionSpec, Backend, PagedKV, load
from quire.ops.memory import in_huge_pages
from quire.ops.swap import HostSwap, Swap

SCALE = torch.float32  # of a row of integers
RESIDENT = 64 * 2**20  # bytes that are there from the start; more would be a part of a second before the first request
DEFAULT_SWAP_SPACE = "4GiB"


class KVCache:
    """The K and V of every layer, one pool of blocks for each cache group.

    A layer's memory is [N, 2, Hkv, B, D]: HND, a block's K and V side by side, so that copying or swapping a block
    of a layer moves one piece of memory. With integers, the scales [2, Hkv, B] follow them in the same piece, where an
    fp32 may begin. A latent cache is [N, Hkv, B, D]: its V are columns of K. Nobody else knows this layout. On a CPU it
    lies in huge pages where the system offers them, and its first blocks are there from the start: no step waits for
    the system to find a page for them.

    On a GPU blocks are swapped on a stream of their own, beside the computation; asking for a layer makes the current
    stream wait for that layer's blocks, and for no others.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str = "cpu",
        num_host_blocks: int = 0,
        backend: Backend | None = None,
    ) -> None:
        """num_host_blocks: room on the host for requests that are swapped out; it takes memory when it is used.

        backend: what moves blocks; None: the fastest one for the device.
        """
        self._groups = tuple(groups)
        heads = {layer: group.heads for group in groups for layer in group.layers}
        make = partial(in_huge_pages, touched=RESIDENT // max(1, len(heads)))
        if device != "cpu":
            make = partial(torch.empty, device=device)
        widths = {layer: _layer_bytes(block_size, of, dtype) // dtype.itemsize for layer, of in heads.items()}
        self._memory = {layer: make((num_blocks, width), dtype=dtype) for layer, width in widths.items()}
        self._host = {layer: in_huge_pages((num_host_blocks, width), dtype) for layer, width in widths.items()}
        self._swap: Swap = (
            (backend or load("auto", device)).swap(device, list(self._host.values())) if num_host_blocks else HostSwap()
        )
        # Before any memory goes. At the interpreter's exit the system takes everything back by itself.
        weakref.finalize(self, self._swap.close).atexit = False
        self._layers = {layer: _views(memory, block_size, heads[layer]) for layer, memory in self._memory.items()}

    def layer(self, index: int) -> PagedKV:
        """The layer's K and V: two views [N, Hkv, B, D], of int8 with scales [N, Hkv, B], the same object at each call.

        Who uses them asks for them in every step.
        """
        self._swap.wait(index)
        return self._layers[index]

    def layers(self, group: int) -> list[PagedKV]:
        """K and V of the layers of the cache group of that index."""
        return [self.layer(layer) for layer in self._groups[group].layers]

    def settle(self) -> None:
        """Let the current stream wait for all blocks that are being swapped."""
        for layer in self._layers:
            self.layer(layer)

    def swap_out(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy the blocks `src` of the group's layers to the blocks `dst` on the host."""
        self._copy(group, self._memory, src, self._host, dst)

    def swap_in(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy the blocks `src` on the host to the blocks `dst` of the group's layers."""
        self._copy(group, self._host, src, self._memory, dst)

    def _copy(
        self,
        group: int,
        sources: Mapping[int, torch.Tensor],  # by layer
        src: Sequence[int],
        targets: Mapping[int, torch.Tensor],  # by layer
        dst: Sequence[int],
    ) -> None:
        if src:
            pairs = {layer: (sources[layer], targets[layer]) for layer in self._groups[group].layers}
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
    """The attention of a group's layers. Raises ConfigError for a latent cache of integers.

    dtype: of q; kv_dtype: of the cache, None: the same.
    """
    heads = group.heads
    if heads.latent is not None and kv_dtype == torch.int8:
        raise ConfigError("kv_cache_dtype is 'int8'; this model's K and V are one latent row, which auto or fp8 store")
    return AttentionSpec(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        head_dim_v=heads.latent,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=dtype,
        kv_dtype=kv_dtype,
        window=group.window,
        device=device,
        reproducible=reproducible,
    )


def bytes_per_block(groups: Sequence[CacheGroup], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block id over all layers: of each 2 (K and V) · Hkv · B · (D · bytes a number + a scale's)."""
    return sum(len(group.layers) * _layer_bytes(block_size, group.heads, dtype) for group in groups)


def cache_dtype(config: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """The cache's dtype for a model that computes in that one."""
    return {"auto": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[config.kv_cache_dtype]


def _layer_bytes(block_size: int, heads: Heads, dtype: torch.dtype) -> int:
    """Of one block of one layer."""
    rows = (2 if heads.latent is None else 1) * heads.num_kv_heads * block_size
    numbers = rows * heads.head_dim
    return numbers * dtype.itemsize if dtype != torch.int8 else _scales_begin(numbers) + rows * SCALE.itemsize


def _scales_begin(numbers: int) -> int:
    """Bytes from the begin of a block with so many integers to its scales."""
    return -(-numbers // SCALE.itemsize) * SCALE.itemsize


def _views(
    memory: torch.Tensor,  # [N, numbers of a block]
    block_size: int,
    heads: Heads,
) -> PagedKV:
    """K and V of a layer, and their scales where there are any."""
    num_kv_heads, head_dim = heads.num_kv_heads, heads.head_dim
    sizes = num_kv_heads, block_size, head_dim
    if heads.latent is not None:
        k = memory.unflatten(1, sizes)  # type: ignore[no-untyped-call]
        return PagedKV(k, k[..., : heads.latent])
    rows = 2 * num_kv_heads * block_size
    k, v = memory[:, : rows * head_dim].unflatten(1, (2, *sizes)).unbind(1)  # type: ignore[no-untyped-call]
    if memory.dtype != torch.int8:
        return PagedKV(k, v)
    scales = memory.view(SCALE)[:, _scales_begin(rows * head_dim) // SCALE.itemsize :]
    k_scale, v_scale = scales.unflatten(1, (2, num_kv_heads, block_size)).unbind(1)  # type: ignore[no-untyped-call]
    return PagedKV(k, v, k_scale, v_scale)


def choose_num_blocks(
    config: CacheConfig,
    block_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    free: int | None,
    blocks_a_sequence: int | None = None,
) -> int:
    """N: as given, or what the memory budget holds, at most what max_num_seqs sequences of full length could use.

    block_bytes: `bytes_per_block`. free: `free_memory`. blocks_a_sequence: what a sequence of max_model_len tokens owns
    at most, where windows make that less than all of its tokens.
    Raises ConfigError where the budget does not hold one sequence of max_model_len tokens, or is not there.
    """
    if config.num_blocks is not None:
        _check_free(f"num_blocks={config.num_blocks}", config.num_blocks * block_bytes, free)
        return config.num_blocks
    budget = parse_memory(config.kv_cache_memory, free)
    _check_free(f"kv_cache_memory={config.kv_cache_memory!r}", budget, free)
    fitting = budget // block_bytes
    needed = blocks_a_sequence or -(-max_model_len // config.block_size)
    if fitting < needed:
        shorter = f", or a max_model_len of at most {fitting * config.block_size:,}" if fitting else ""
        raise ConfigError(
            f"the KV cache may take {_mib(budget)} (kv_cache_memory={config.kv_cache_memory!r}), which holds "
            f"{fitting * config.block_size:,} tokens; one sequence of max_model_len={max_model_len:,} tokens needs "
            f"{_mib(needed * block_bytes)}. Give more memory{shorter}"
        )
    return min(fitting, needed * max_num_seqs)


def choose_num_host_blocks(config: CacheConfig, block_bytes: int, most: int, free: int | None) -> int:
    """Blocks on the host for swapped requests: what swap_space holds, at most `most`; none where nothing is swapped.

    Raises ConfigError where it holds not one block, or is not there.
    """
    if config.preemption != "swap":
        return 0
    asked = DEFAULT_SWAP_SPACE if config.swap_space is None else config.swap_space
    space = parse_memory(asked, free, name="swap_space")
    fitting = min(space // block_bytes, most)
    if fitting == 0:
        raise ConfigError(
            f"swap_space is {asked!r}, {space:,} bytes; one block takes {block_bytes:,}. Give a unit, as in '4GiB'"
        )
    _check_free(f"swap_space={asked!r}", fitting * block_bytes, free)
    return fitting


def _check_free(option: str, wanted: int, free: int | None) -> None:
    if free is not None and wanted > free:
        raise ConfigError(f"{option} asks for {_mib(wanted)}; only {_mib(free)} are free")


def _mib(amount: int) -> str:
    return f"{amount / 2**20:,.1f} MiB"


def free_memory(device: str = "cpu", root: Path = Path("/")) -> int | None:
    """Bytes that are really free: the GPU's, or MemAvailable held to what the control groups still allow.

    None where the system does not say. root: where /proc and /sys are.
    """
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        [available] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        return None
    return min([available, *_cgroup_headrooms(root)])


def _cgroup_headrooms(root: Path) -> list[int]:
    """What each control group that this process stands in, and each one above it, still allows."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    headrooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # version 2, version 1
            top = root / "sys/fs/cgroup" / controllers
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            here = top / path.lstrip("/")
            for group in (here, *here.parents):
                if group.is_relative_to(top):
                    headrooms += _cgroup_headroom(group / names[0], group / names[1], group / "memory.stat")
    return headrooms


def _cgroup_headroom(limit: Path, usage: Path, stat: Path) -> list[int]:
    """What one control group still allows; nothing where it sets no limit."""
    try:
        headroom = int(limit.read_text()) - int(usage.read_text())
        # File pages that the kernel drops when it needs room count as used, but are free for us.
        cached = [int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("inactive_file ")]
    except (OSError, ValueError):  # no such group, or "max"
        return []
    return [max(0, headroom + sum(cached))]
