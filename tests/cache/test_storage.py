"""KVCache: layout and sizing."""

from pathlib import Path

import pytest
import torch

from quire.cache.manager import CacheGroup
from quire.cache.storage import (
    KVCache,
    _cgroup_headroom,
    _meminfo_available,
    bytes_per_block,
    choose_num_blocks,
    free_memory,
)
from quire.config import CacheConfig, parse_memory
from quire.errors import ConfigError

GROUP = (CacheGroup((0, 1, 2)),)


def test_layers_are_separate_views_with_k_and_v_side_by_side() -> None:
    cache = KVCache(GROUP, num_blocks=5, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    for layer in range(3):
        kv = cache.layer(layer)
        assert kv.k.shape == kv.v.shape == (5, 2, 4, 8)
        assert kv.v.data_ptr() - kv.k.data_ptr() == 2 * 4 * 8 * kv.k.element_size()
        kv.k.fill_(layer)
        kv.v.fill_(-layer - 1)
    for layer in range(3):
        assert (cache.layer(layer).k == layer).all()
        assert (cache.layer(layer).v == -layer - 1).all()


def test_bytes_of_a_block() -> None:
    """Llama-3.2-1B: 32 KiB of KV a token over its 16 layers."""
    groups = (CacheGroup(tuple(range(16))),)
    assert bytes_per_block(groups, 16, 8, 64, torch.bfloat16) == 16 * 32 * 1024
    cache = KVCache(groups, 3, 16, 8, 64, torch.bfloat16)
    total = sum(2 * cache.layer(i).k.numel() * 2 for i in range(16))
    assert total == 3 * bytes_per_block(groups, 16, 8, 64, torch.bfloat16)


@pytest.mark.parametrize(
    ("amount", "expected"),
    [("2GiB", 2 * 2**30), ("1.5 GB", 1_500_000_000), (4096, 4096), ("4096", 4096), (0.5, 500), ("50%", 500), (1, 1000),
     ("100%", 1000), ("512 kib", 512 * 1024), ("12b", 12)],
)  # fmt: skip
def test_memory_amounts(amount: int | float | str, expected: int) -> None:
    assert parse_memory(amount, free=1000) == expected


@pytest.mark.parametrize("amount", ["", "GiB", "-1", -1, 0, "0GiB", "101%", "1 parsec", "1e400", True, float("nan")])
def test_bad_memory_amounts(amount: int | float | str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory is"):
        CacheConfig(kv_cache_memory=amount)


def test_blocks_fill_the_budget_up_to_what_can_be_used() -> None:
    config = CacheConfig(block_size=16, kv_cache_memory="1MiB")
    assert choose_num_blocks(config, 2**14, max_model_len=160, max_num_seqs=256, free=0) == 64
    assert choose_num_blocks(config, 2**14, max_model_len=161, max_num_seqs=2, free=0) == 22
    assert choose_num_blocks(CacheConfig(kv_cache_memory=0.25), 2**14, 16, 256, free=2**20) == 16
    assert choose_num_blocks(CacheConfig(num_blocks=3), 2**14, 16_000, 256, free=0) == 3


def test_a_budget_too_small_for_one_sequence_says_what_would_fit() -> None:
    config = CacheConfig(block_size=16, kv_cache_memory="1MiB")
    with pytest.raises(
        ConfigError, match=r"1\.0 MiB .* holds 1,024 tokens; .*max_model_len=2,000 .* 2\.0 MiB.* at most 1,024"
    ):
        choose_num_blocks(config, 2**14, max_model_len=2000, max_num_seqs=1, free=0)


def test_free_memory_is_held_to_the_control_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:     400 kB\n")
    assert _meminfo_available(meminfo) == 400 * 1024
    with pytest.raises(ConfigError, match="does not tell the free memory"):
        _meminfo_available(tmp_path / "nothing")
    limit, usage, stat = tmp_path / "memory.max", tmp_path / "memory.current", tmp_path / "memory.stat"
    assert _cgroup_headroom(limit, usage, stat, unlimited=77) == 77
    limit.write_text("max\n")
    usage.write_text("600\n")
    stat.write_text("anon 300\ninactive_file 250\n")
    assert _cgroup_headroom(limit, usage, stat, unlimited=77) == 77
    limit.write_text("1000\n")
    assert _cgroup_headroom(limit, usage, stat, unlimited=77) == 1000 - 600 + 250
    assert 0 < free_memory() < 2**50
