"""Several threads and one plan: right numbers or a QuireError, never a crash or a wrong number.

`make sanitize-threads` runs this file with the native kernels under ThreadSanitizer.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from quire import ops
from quire.errors import QuireError
from tests.ops.conftest import INTERPRETED, checked_once

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 16, 16, 96


@pytest.fixture(autouse=True)
def _several_threads(_one_thread: None) -> Iterator[None]:
    """Within a call, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def spec_for(device: str) -> ops.AttentionSpec:
    return ops.AttentionSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=BLOCK, num_blocks=BLOCKS, dtype=torch.float32,
        device=device,
    )  # fmt: skip


def cache_for(device: str) -> ops.PagedKV:
    shape = (BLOCKS, KV_HEADS, BLOCK, DIM)
    return ops.PagedKV(torch.randn(shape, device=device), torch.randn(shape, device=device))


def step(lens: list[int], rows: int = 1, first: int = 0) -> tuple[torch.Tensor, ...]:
    """Sequences of those lengths, each with as many query rows, in blocks from the first one on."""
    width = max(-(-n // BLOCK) for n in lens)
    tables = torch.arange(len(lens) * width).view(len(lens), width) + first
    return torch.arange(len(lens) + 1).int() * rows, torch.tensor(lens).int(), (tables % BLOCKS).int()


def side_by_side(*calls: Callable[[int], None], times: int) -> None:
    """Call each of them that often on a thread of its own, all at the same time. Raises what one of them raised."""
    start, raised = threading.Barrier(len(calls)), []

    def run(call: Callable[[int], None]) -> None:
        start.wait()
        try:
            for i in range(times):
                call(i)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def times_for(backend: ops.Backend) -> int:
    """As many as take some tenths of a second; the reference is slow, and Triton is interpreted."""
    return 400 if backend.name == "cpu" else 8


@pytest.mark.triton(cases=0)
def test_two_calls_with_one_plan(backend, device):
    spec, kv = spec_for(device), cache_for(device)
    plan = backend.plan(spec, *step([300 if backend.name in INTERPRETED else 1100, 90, 77, 1, 16]))
    queries = [torch.randn(5, HEADS, DIM, device=device) for _ in range(2)]
    wanted = [backend.attention(q, kv, plan, return_lse=True) for q in queries]

    def call(i: int) -> Callable[[int], None]:
        def attend(_: int) -> None:
            out, lse = backend.attention(queries[i], kv, plan, return_lse=True)
            assert torch.equal(out, wanted[i][0])
            assert torch.equal(lse, wanted[i][1])

        return attend

    side_by_side(call(0), call(1), times=times_for(backend))


@pytest.mark.triton(cases=0)
def test_an_update_meanwhile(backend, device):
    """A call sees one update or another, never half of one; where its rows do not fit that one, it raises."""
    spec, kv = spec_for(device), cache_for(device)
    plan = backend.make_plan(spec, 64, 64, 80)
    longest = 90 if backend.name in INTERPRETED else 1200
    steps = [step([300, 40, 50, 9]), step([20, longest, 3, 64], first=7), step([60] * 48)]
    q, wanted = torch.randn(4, HEADS, DIM, device=device), []
    for metadata in steps[:2]:
        plan.update(*metadata)
        wanted.append(backend.attention(q, kv, plan))
    done = {"right": 0, "refused": 0}

    def attend(_: int) -> None:
        try:
            out = backend.attention(q, kv, plan)
        except QuireError:
            done["refused"] += 1  # by the step of 48 sequences
        else:
            assert any(torch.equal(out, want) for want in wanted)
            done["right"] += 1

    rng = random.Random(0)
    side_by_side(attend, lambda _: plan.update(*rng.choice(steps)), attend, times=times_for(backend))
    assert sum(done.values()) == 2 * times_for(backend)
    assert done["right"]


@pytest.mark.triton(cases=0)
def test_writing_with_one_plan(backend, device):
    """Two layers' caches are written side by side."""
    spec, caches = spec_for(device), [cache_for(device) for _ in range(2)]
    rows = [torch.randn(40, KV_HEADS, DIM, device=device) for _ in range(2)]
    slots = torch.randperm(BLOCKS * BLOCK)[:40]
    plan = backend.plan(spec, *step([40], rows=40), slots)

    def write(i: int) -> Callable[[int], None]:
        return lambda _: backend.write_kv(rows[i], rows[i], caches[i], plan)

    side_by_side(write(0), write(1), times=times_for(backend))
    for kv, new in zip(caches, rows, strict=True):
        for row, slot in enumerate(slots.tolist()):
            assert torch.equal(kv.k[slot // BLOCK, :, slot % BLOCK], new[row])
            assert torch.equal(kv.v[slot // BLOCK, :, slot % BLOCK], new[row])


def test_each_thread_with_a_plan_of_its_own(backend, device):
    """Of one cache: reading it takes no turns."""
    if backend.name == "triton" and device == "cpu":
        pytest.skip("Triton's interpreter runs one kernel at a time; a plan's lock sees to that only for one plan")
    spec, kv = spec_for(device), cache_for(device)
    q = torch.randn(3, HEADS, DIM, device=device)
    plans = [backend.plan(spec, *step(lens)) for lens in ([900, 5, 130], [64, 1, 400])]
    wanted = [backend.attention(q, kv, plan) for plan in plans]

    def call(i: int) -> Callable[[int], None]:
        def attend(_: int) -> None:
            assert torch.equal(backend.attention(q, kv, plans[i]), wanted[i])

        return attend

    side_by_side(call(0), call(1), times=times_for(backend))


@checked_once
def test_a_plan_is_no_other_thing(backend, device):
    with pytest.raises(QuireError, match="plan is a NoneType"):
        backend.attention(torch.randn(1, HEADS, DIM), cache_for(device), None)
