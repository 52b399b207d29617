"""Choose the number of blocks of each pool of a cache: as configured, or as many as fit into the budget."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from quire.cache.groups import NO_STATES, StatePools
from quire.config import CacheConfig, parse_memory
from quire.errors import ConfigError

DEFAULT_SWAP_SPACE = "4GiB"


class BlockBytes(NamedTuple):
    """Bytes of a block over all layers of its kind."""

    attention: int  # `bytes_per_block`
    state: int = 0  # `bytes_of_states`; zeros for a model without layers that keep a state
    rows: int = 0


def choose_pools(
    config: CacheConfig,
    sizes: BlockBytes,
    max_model_len: int,
    max_num_seqs: int,
    free: int | None,
    blocks_a_sequence: int,
) -> tuple[int, StatePools]:
    """Return N of attention, and the pools of the groups of layers that keep a state.

    The states and rows of max_num_seqs sequences are reserved first, up to half of the memory. The rest is for blocks,
    and a state for every state_snapshot_interval of their tokens. See `choose_num_blocks` for the arguments.
    """
    if sizes.state == sizes.rows == 0:
        return choose_num_blocks(
            config, sizes.attention, max_model_len, max_num_seqs, free, blocks_a_sequence
        ), NO_STATES
    interval = config.state_snapshot_interval
    if config.num_blocks is not None:
        pools = state_pools(config, config.num_blocks, max_num_seqs)
        wanted = config.num_blocks * sizes.attention + _bytes(pools, sizes)
        _check_free(f"num_blocks={config.num_blocks}, with the states of max_num_seqs={max_num_seqs},", wanted, free)
        return config.num_blocks, pools
    budget = parse_memory(config.kv_cache_memory, free)
    _check_free(f"kv_cache_memory={config.kv_cache_memory!r}", budget, free)
    least = blocks_a_sequence * sizes.attention + _bytes(_for_sequences(1), sizes)
    if budget < least:
        raise ConfigError(
            f"the cache may take {_mib(budget)} (kv_cache_memory={config.kv_cache_memory!r}); one sequence of "
            f"max_model_len={max_model_len:,} tokens needs {_mib(least)}, of which its states take "
            f"{_mib(_bytes(_for_sequences(1), sizes))}. Give more memory, or a smaller max_model_len"
        )
    own = _for_sequences(1)
    for_states = max(_bytes(own, sizes), min(budget // 2, budget - blocks_a_sequence * sizes.attention))
    each = 2 * (sizes.state + sizes.rows)  # for each additional sequence
    seqs = min(max_num_seqs, 1 + (for_states - _bytes(own, sizes)) // each)
    left = budget - _bytes(_for_sequences(seqs), sizes)
    num_blocks = 0
    if sizes.attention:
        blocks = interval // config.block_size
        per_interval = blocks * sizes.attention + sizes.state * config.enable_prefix_caching
        fitting = max(blocks_a_sequence, left * blocks // per_interval)
        num_blocks = min(fitting, blocks_a_sequence * max_num_seqs)
    pools = state_pools(config, num_blocks or max_num_seqs * -(-max_model_len // config.block_size), seqs)
    most = _for_sequences(seqs).states + (left - num_blocks * sizes.attention) // max(1, sizes.state)
    return num_blocks, pools._replace(states=min(pools.states, most))


def state_pools(config: CacheConfig, num_blocks: int, num_seqs: int) -> StatePools:
    """Return the pools of `num_seqs` sequences, plus a state for every state_snapshot_interval tokens of the blocks."""
    kept = num_blocks * config.block_size // config.state_snapshot_interval if config.enable_prefix_caching else 0
    states, rows, _ = _for_sequences(num_seqs)
    return StatePools(states + kept, rows)


def _for_sequences(num_seqs: int) -> StatePools:
    """Return the pools of sequences that each begin and end a step with separate states and rows.

    They include one more state: see `StateGroup.most`.
    """
    return StatePools(2 * num_seqs + 1, 2 * num_seqs)


def _bytes(pools: StatePools, sizes: BlockBytes) -> int:
    return pools.states * sizes.state + pools.rows * sizes.rows


def choose_host_pools(
    config: CacheConfig, sizes: BlockBytes, most_blocks: int, max_num_seqs: int, free: int | None
) -> tuple[int, int]:
    """Return the host blocks for swapped requests: of attention, up to `most_blocks`, and of each other group.

    As many as fit into swap_space; none if nothing is swapped. Raises ConfigError if not even one fits, or the memory
    is not free.
    """
    if config.preemption != "swap":
        return 0, 0
    asked = DEFAULT_SWAP_SPACE if config.swap_space is None else config.swap_space
    space = parse_memory(asked, free, name="swap_space")
    a_sequence = sizes.state + sizes.rows
    hosts = min(max_num_seqs, max(1, space // 2 // a_sequence)) if a_sequence else 0
    left = space - hosts * a_sequence
    fitting = min(left // sizes.attention, most_blocks) if sizes.attention and left > 0 else 0
    if left < 0 or (sizes.attention and fitting == 0):
        what = "one block" if a_sequence == 0 else "one block with the states of a sequence"
        raise ConfigError(
            f"swap_space is {asked!r}, {space:,} bytes; {what} takes {sizes.attention + a_sequence:,}. Give a unit, as "
            f"in '4GiB'"
        )
    _check_free(f"swap_space={asked!r}", fitting * sizes.attention + hosts * a_sequence, free)
    return fitting, hosts


def choose_num_blocks(
    config: CacheConfig,
    block_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    free: int | None,
    blocks_a_sequence: int | None = None,
) -> int:
    """Return N: as given, or the blocks that fit into the memory budget, up to max_num_seqs sequences of full length.

    block_bytes: `bytes_per_block`. free: `free_memory`. blocks_a_sequence: maximum number of blocks of a sequence of
    max_model_len tokens, if windows make that fewer than for all of its tokens. Raises ConfigError if one sequence of
    max_model_len tokens does not fit into the budget, or the memory is not free.
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


def _check_free(option: str, wanted: int, free: int | None) -> None:
    if free is not None and wanted > free:
        raise ConfigError(f"{option} asks for {_mib(wanted)}; only {_mib(free)} are free")


def _mib(amount: int) -> str:
    return f"{amount / 2**20:,.1f} MiB"


def free_memory(device: str = "cpu", root: Path = Path("/")) -> int | None:
    """Return the free bytes: the GPU's, or MemAvailable limited by the remaining memory of the control groups.

    None if the system does not report it. root: the directory of /proc and /sys.
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
    """Return the bytes that each control group of this process, and each one above it, still allows."""
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
    """Return the bytes that one control group still allows; nothing if it sets no limit."""
    try:
        headroom = int(limit.read_text()) - int(usage.read_text())
        # Inactive file pages count as used, but the kernel drops them when it needs memory.
        cached = [int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("inactive_file ")]
    except (OSError, ValueError):  # no such group, or "max"
        return []
    return [max(0, headroom + sum(cached))]
