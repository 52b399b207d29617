"""KVCache: layout and sizing."""

from pathlib import Path

import pytest
import torch

from quire.cache import storage
from quire.cache.groups import CacheGroup, Heads, StatePools, StateSizes
from quire.cache.sizing import choose_num_blocks, free_memory
from quire.cache.storage import KVCache, bytes_of_states, bytes_per_block, group_spec, recurrent_spec, state_groups
from quire.config import CacheConfig, parse_memory
from quire.errors import BadValue, ConfigError
from quire.ops.memory import HUGE_PAGE
from quire.ops.recurrent.records import RecurrentCache, check_cache
from quire.ops.spec import check_kv

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=8)
GROUP = (CacheGroup((0, 1, 2), heads=HEADS),)


def test_layers_are_separate_views_with_k_and_v_side_by_side() -> None:
    cache = KVCache(GROUP, num_blocks=5, block_size=4, dtype=torch.bfloat16)
    for layer in range(3):
        kv = cache.layer(layer)
        assert kv.k.shape == kv.v.shape == (5, 2, 4, 8)
        assert kv.v.data_ptr() - kv.k.data_ptr() == 2 * 4 * 8 * kv.k.element_size()
        kv.k.fill_(layer)
        kv.v.fill_(-layer - 1)
    for layer in range(3):
        assert (cache.layer(layer).k == layer).all()
        assert (cache.layer(layer).v == -layer - 1).all()


def test_memory_on_a_cpu_starts_at_a_huge_page_and_holds_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    for resident in (0, 2**20, 2**40):
        monkeypatch.setattr(storage, "RESIDENT", resident)
        cache = KVCache(GROUP, num_blocks=4800, block_size=16, dtype=torch.float16)
        for layer in range(3):
            kv = cache.layer(layer)
            assert kv.k.data_ptr() % HUGE_PAGE == 0
            assert not kv.k.any()
            assert not kv.v.any()
            assert cache.layer(layer) is kv


def test_bytes_of_a_block() -> None:
    """Llama-3.2-1B: 32 KiB of KV a token over its 16 layers."""
    groups = (CacheGroup(tuple(range(16)), heads=Heads(32, 8, 64)),)
    assert bytes_per_block(groups, 16, torch.bfloat16) == 16 * 32 * 1024
    cache = KVCache(groups, 3, 16, torch.bfloat16)
    total = sum(2 * cache.layer(i).k.numel() * 2 for i in range(16))
    assert total == 3 * bytes_per_block(groups, 16, torch.bfloat16)


def test_groups_differ_in_heads() -> None:
    groups = (CacheGroup((0, 2), heads=Heads(4, 2, 8)), CacheGroup((1,), window=6, heads=Heads(4, 1, 32)))
    cache = KVCache(groups, 3, 4, torch.float32)
    assert [tuple(cache.layer(i).k.shape) for i in range(3)] == [(3, 2, 4, 8), (3, 1, 4, 32), (3, 2, 4, 8)]
    assert bytes_per_block(groups, 4, torch.float32) == 2 * (2 * 2 * 4 * 8 + 4 * 32) * 4
    specs = [group_spec(group, 4, 3, torch.float32) for group in groups]
    assert [(spec.num_kv_heads, spec.head_dim, spec.window) for spec in specs] == [(2, 8, None), (1, 32, 6)]
    for spec, group in zip(specs, range(2), strict=True):
        for kv in cache.layers(group):
            check_kv(kv, spec)


def test_a_latent_cache_stores_v_within_k() -> None:
    """DeepSeek-V3: 576 numbers a token and layer, of which 512 are the latent."""
    group = CacheGroup((0, 1), heads=Heads(128, 1, 576, latent=512))
    assert bytes_per_block((group,), 16, torch.bfloat16) == 2 * 16 * 576 * 2
    kv = KVCache((group,), 3, 16, torch.bfloat16).layer(1)
    check_kv(kv, group_spec(group, 16, 3, torch.bfloat16))
    kv.k[1, 0, 5] = torch.arange(576)
    assert torch.equal(kv.v[1, 0, 5], kv.k[1, 0, 5, :512])


def test_a_latent_cache_of_int8_has_two_scales_a_row() -> None:
    group = CacheGroup((0, 1), heads=Heads(6, 2, 20, latent=16))
    assert bytes_per_block((group,), 5, torch.int8) == 2 * 2 * 5 * (20 + 4 + 4)
    kv = KVCache((group,), 3, 5, torch.int8).layer(1)
    spec = group_spec(group, 5, 3, torch.bfloat16, torch.int8)
    check_kv(kv, spec)
    assert spec.latent
    for x in kv.tensors().values():
        x.zero_()
    kv.k[1, 1, 4] = torch.arange(1, 21)
    kv.k_scale[1, 1, 4], kv.v_scale[1, 1, 4] = 2.0, 3.0
    assert torch.equal(kv.v[1, 1, 4], kv.k[1, 1, 4, :16])
    assert (kv.k_scale.sum(), kv.v_scale.sum(), kv.k.sum()) == (2.0, 3.0, 210)  # in memory of their own


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
    assert choose_num_blocks(config, 2**14, max_model_len=160, max_num_seqs=256, free=None) == 64
    assert choose_num_blocks(config, 2**14, max_model_len=161, max_num_seqs=2, free=2**30) == 22
    assert choose_num_blocks(CacheConfig(kv_cache_memory=0.25), 2**14, 16, 256, free=2**20) == 16
    assert choose_num_blocks(CacheConfig(num_blocks=3), 2**14, 16_000, 256, free=None) == 3


