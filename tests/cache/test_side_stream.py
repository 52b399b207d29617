"""Swapping beside the computation, on streams that run in a random order wherever nothing makes them wait."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from quire.cache.manager import CacheGroup
from quire.cache.side_stream import Run, SideStream, runs
from quire.cache.storage import KVCache

GROUPS = (CacheGroup((0, 2, 3)), CacheGroup((1, 4), window=8))


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ([], [], []),
        ([4], [9], [(4, 9, 1)]),
        ([4, 5, 6], [1, 2, 3], [(4, 1, 3)]),
        ([4, 5, 6], [1, 2, 4], [(4, 1, 2), (6, 4, 1)]),
        ([4, 6, 7], [1, 2, 3], [(4, 1, 1), (6, 2, 2)]),
        ([6, 5, 4], [3, 2, 1], [(6, 3, 1), (5, 2, 1), (4, 1, 1)]),
        ([0, 1, 9, 10, 2], [5, 6, 0, 1, 7], [(0, 5, 2), (9, 0, 2), (2, 7, 1)]),
    ],
)
def test_runs(src: list[int], dst: list[int], expected: list[tuple[int, int, int]]) -> None:
    assert runs(src, dst) == [Run(*one) for one in expected]


def test_runs_name_every_pair_once() -> None:
    rng = random.Random(0)
    for _ in range(500):
        src, dst = (rng.sample(range(12), rng.randint(0, 12)) for _ in range(2))
        pairs = list(zip(src, dst, strict=False))
        found = runs([a for a, _ in pairs], [b for _, b in pairs])
        assert [(a + i, b + i) for a, b, length in found for i in range(length)] == pairs


class Event:
    def __init__(self) -> None:
        self.done = False

    def record(self, stream: Stream) -> None:
        self.done = False

        def mark() -> None:
            self.done = True

        stream.queue.append((None, mark))


class Stream:
    """Does what is queued, in order, some time later."""

    def __init__(self, device: object = None) -> None:
        self.queue: deque[tuple[Event | None, Callable[[], object]]] = deque()

    def wait_event(self, event: Event) -> None:
        self.queue.append((event, lambda: None))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Device:
    """Two streams, and who is current."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.main = self.current = Stream()
        self.streams = [self.main]
        self.copies = 0

    def new_stream(self, device: object) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def advance(self, most: int) -> None:
        """Do up to so many things, of any stream that does not wait."""
        for _ in range(most):
            ready = [s for s in self.streams if s.queue and (s.queue[0][0] is None or s.queue[0][0].done)]
            if not ready:
                return
            self.rng.choice(ready).queue.popleft()[1]()

    def finish(self) -> None:
        self.advance(10**9)
        assert not any(stream.queue for stream in self.streams), "streams wait for each other"


class Deferred(TorchFunctionMode):
    """Queues copies on the current stream."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        assert kwargs == {"non_blocking": True}
        self.device.copies += 1

        def copy() -> None:
            with torch._C.DisableTorchFunction():
                args[0].copy_(args[1])

        self.device.current.queue.append((None, copy))
        return args[0]


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    simulated = Device(request.param)
    monkeypatch.setattr(torch.cuda, "Stream", simulated.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: simulated.current)
    monkeypatch.setattr(torch.cuda, "stream", simulated.stream)
    return simulated


def filled_cache() -> KVCache:
    cache = KVCache(GROUPS, 12, 2, 1, 4, torch.float32, num_host_blocks=9)
    for pool in (cache._memory, cache._host):
        for layer, memory in pool.items():
            memory.copy_(torch.arange(memory.numel()).view(memory.shape) + 1_000 * layer)
    return cache


def steps(
    cache: KVCache, queue: Callable[[Callable[[], object]], object], between: Callable[[], object]
) -> list[float]:
    """Steps that swap, copy, and read and write blocks of the layers; some end before all layers had their turn."""
    rng, read = random.Random(7), list[float]()

    def compute(layer: int, out: int, into: int, value: float) -> Callable[[], object]:
        k = cache._layers[layer].k
        return lambda: (read.append(float(k[out].sum())), k[into].fill_(value))

    for step in range(60):
        for g in range(len(GROUPS)):
            for swap, ends in ((cache.swap_out, (12, 9)), (cache.swap_in, (9, 12))):
                count, (a, b) = rng.choice([0, 0, 1, 3, 6]), ends
                start = rng.randint(0, 3)
                src = rng.choice([list(range(start, start + count)), rng.sample(range(a), count)])
                swap(g, src, rng.sample(range(b), count))
        between()
        if rng.random() < 0.3:
            group = rng.randrange(len(GROUPS))
            cache.layers(group)
            for layer in GROUPS[group].layers:
                queue(compute(layer, rng.randrange(12), rng.randrange(12), step - 0.5))
        if rng.random() < 0.2:
            cache.settle()
        for layer in range(rng.choice([5, 5, 2])):
            cache.layer(layer)
            queue(compute(layer, rng.randrange(12), rng.randrange(12), float(step)))
            between()
    cache.settle()
    return read


@pytest.mark.parametrize("device", range(40), indirect=True)
def test_whatever_order_streams_run_in_the_results_are_those_of_one_after_the_other(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run together with a cache without a stream, of whose blocks nothing is ever late."""
    plain, cache = filled_cache(), filled_cache()
    expected = steps(plain, lambda call: call(), lambda: None)
    registered: list[int] = []
    runtime = type("Runtime", (), {"cudaHostRegister": staticmethod(lambda *given: registered.append(given[0]) or 0)})
    monkeypatch.setattr(torch.cuda, "cudart", runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    cache._side = SideStream(torch.device("cuda"), list(cache._host.values()))
    assert registered == [memory.data_ptr() for memory in cache._host.values()]
    with Deferred(device):
        found = steps(
            cache,
            lambda call: device.main.queue.append((None, call)),
            lambda: device.advance(device.rng.choice([0, 1, 5, 30])),
        )
    device.finish()
    assert device.copies > 100
    assert found == expected
    for pool, wanted in ((cache._memory, plain._memory), (cache._host, plain._host)):
        for layer, memory in pool.items():
            assert torch.equal(memory, wanted[layer])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    """Blocks go to the host and come back while the current stream is busy, and the pool is not pinned for ever."""
    cache = KVCache(GROUPS, 64, 16, 8, 128, torch.bfloat16, "cuda", num_host_blocks=32)
    host = cache._host[0]
    assert host.is_pinned()
    work = torch.randn(4_096, 4_096, device="cuda")
    for layer in range(5):
        cache.layer(layer).k.copy_(torch.arange(64, device="cuda")[:, None, None, None] + layer)
    for _ in range(50):
        work = work @ work / 64
    for g in range(2):
        cache.swap_out(g, range(32), range(32))
    for layer in range(5):
        cache.layer(layer).k[:32] = -1  # who writes now must not be seen on the host
    for g in range(2):
        cache.swap_in(g, range(32), range(31, -1, -1))
    for layer in range(5):
        expected = torch.cat([torch.arange(31, -1, -1), torch.arange(32, 64)]) + layer
        assert cache.layer(layer).k[:, 0, 0, 0].tolist() == expected.tolist()
    del cache
    assert not host.is_pinned()
