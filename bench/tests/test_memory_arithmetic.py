"""The arithmetic of memory that makes the case for paging, computed with the library's own functions.

It is told with rounded numbers: a request is "1.6 GB" (exactly 1.6777e9 bytes, or 1.5625 GiB), and 80 GB is what an
80 GB accelerator has, 80 GiB.
"""

from array import array

import pytest
import torch

from quire.cache.groups import CacheGroup, Heads
from quire.cache.manager import BlockManager
from quire.cache.storage import bytes_per_block
from quire.cache.usage import CacheUsage, cache_usage
from quire.request import Request, SamplingParams
from quire_bench.engine.contiguous import ContiguousAllocator
from quire_bench.engine.memory import KVSize

LAYERS = CacheGroup(tuple(range(40)), heads=Heads(40, 40, 128))
B13 = KVSize((LAYERS,), torch.float16, block_size=16)
MAX_MODEL_LEN = 2048
FOR_KV = 80 * 2**30 - 2 * 13 * 10**9  # without the 13e9 weights of two bytes each


def hold(lengths: list[int], block_size: int) -> tuple[list[Request], CacheUsage]:
    """Requests that have computed so many tokens, and how they use the cache."""
    manager = BlockManager((LAYERS,), num_blocks=5000, block_size=block_size, max_growth=max(lengths))
    requests = []
    for i, length in enumerate(lengths):
        request = Request(str(i), array("i", [i]) * length, length, SamplingParams())
        manager.admit(request, manager.lookup.match(request))
        assert manager.grow(request, length, [])
        manager.advance(request, length)
        assert len(request.cache.block_ids[0]) == manager.most_blocks(length, length, 0)
        requests.append(request)
    return requests, cache_usage(manager, requests)


def test_a_request_of_the_13b_model() -> None:
    assert B13.bytes_per_token == bytes_per_block((LAYERS,), 1, torch.float16) == 819_200
    assert MAX_MODEL_LEN * B13.bytes_per_token == B13.paged_bytes(MAX_MODEL_LEN) == 1_677_721_600  # 1.68 GB
    assert round(B13.paged_bytes(MAX_MODEL_LEN) / 2**30, 1) == 1.6  # the "1.6 GB", and eight of them "12.8 GB"
    assert 8 * B13.paged_bytes(MAX_MODEL_LEN) == 12.5 * 2**30


def test_requests_of_the_13b_model_in_80_gb() -> None:
    """About 35 against about 150, where requests are a quarter of max_model_len long in the mean."""
    assert B13.contiguous_fit(FOR_KV, MAX_MODEL_LEN) == B13.paged_fit(FOR_KV, MAX_MODEL_LEN) == 35
    # "0.4 GB" is 488 tokens: 31 blocks. A quarter of 2,048 tokens is 0.42 GB, and then it is 142.
    assert B13.paged_fit(FOR_KV, int(0.4e9 / B13.bytes_per_token)) == 147
    assert int(FOR_KV / 0.4e9) == 149
    assert B13.paged_fit(FOR_KV, MAX_MODEL_LEN // 4) == 142
    assert B13.contiguous_fit(80 * 10**9 - 26 * 10**9, MAX_MODEL_LEN) == 32  # with gigabytes of 1e9 throughout
    assert B13.paged_fit(80 * 10**9 - 26 * 10**9, MAX_MODEL_LEN // 4) == 128
    slots = ContiguousAllocator(FOR_KV // B13.bytes_per_token)  # the same, by reserving until it is refused
    assert sum(slots.allocate(MAX_MODEL_LEN) is not None for _ in range(200)) == 35
    assert 0 < slots.num_free < MAX_MODEL_LEN


@pytest.mark.parametrize(("tokens", "blocks", "wasted"), [(150, 10, 10), (500, 32, 12), (2000, 125, 0)])
def test_slots_wasted_at_block_size_16(tokens: int, blocks: int, wasted: int) -> None:
    """6.25, 2.34 and 0 % of the owned slots are wasted, shown as 6.3, 2.4 and 0."""
    _, usage = hold([tokens], 16)
    assert (usage.used_blocks, usage.wasted_slots, usage.filled_slots) == (blocks, wasted, tokens)
    shown = {150: 6.3, 500: 2.4, 2000: 0}[tokens]
    assert 100 * usage.wasted_slots / usage.used_slots == pytest.approx(shown, abs=0.06)


def test_slots_wasted_by_all_three() -> None:
    lengths = [150, 500, 2000]
    _, usage = hold(lengths, 16)
    assert (usage.used_blocks, usage.wasted_slots, usage.shared_slots) == (167, 22, 0)
    assert usage.wasted_slots / usage.used_slots < 0.04
    shares = [100 * (MAX_MODEL_LEN - length) / MAX_MODEL_LEN for length in lengths]
    assert shares == pytest.approx([92.7, 75.6, 2.3], abs=0.051)  # where each reserves max_model_len
    assert sum(shares) / 3 == pytest.approx(57, abs=0.2)


@pytest.mark.parametrize(("block_size", "entries", "worst"), [(1, 4096, 0), (16, 256, 15), (128, 32, 127)])
def test_block_tables_of_4096_tokens(block_size: int, entries: int, worst: int) -> None:
    [request], usage = hold([4096], block_size)
    assert len(request.cache.block_ids[0]) == entries
    assert usage.wasted_slots == 0
    _, usage = hold([4096 - worst], block_size)  # one token in the last block
    assert (usage.used_blocks, usage.wasted_slots) == (entries, worst)