def test_a_budget_too_small_for_one_sequence_says_what_would_fit() -> None:
    config = CacheConfig(block_size=16, kv_cache_memory="1MiB")
    message = r"1\.0 MiB .* holds 1,024 tokens; .*max_model_len=2,000 .* 2\.0 MiB.* at most 1,024"
    with pytest.raises(ConfigError, match=message):
        choose_num_blocks(config, 2**14, max_model_len=2000, max_num_seqs=1, free=2**30)
    with pytest.raises(ConfigError, match=r"holds 0 tokens; .* Give more memory$"):
        choose_num_blocks(CacheConfig(kv_cache_memory="1KiB"), 2**14, 2000, 1, free=2**30)


def test_more_than_there_is_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"num_blocks=100 asks for 1\.6 MiB; only 1\.0 MiB are free"):
        choose_num_blocks(CacheConfig(num_blocks=100), 2**14, 16, 1, free=2**20)
    with pytest.raises(ConfigError, match=r"kv_cache_memory='2GiB' asks for 2,048\.0 MiB; only 1\.0 MiB are free"):
        choose_num_blocks(CacheConfig(kv_cache_memory="2GiB"), 2**14, 16, 1, free=2**20)


def test_a_share_of_an_unknown_amount_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not report how much memory is free; give bytes"):
        choose_num_blocks(CacheConfig(), 2**14, 16, 1, free=None)


def machine(root: Path, cgroup: str | None, files: dict[str, str]) -> Path:
    """A /proc and a /sys to read from."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:     4000 kB\n")
    if cgroup is not None:
        (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2_JOB = {"a/memory.max": "2000000", "a/memory.current": "1900000", "a/memory.stat": "anon 5\ninactive_file 800000\n"}
V2_STEP = {"a/b/memory.max": "max", "a/b/memory.current": "3", "a/b/memory.stat": ""}
V1 = {"memory/j/memory.limit_in_bytes": "70000", "memory/j/memory.usage_in_bytes": "60000", "memory/j/memory.stat": ""}


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (None, {}, 4000 * 1024),
        ("0::/\n", {}, 4000 * 1024),
        ("0::/a/b\n", V2_JOB | V2_STEP, 2_000_000 - 1_900_000 + 800_000),  # the limit stands one group above ours
        ("0::/a/b\n", V2_JOB | V2_STEP | {"a/memory.current": "9000000"}, 0),
        ("4:cpu:/x\n7:memory:/j\n", V1, 10_000),
    ],
)
def test_free_memory_is_held_to_the_control_groups(
    tmp_path: Path, cgroup: str | None, files: dict[str, str], expected: int
) -> None:
    assert free_memory(root=machine(tmp_path, cgroup, files)) == expected


def test_free_memory_of_this_machine_and_of_one_that_does_not_tell(tmp_path: Path) -> None:
    assert free_memory(root=tmp_path) is None
    assert 0 < (free_memory() or 1) < 2**50


def test_the_page_says_how_much_of_the_cache_is_there_from_the_start() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cpu.md").read_text()
    assert f"the cache's first {storage.RESIDENT // 2**20} MiB are allocated" in page


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_and_rows_lie_apart_and_move_whole(dtype: torch.dtype) -> None:
    """Each number of each record is its own; what is swapped out comes back in another record, bit for bit."""
    sizes = StateSizes(num_heads=4, num_k_heads=2, dim_k=3, dim_v=5, width=7, taps=4)
    groups = (CacheGroup((0,), heads=Heads(2, 2, 8)), *state_groups((1, 2), sizes))
    pools = StatePools(3, 4, 2)
    cache = KVCache(groups, 5, 4, dtype, num_host_blocks=2, state_pools=pools)
    records = cache.layer(1)
    assert isinstance(records, RecurrentCache)
    check_cache(records, recurrent_spec(groups[1], pools, dtype))
    tensors = records.tensors()
    assert {name: len(tensor) for name, tensor in tensors.items()} == {
        "state": 3, "tail": 3, "keys": 4, "updates": 4, "decays": 4, "inputs": 4,
    }  # fmt: skip
    for i, tensor in enumerate(tensors.values()):
        for record in range(len(tensor)):
            tensor[record] = 10 * i + record
    for i, tensor in enumerate(tensors.values()):
        assert all((tensor[record] == 10 * i + record).all() for record in range(len(tensor)))
    cache.swap_out(1, [2, 0], [0, 1])
    cache.swap_out(2, [3], [1])
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    cache.swap_in(1, [1, 0], [1, 2])
    cache.swap_in(2, [1], [0])
    assert records.state[1:].flatten(1).unique(dim=1).flatten().tolist() == [0, 2]
    assert records.tail[1:].flatten(1).unique(dim=1).flatten().tolist() == [10, 12]
    assert [tensor[0].unique().item() for tensor in list(tensors.values())[2:]] == [23, 33, 43, 53]
    state, rows = bytes_of_states(groups, dtype)
    assert state % 128 == rows % 128 == 0
    assert state >= 2 * sum(tensor[0].numel() * tensor.element_size() for tensor in list(tensors.values())[:2])
    with pytest.raises(BadValue, match="layer 1 keeps a state; it has no K and V"):
        cache.kv(1)
