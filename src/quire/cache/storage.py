"""KVCache: the memory behind the block ids, and how much of it there is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from quire.cache.manager import CacheGroup
from quire.config import CacheConfig, parse_memory
from quire.errors import ConfigError
from quire.ops import PagedKV


class KVCache:
    """The K and V of every layer, one pool of blocks for each cache group.

    A layer's memory is [N, 2, Hkv, B, D]: HND, a block's K and V side by side, so that copying or swapping a block
    of a layer moves one piece of memory. Nobody else knows this layout. The memory is not initialised.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
        self._layers = {
            layer: torch.empty(shape, dtype=dtype, device=device) for group in groups for layer in group.layers
        }

    def layer(self, index: int) -> PagedKV:
        """The layer's K and V: two views [N, Hkv, B, D]."""
        memory = self._layers[index]
        return PagedKV(memory[:, 0], memory[:, 1])


def bytes_per_block(
    groups: Sequence[CacheGroup], block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of one block id over all layers: 2 (K and V) · layers · Hkv · B · D · bytes a number."""
    layers = sum(len(group.layers) for group in groups)
    return 2 * layers * num_kv_heads * block_size * head_dim * dtype.itemsize


def choose_num_blocks(config: CacheConfig, block_bytes: int, max_model_len: int, max_num_seqs: int, free: int) -> int:
    """N: as given, or what the memory budget holds, at most what max_num_seqs sequences of full length could use.

    block_bytes: `bytes_per_block`. free: bytes that a share of memory is a share of.
    Raises ConfigError where the budget does not hold one sequence of max_model_len tokens.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    budget = parse_memory(config.kv_cache_memory, free)
    fitting = budget // block_bytes
    needed = -(-max_model_len // config.block_size)
    if fitting < needed:
        raise ConfigError(
            f"the KV cache may take {budget / 2**20:,.1f} MiB (kv_cache_memory={config.kv_cache_memory!r}), which "
            f"holds {fitting * config.block_size:,} tokens; one sequence of max_model_len={max_model_len:,} tokens "
            f"needs {needed * block_bytes / 2**20:,.1f} MiB. Give more memory, or a max_model_len of at most "
            f"{fitting * config.block_size:,}"
        )
    return min(fitting, needed * max_num_seqs)


def free_memory(device: str = "cpu") -> int:
    """Bytes that are really free: the GPU's, or MemAvailable held to what the control group still allows."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo_available(Path("/proc/meminfo"))
    groups = Path("/sys/fs/cgroup")
    for limit, usage, stat in (
        (groups / "memory.max", groups / "memory.current", groups / "memory.stat"),
        (
            groups / "memory/memory.limit_in_bytes",
            groups / "memory/memory.usage_in_bytes",
            groups / "memory/memory.stat",
        ),
    ):
        free = min(free, _cgroup_headroom(limit, usage, stat, unlimited=free))
    return free


def _meminfo_available(meminfo: Path) -> int:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise ConfigError(f"{meminfo} does not tell the free memory; give kv_cache_memory in bytes, as in '2GiB'")


def _cgroup_headroom(limit: Path, usage: Path, stat: Path, unlimited: int) -> int:
    """What the control group still allows; `unlimited` where it sets no limit or there is none."""
    try:
        headroom = int(limit.read_text()) - int(usage.read_text())
        # File pages that the kernel drops when it needs room count as used, but are free for us.
        cached = [int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("inactive_file ")]
    except (OSError, ValueError):  # no such group, or "max"
        return unlimited
    return max(0, headroom + sum(cached))
